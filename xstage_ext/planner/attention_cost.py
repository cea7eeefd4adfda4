"""What the parts of an attention layer and of its output All-to-All take: tiles, bursts, ends."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping

from .. import machine, model
from .attention import COMPLETIONS, AttentionPlan, row_pad_for
from .attention_problem import AttentionProblem

_RATE = {128: 0.94, 64: 0.77}
"""Share of the dense matrix rate that the main loop sustains, by head size. Fitted to fa3 alone on
one H200: 17 of 18 shapes of 4,096 to 75,600 rows within 7 percent, the other 12."""
_BLOCK_M = {64: 192, 128: 128}
_BLOCK_N = {64: 128, 128: 160}
_LOADS_AHEAD = 2
_SLICE_BYTES = 8192
_MOST_SHADOW = 0.04
"""Of a tile's time: a whole tile's shadow that slices are not worth. SMs that do not start together
drift apart, and slices all the way keep the link awake, whose watts come out of the clock."""

WAYS = ("whole tiles", "slices", "fence", "serial")
"""Piggyback: a tile at once, or in slices between steps of the next one; `fence`: every tile waits
until it is visible, the counterfactual. Serial: attention first, then an All-to-All."""


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Query tiles of the rank with most heads, on a machine."""

    sms: int
    per_sm: int
    us: float
    step_us: float
    steps: int
    bytes: int

    @classmethod
    def of(
        cls,
        problem: AttentionProblem,
        profile: machine.MachineProfile,
        given: Mapping[str, int] | None = None,
    ) -> Tiles:
        """`given`: launch fields of the caller; 0 leaves the choice to the kernel there too."""
        asked = given or {}
        block_m = asked.get("block_m") or _BLOCK_M.get(problem.head_dim, 128)
        block_n = asked.get("block_n") or _BLOCK_N.get(problem.head_dim, 128)
        sms = asked.get("num_sms") or profile.gpu.num_sms
        blocks = sum(math.ceil(rows / block_m) for rows in problem.rows)
        tiles = problem.batch * max(problem.query_shares) * blocks
        keys = sum(problem.key_rows) * (0.5 if problem.causal else 1.0)
        share = _RATE.get(problem.head_dim, _RATE[64])
        rate = share * profile.rates.matrix_tflops["bf16"] * 1e6 / profile.gpu.num_sms
        steps = max(1, math.ceil(keys / block_n))
        step_us = 4.0 * block_m * block_n * problem.head_dim / rate
        return cls(
            sms=sms,
            per_sm=max(1, math.ceil(tiles / sms)),
            us=steps * step_us + profile.rates.tile_overhead_us,
            step_us=step_us,
            steps=steps,
            bytes=2 * block_m * problem.head_dim,
        )


