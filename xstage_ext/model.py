"""The Burst-Gap law: how long a producer is held up when it stores to a peer.

K producers store B bytes each (V = K B bytes across the link per burst), compute for G, and store
again. With the back-pressure-free issue time T0, the drain rate R and the outstanding capacity Q:

    q_{n+1} = max(0, q_n + V - R (T_n + G))         bytes in flight when burst n + 1 begins
    T_n     = max(T0, (q_n + V - Q) / R)            issue time seen by the sender
    steady:   T_iss = max(T0, V/R - G, (V - Q)/R)

docs/model.md derives it. Everything here is pure and vectorised: arguments are numbers or arrays
that broadcast; times are us, rates GB/s, volumes bytes that cross the link.
"""

from __future__ import annotations

import dataclasses
import enum

import numpy as np
import numpy.typing as npt

from .machine import FloatArray, FloatLike, MachineProfile, Mechanism, Shadow

BYTES_PER_US_PER_GBPS = 1e3
"""One GB/s moves this many bytes in one microsecond."""


class Regime(enum.IntEnum):
    """Which term of the steady law governs."""

    FREE = 0
    """T_iss = T0: the store costs its issue only."""
    DRAIN = 1
    """T_iss = V/R - G: the period is fixed by the link; any gap converts waiting into work."""
    CAPACITY = 2
    """T_iss = (V - Q)/R: the pipe is empty at every burst, yet one burst overfills it."""


def _floats(values: FloatLike) -> FloatArray:
    return np.asarray(values, dtype=np.float64)


def drain_us(V_bytes: FloatLike, R_GBps: FloatLike) -> FloatArray:
    """Time V/R that the link needs for V bytes, in us."""
    return np.asarray(_floats(V_bytes) / (_floats(R_GBps) * BYTES_PER_US_PER_GBPS))


@dataclasses.dataclass(frozen=True)
class Transient:
    """What the recursion yields for a train of bursts; arrays of shape [bursts, ...]."""

    T_iss_us: FloatArray
    q_bytes: FloatArray
    """Bytes in flight when the burst begins."""
    visible_us: FloatArray
    """From the begin of the burst until its last byte has left, in us."""


def drain_GBps(mechanism: Mechanism, K: FloatLike, both_directions: bool = False) -> FloatArray:
    """Drain rate R of K producers; with both directions busy where that was measured.

    Fewer producers than were measured that way have what they have alone, up to the rate of the
    first measured number: a few do not fill the link, whatever comes the other way.
    """
    alone, both = mechanism.R_GBps(K), mechanism.R_both_GBps
    if not both_directions or both is None:
        return alone
    few = np.minimum(alone, both.values[0])
    return np.where(_floats(K) < both.producers[0], few, both(K))