@dataclasses.dataclass(frozen=True)
class Ends:
    """What a call takes beside its tiles, in us.

    Attributes
    ----------
    launch_us : float
        Of a kernel.
    drain_us : float
        All output bytes over the link at once.
    tail_us : float
        Remote bytes on the way when the last tile of the fused kernel is done.
    signal_us : float
        From a rank's last byte until its peers know.
    """

    launch_us: float
    drain_us: float = 0.0
    tail_us: float = 0.0
    signal_us: float = 0.0

    @classmethod
    def of(cls, problem: AttentionProblem, tiles: Tiles, profile: machine.MachineProfile) -> Ends:
        launch_us = profile.rates.launch_us
        if problem.world == 1:
            return cls(launch_us)
        mechanism = profile.mechanism("tma")
        link = float(mechanism.R_GBps(tiles.sms)) * _row_share(problem)
        drain_us = problem.egress_bytes / link / 1e3
        # Own tiles come last, so only a call of one wave ends with its remote bytes on the way.
        tail_us = drain_us if tiles.per_sm == 1 else 0.0
        return cls(launch_us, drain_us, tail_us, mechanism.visibility_us + profile.rates.flag_us)


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to send the output of a layer, and what the law says of it.

    Attributes
    ----------
    name : str
        One of `WAYS`.
    law : BurstGap
        Of its bursts: whole tiles, slices, or (serial) everything at once.
    gap_us : float
        Time without stores behind a burst, G.
    bursts : int
        Of a tile; of the call where it is serial.
    shadow_us : float or None
        Wait of a load that is issued right behind a burst when all SMs burst together; None where
        no load follows before the bytes have left.
    shadow_adds_us : float
        What shadows add to the call at most, beyond what the loads in flight cover: as much if the
        SMs stayed in step. `us` leaves it out.
    us : float
        Makespan: from the start of the kernel until the results are there.
    """

    name: str
    law: model.BurstGap
    gap_us: float
    bursts: int
    shadow_us: float | None
    shadow_adds_us: float
    us: float


def makespans(
    problem: AttentionProblem,
    tiles: Tiles,
    profile: machine.MachineProfile,
    slice_bytes: int = 0,
) -> dict[str, float]:
    """By way of sending (fused in slices of so many bytes, or in whole tiles), and of attention
    alone, us. In a world of one nothing is sent, and all are attention alone.
    """
    ends = Ends.of(problem, tiles, profile)
    alone = ends.launch_us + tiles.per_sm * tiles.us
    if problem.world == 1:
        return dict.fromkeys(("attention", "fused", "serial", "coupled"), alone)
    stall_us = stalls_us(problem, tiles, profile, slice_bytes)
    fence_us = float(_whole_tiles(problem, tiles, profile).completion_coupled(tiles.us))
    return {
        "attention": alone,
        "fused": alone + (tiles.per_sm - 1) * stall_us + ends.tail_us + ends.signal_us,
        "serial": alone + ends.launch_us + ends.drain_us + ends.signal_us,
        "coupled": alone + tiles.per_sm * fence_us + ends.signal_us,
    }


def stalls_us(
    problem: AttentionProblem, tiles: Tiles, profile: machine.MachineProfile, slice_bytes: int
) -> float:
    """Time that one tile's stores take from the main loop, beyond their issue."""
    if slice_bytes == 0:
        return float(_whole_tiles(problem, tiles, profile).stall(tiles.us))
    law, gap_us = _slices(problem, tiles, profile, slice_bytes)
    return float(law.stall(gap_us)) * math.ceil(tiles.bytes / slice_bytes)


def sends(plan: AttentionPlan) -> str:
    """Which of `WAYS` a fused plan is."""
    if COMPLETIONS[plan.completion] == "every_tile":
        return "fence"
    return "slices" if plan.slice_bytes else "whole tiles"


def ways(
    problem: AttentionProblem,
    tiles: Tiles,
    profile: machine.MachineProfile,
    slice_bytes: int = 0,
) -> tuple[Way, ...]:
    """Every way to send, by the law; none where nothing is sent.

    Parameters
    ----------
    slice_bytes : int
        Of the plan; 0: the planner's.
    """
    if problem.world == 1:
        return ()
    size = slice_bytes or _SLICE_BYTES
    whole = _whole_tiles(problem, tiles, profile)
    slices, gap_us = _slices(problem, tiles, profile, size)
    at_once = _at_once(problem, tiles, profile)
    us, paced_us = (makespans(problem, tiles, profile, nbytes) for nbytes in (0, size))
    count = math.ceil(tiles.bytes / size)
    shadows = [_shadow_us(problem, tiles, profile, tiles.bytes / n) for n in (1, count)]
    covered_us = _LOADS_AHEAD * tiles.step_us
    adds = [
        (tiles.per_sm - 1) * n * max(0.0, shadow_us - covered_us)
        for n, shadow_us in zip((1, count), shadows, strict=True)
    ]
    return (
        Way("whole tiles", whole, tiles.us, 1, shadows[0], adds[0], us["fused"]),
        Way("slices", slices, float(gap_us), count, shadows[1], adds[1], paced_us["fused"]),
        Way("fence", whole, tiles.us, 1, None, 0.0, us["coupled"]),
        Way("serial", at_once, 0.0, 1, None, 0.0, us["serial"]),
    )


def _remote(problem: AttentionProblem) -> float:
    return 1.0 - 1.0 / problem.world


def _whole_tiles(
    problem: AttentionProblem, tiles: Tiles, profile: machine.MachineProfile
) -> model.BurstGap:
    return _bursts(profile, tiles.sms, tiles.bytes, _remote(problem))


@functools.lru_cache(maxsize=64)
def _bursts(
    profile: machine.MachineProfile, sms: int, nbytes: int, remote: float
) -> model.BurstGap:
    """Cached: of a decision's time, looking up this law (several times) would be the most."""
    return model.BurstGap.of(
        profile.mechanism("tma"), sms, nbytes, remote_share=remote, both_directions=True
    )


def _slices(
    problem: AttentionProblem, tiles: Tiles, profile: machine.MachineProfile, slice_bytes: int
) -> tuple[model.BurstGap, machine.FloatArray]:
    share = _remote(problem)
    return model.paced(
        profile, "tma", tiles.sms, tiles.bytes, tiles.us, slice_bytes, remote_share=share
    )


def _at_once(
    problem: AttentionProblem, tiles: Tiles, profile: machine.MachineProfile
) -> model.BurstGap:
    """The All-to-All of its own: one burst of all bytes, at the rate that parts of rows reach."""
    mechanism = profile.mechanism("tma")
    return model.BurstGap(
        T0_us=mechanism.T0_us(tiles.sms, problem.egress_bytes / tiles.sms),
        R_GBps=mechanism.R_GBps(tiles.sms) * _row_share(problem),
        Q_bytes=mechanism.Q_bytes(tiles.sms),
        V_bytes=problem.egress_bytes,
        visibility_us=mechanism.visibility_us,
    )


def _shadow_us(
    problem: AttentionProblem, tiles: Tiles, profile: machine.MachineProfile, nbytes: float
) -> float:
    sent = nbytes * _remote(problem)
    return float(model.burst_shadow(profile, "tma", "tma_load", tiles.sms, sent))


def _row_share(problem: AttentionProblem) -> float:
    """Share of the link's rate that parts of rows reach; see `row_pad_for`. Measured by a probe."""
    if problem.world == 1 or row_pad_for(2 * problem.heads * problem.head_dim) == 0:
        return 1.0
    return 0.79 if problem.world == 2 else 0.66


def pacing(
    problem: AttentionProblem, tiles: Tiles, profile: machine.MachineProfile
) -> tuple[dict[str, int], str]:
    """Slices when the shadow of a whole tile outlasts the loads in flight before it, and is more
    than a little beside the tile.

    Measured on 2 x H200 (docs/perf_log.md), whole tiles over slices: 1.063, 1.017 and 0.997 at
    4,096, 8,192 and 16,384 rows and head size 128, 0.993, 0.991 and 0.985 at 32,760, 75,600 and
    118,800; 1.002 at 17,776 rows and head size 64.
    """
    if tiles.per_sm == 1:
        return {}, "whole tiles, behind which no other follows"
    shadow_us = _shadow_us(problem, tiles, profile, tiles.bytes)
    slack_us = _LOADS_AHEAD * tiles.step_us
    if problem.world == 1 or shadow_us <= slack_us:
        return {}, f"whole tiles, whose shadow ({shadow_us:.1f} us) the loads in flight cover"
    if shadow_us <= _MOST_SHADOW * tiles.us:
        return {}, f"whole tiles, whose shadow is {shadow_us:.1f} us of {tiles.us:.0f}"
    slices = math.ceil(tiles.bytes / _SLICE_BYTES)
    steps = max(1, int(0.9 * tiles.steps / slices))
    return (
        {"slice_bytes": _SLICE_BYTES, "slice_steps": steps},
        f"paced in slices of {_SLICE_BYTES} bytes every {steps} steps, since a whole tile's shadow "
        f"({shadow_us:.1f} us) outlasts the loads in flight ({slack_us:.1f} us)",
    )