@dataclasses.dataclass(frozen=True)
class BurstGap:
    """The law for given T0, R, Q and V, each a number or an array; all broadcast together.

    Attributes
    ----------
    T0_us, R_GBps, Q_bytes, V_bytes : array_like
        As in the module's text. T0 >= 0, R > 0, Q >= 0, V >= 0.
    visibility_us : array_like
        From the last byte's departure until a fence returns; only `completion_coupled` uses it.
    """

    T0_us: FloatLike
    R_GBps: FloatLike
    Q_bytes: FloatLike
    V_bytes: FloatLike
    visibility_us: FloatLike = 0.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = np.asarray(getattr(self, field.name), dtype=np.float64)
            minimum = np.nextafter(0.0, 1.0) if field.name == "R_GBps" else 0.0
            if np.any(~(value >= minimum)):
                raise ValueError(
                    f"xstage.model: {field.name}: expected values >= 0 (R > 0), got {value}"
                )
            object.__setattr__(self, field.name, value)

    @classmethod
    def of(
        cls,
        mechanism: Mechanism,
        K: FloatLike,
        B_bytes: FloatLike,
        *,
        remote_share: FloatLike = 1.0,
        background_GBps: FloatLike = 0.0,
        both_directions: bool = False,
        slowest: bool = False,
    ) -> BurstGap:
        """The law of a machine's mechanism for K producers of B bytes each.

        Parameters
        ----------
        remote_share : array_like
            Share of B that crosses the link; all of B is issued.
        background_GBps : array_like
            What else leaves this GPU at the same time, e.g. answers to the peers' reads; it is
            taken from R. At least a twentieth of R is left.
        both_directions : bool
            Use the rate measured with the opposite direction busy, where the profile has it.
        slowest : bool
            Predict the slowest producer instead of the mean one.
        """
        rate = drain_GBps(mechanism, K, both_directions)
        capacity = mechanism.Q_slowest_bytes if slowest else mechanism.Q_bytes
        volume = _floats(K) * _floats(B_bytes) * _floats(remote_share)
        return cls(
            T0_us=mechanism.T0_us(K, B_bytes),
            R_GBps=np.maximum(rate - _floats(background_GBps), 0.05 * rate),
            Q_bytes=capacity(K),
            V_bytes=volume,
            visibility_us=mechanism.visibility_us,
        )

    @property
    def _T0(self) -> FloatArray:
        return _floats(self.T0_us)

    @property
    def _Q(self) -> FloatArray:
        return _floats(self.Q_bytes)

    @property
    def _V(self) -> FloatArray:
        return _floats(self.V_bytes)

    @property
    def drain_us(self) -> FloatArray:
        """V/R in us."""
        return drain_us(self.V_bytes, self.R_GBps)

    @property
    def capacity_term_us(self) -> FloatArray:
        """(V - Q)/R in us; negative when one burst fits into the pipe."""
        return drain_us(self._V - self._Q, self.R_GBps)

    def steady(self, G_us: FloatLike) -> FloatArray:
        """T_iss once the train has settled: max(T0, V/R - G, (V - Q)/R), in us."""
        return np.maximum(
            self._T0, np.maximum(self.drain_us - _floats(G_us), self.capacity_term_us)
        )

    def free_running(self, G_us: FloatLike) -> FloatArray:
        """T_iss of a settled train that nothing holds in step: max(T0, V/R - G), in us.

        Producers are not served equally, so a train that begins in step is out of step after a few
        bursts: its bytes then come evenly over the period, and one burst no longer overfills the
        pipe. `steady` is for bursts that something aligns (a barrier, a wave, equal tiles).
        """
        return self.two_term(G_us)

    def period(self, G_us: FloatLike) -> FloatArray:
        """Time from burst to burst, T_iss + G, in us."""
        return np.asarray(self.steady(G_us) + _floats(G_us))

    def stall(self, G_us: FloatLike) -> FloatArray:
        """Back-pressure: T_iss - T0, in us."""
        return np.asarray(self.steady(G_us) - self._T0)

    def regime(self, G_us: FloatLike) -> npt.NDArray[np.int64]:
        """`Regime` of the steady train, as integers."""
        drain, capacity = self.drain_us - _floats(G_us), self.capacity_term_us
        bound = np.where(drain >= capacity, Regime.DRAIN, Regime.CAPACITY)
        free = np.maximum(drain, capacity) <= self._T0
        return np.asarray(np.where(free, Regime.FREE, bound), dtype=np.int64)

    def recovery_gap(self) -> FloatArray:
        """G*: the smallest gap after which a steady train is free, in us.

        max(0, V/R - T0); infinite where a single burst overfills the pipe (V > Q + R T0), since no
        gap frees that.
        """
        gap = np.maximum(0.0, self.drain_us - self._T0)
        return np.where(self.capacity_term_us > self._T0, np.inf, gap)

    def bursts_until_onset(self, G_us: FloatLike) -> FloatArray:
        """Index of the first burst that stalls in a train that starts with an empty pipe.

        0 where the first burst stalls already; infinite where none ever does.
        """
        growth = self.drain_us - self._T0 - _floats(G_us)
        slack = self._T0 - self.capacity_term_us
        with np.errstate(divide="ignore", invalid="ignore"):
            # The first n with n * growth > slack, strictly.
            index = np.floor(slack / growth) + 1.0
        index = np.where(growth > 0.0, index, np.inf)
        return np.asarray(np.where(slack < 0.0, 0.0, index))

    def transient(
        self, gaps_us: FloatLike, volume_scale: FloatLike = 1.0, q0_bytes: FloatLike = 0.0
    ) -> Transient:
        """Run the recursion over a train of bursts.

        Parameters
        ----------
        gaps_us : array_like, [bursts, ...]
            Gap *after* each burst.
        volume_scale : array_like, [bursts, ...] or a number
            Volume of each burst relative to V; T0 scales with it.
        q0_bytes : array_like
            Bytes in flight at the start.
        """
        gaps = _floats(gaps_us)
        scale = np.broadcast_to(_floats(volume_scale), gaps.shape)
        rate = _floats(self.R_GBps) * BYTES_PER_US_PER_GBPS
        shape = np.broadcast_shapes(gaps.shape[1:], rate.shape, self._V.shape)
        q = np.broadcast_to(_floats(q0_bytes), shape)
        rows_T, rows_q, rows_visible = [], [], []
        for gap, factor in zip(gaps, scale, strict=True):
            pending = q + factor * self._V
            issue = np.maximum(factor * self._T0, (pending - self._Q) / rate)
            rows_T.append(issue)
            rows_q.append(q)
            rows_visible.append(np.maximum(issue, pending / rate))
            q = np.maximum(0.0, pending - rate * (issue + gap))
        stack = [np.stack(np.broadcast_arrays(*rows)) for rows in (rows_T, rows_q, rows_visible)]
        return Transient(*stack)

    # The counterfactuals: laws that somebody believes or publishes, to be measured beside ours.

    def completion_coupled(self, G_us: FloatLike = 0.0) -> FloatArray:
        """The issuer waits until its bytes are visible (a fence after every burst), in us."""
        full = np.maximum(self._T0, self.drain_us) + _floats(self.visibility_us)
        return np.asarray(full + 0.0 * _floats(G_us))

    def unbounded_async(self, G_us: FloatLike = 0.0) -> FloatArray:
        """Stores never hold the issuer up: T_iss = T0, in us."""
        return np.asarray(self._T0 + 0.0 * self.drain_us + 0.0 * _floats(G_us))

    def rate_only(self, G_us: FloatLike) -> FloatArray:
        """Only the long-run rate binds: issue is free, buffers unlimited: max(0, V/R - G), in us.

        What a roofline of the link says (the period is max(G, V/R)); knows neither T0 nor Q.
        """
        return np.asarray(np.maximum(0.0, self.drain_us - _floats(G_us)))

    def two_term(self, G_us: FloatLike) -> FloatArray:
        """The published form max(T0, V/R - G), in us; right while V <= Q + R T0."""
        return np.maximum(self._T0, self.drain_us - _floats(G_us))


def shadow_us(
    shadow: Shadow,
    R_GBps: FloatLike,
    K: FloatLike,
    B_bytes: FloatLike,
    delay_us: FloatLike = 0.0,
) -> FloatArray:
    """Latency of a local operation issued `delay` after K producers began bursts of B bytes, in us.

    The operation waits for the burst bytes that are queued before it and have not left: all of them
    in one queue, at most `cross_bytes` per producer when store and operation use different paths.
    The wait approaches that ceiling smoothly, since SMs are not served equally and some are done
    before the others: ceiling * tanh(remaining / ceiling).
    """
    k = _floats(K)
    volume = k * _floats(B_bytes)
    queued = np.maximum(0.0, volume - shadow.passed_bytes(k))
    remaining = np.maximum(0.0, drain_us(queued, R_GBps) - _floats(delay_us))
    if shadow.cross_bytes is not None:
        ceiling = np.maximum(drain_us(k * shadow.cross_bytes, R_GBps), 1e-9)
        remaining = ceiling * np.tanh(remaining / ceiling)
    return np.asarray(shadow.base_us + remaining)


def burst_shadow(
    profile: MachineProfile,
    mechanism: str,
    operation: str,
    K: FloatLike,
    B_bytes: FloatLike,
    delay_us: FloatLike = 0.0,
) -> FloatArray:
    """`shadow_us` with a profile's parameters."""
    rate = profile.mechanism(mechanism).R_GBps(K)
    return shadow_us(profile.shadow_of(mechanism, operation), rate, K, B_bytes, delay_us)


def paced(
    profile: MachineProfile,
    mechanism: str,
    K: FloatLike,
    tile_bytes: FloatLike,
    tile_us: FloatLike,
    slice_bytes: FloatLike,
    *,
    remote_share: FloatLike = 1.0,
    duty: float = 0.9,
) -> tuple[BurstGap, FloatArray]:
    """A tile that leaves in equal slices over `duty` of the time until the next one.

    Returns
    -------
    law : BurstGap
        Of the train of slices.
    gap_us : array
        Gap between slices. `law.steady(gap_us)` is the issue time of one slice.
    """
    slices = np.maximum(1.0, np.ceil(_floats(tile_bytes) / _floats(slice_bytes)))
    law = BurstGap.of(
        profile.mechanism(mechanism), K, _floats(tile_bytes) / slices, remote_share=remote_share
    )
    step = duty * _floats(tile_us) / slices
    return law, np.asarray(np.maximum(0.0, step - np.asarray(law.T0_us)))
