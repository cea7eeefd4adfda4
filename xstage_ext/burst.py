"""The burst microbenchmarks: what a producer of remote stores feels, burst by burst.

`BurstBench` runs the operators `xstage::burst_*` (csrc/burst/README.md) on the current rank and
returns their clock stamps as NumPy arrays in microseconds. Calibration, validation and the doctor
are built on it. Every rank of the workspace takes part in a run that `join`s.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .errors import CalibrationError
from .planner import wire

MECHANISMS = {"st": 0, "bulk": 1, "tma": 2, "pull": 3}
SYNCS = {"free": 0, "barrier": 1, "timetable": 2}
PROBES = {"load": 0, "atomic": 1, "bulk_load": 2, "tma_load": 3}
LOOP_STORES = {"none": 0, "st": 1, "bulk": 2, "paced": 3}

FloatArray = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class BurstPlan:
    """Fields of csrc/burst/plan.h, XS_BURST_FIELDS."""

    mechanism: int
    producers: int
    bytes: int
    chunk_bytes: int
    row_stride: int
    producer_stride: int
    slot_stride: int
    slots: int
    destinations: int
    sync: int
    fence: int
    late_wait: int
    max_bursts: int
    window_cycles: int
    clock_khz: int
    join: int
    seed: int
    probe: int
    probe_bytes: int


@dataclasses.dataclass(frozen=True)
class BurstLoopPlan:
    """Fields of csrc/burst/plan.h, XS_BURST_LOOP_FIELDS."""

    blocks: int
    tiles: int
    steps: int
    repeats: int
    store: int
    tile_bytes: int
    slice_bytes: int
    slice_cycles: int
    chunk_bytes: int
    row_stride: int
    block_stride: int
    stagger_cycles: int
    destinations: int
    join: int


@dataclasses.dataclass(frozen=True)
class Point:
    """One configuration of `burst_run`.

    Attributes
    ----------
    mechanism : str
        `st`, `bulk`, `tma`, or `pull` (reads of the peer's memory).
    producers, nbytes : int
        K blocks, B bytes each per burst.
    gap_us : float
        Pause after a burst; with `sync="timetable"` the period from burst to burst.
    gaps_us : array [rows, n], optional
        A pause after each burst instead, cyclically; row `k % rows` belongs to producer k.
    bursts : int
        Bursts recorded, and issued when there is no window.
    window_us : float
        Every producer bursts until this time is over; 0 issues `bursts` each.
    sync : str
        `free`, `barrier` (all together, without a fence) or `timetable`.
    fence : bool
        Wait for visibility after every burst.
    late_wait : bool
        Wait for the copies' shared memory before its next use instead of at once.
    local : bool
        Send to this rank's own memory (the control).
    destinations : tuple of int, optional
        Ranks that receive; by default the next rank.
    row_bytes, row_stride : int, optional
        Scatter a burst as rows; contiguous by default (`tma`: 128-byte rows).
    join : bool
        Start together with every rank.
    """

    mechanism: str
    producers: int
    nbytes: int
    gap_us: float = 0.0
    gaps_us: FloatArray | None = None
    bursts: int = 64
    window_us: float = 0.0
    sync: str = "free"
    fence: bool = False
    late_wait: bool = False
    local: bool = False
    destinations: tuple[int, ...] | None = None
    row_bytes: int | None = None
    row_stride: int | None = None
    slots: int = 2
    join: bool = False
    seed: int = 1

    @property
    def volume(self) -> int:
        """V = K B, bytes."""
        return self.producers * self.nbytes


@dataclasses.dataclass(frozen=True)
class Trace:
    """What one run saw. Stamps are microseconds on each block's own clock, NaN where no burst was.

    Attributes
    ----------
    point : Point
    begin, issued, free, done : array [producers, bursts]
        Microseconds since the common start.
    bursts : array [producers]
        Bursts issued, also those that were not recorded.
    sm : array [producers]
        SM of each producer.
    drain_us : array [producers]
        From the end of the last burst until everything was visible.
    clock_mhz : float
        SM clock while the run lasted.
    """

    point: Point
    begin: FloatArray
    issued: FloatArray
    free: FloatArray
    done: FloatArray
    bursts: npt.NDArray[np.int64]
    sm: npt.NDArray[np.int64]
    drain_us: FloatArray
    clock_mhz: float

    @property
    def t_iss(self) -> FloatArray:
        """Issue time of every burst, [producers, bursts]: until the source is free again.

        With `late_wait` until the copies are handed over, which includes the wait for the source.
        """
        return (self.issued if self.point.late_wait else self.free) - self.begin

    @property
    def t_done(self) -> FloatArray:
        """Time until a burst is visible, [producers, bursts]; needs `fence`."""
        return self.done - self.begin


def largest_row(nbytes: int, most: int) -> int:
    """Largest power of two that divides `nbytes`, at most `most`."""
    return min(nbytes & -nbytes, most)


def burst_plan(
    point: Point,
    rank: int,
    world: int,
    clock_mhz: float,
    probe: str = "load",
    probe_bytes: int = 16384,
) -> BurstPlan:
    """Integers for the operator; gaps travel as a tensor beside them."""
    tma = point.mechanism == "tma"
    row = point.row_bytes or largest_row(point.nbytes, 128 if tma else 4096)
    stride = point.row_stride or row
    slot = -(-(point.nbytes // row) * stride // 1024) * 1024
    if tma:
        slot = -(-slot // stride) * stride
    if point.destinations is not None:
        ranks: Sequence[int] = point.destinations
    else:
        ranks = [rank if point.local else (rank + 1) % world]
    return BurstPlan(
        mechanism=MECHANISMS[point.mechanism],
        producers=point.producers,
        bytes=point.nbytes,
        chunk_bytes=row,
        row_stride=stride,
        producer_stride=slot * point.slots,
        slot_stride=slot,
        slots=point.slots,
        destinations=sum(1 << r for r in ranks),
        sync=SYNCS[point.sync],
        fence=int(point.fence),
        late_wait=int(point.late_wait),
        max_bursts=point.bursts,
        window_cycles=round(point.window_us * clock_mhz),
        clock_khz=round(clock_mhz * 1e3),
        join=int(point.join),
        seed=point.seed,
        probe=PROBES[probe],
        probe_bytes=probe_bytes,
    )


class BurstBench:
    """Runs burst points on one rank.

    Parameters
    ----------
    words : callable
        Returns the workspace descriptor of the operators' lease on this rank
        (`ChannelLease.words`); it raises when the workspace has failed.
    rank, world : int
    device : torch.device
    """

    def __init__(
        self, words: Callable[[], list[int]], rank: int, world: int, device: torch.device
    ) -> None:
        self._words = words
        self.rank = rank
        self.world = world
        self.device = device
        self.clock_mhz = 1980.0
        self.num_sms = torch.cuda.get_device_properties(device).multi_processor_count

    def calibrate_clock(self) -> float:
        """Set `clock_mhz` from a run on local memory; the first runs also wake the GPU up."""
        for _ in range(3):
            point = Point(
                "st", self.num_sms, 4096, gap_us=2.0, window_us=2000.0, bursts=1, local=True
            )
            self.clock_mhz = self.run(point).clock_mhz
        return self.clock_mhz

    def _cycles(self, us: npt.ArrayLike) -> torch.Tensor:
        cycles = np.rint(np.asarray(us, np.float64) * self.clock_mhz).astype(np.int32)
        return torch.from_numpy(cycles).to(self.device)

    def launch(self, point: Point) -> Any:
        """Start a run without waiting for it; pass the result to `collect`."""
        plan = burst_plan(point, self.rank, self.world, self.clock_mhz)
        gaps = point.gaps_us if point.gaps_us is not None else np.array([[point.gap_us]])
        results = torch.ops.xstage.burst_run(
            self._cycles(gaps), wire.pack("burst", plan), self._words()
        )
        return point, results

    def collect(self, pending: Any) -> Trace:
        """Wait for a run and convert its stamps."""
        point, (heads, stamps) = pending
        return _trace(point, heads.cpu().numpy(), stamps.cpu().numpy())

    def run(self, point: Point) -> Trace:
        """One run from start to end."""
        return self.collect(self.launch(point))

    def idle(self) -> None:
        """Take part in the start of a run in which this rank sends nothing."""
        self.collect(self.launch(Point("st", 0, 4096, join=True)))

    def shadow(
        self,
        point: Point,
        delays_us: Sequence[float],
        probe: str,
        probe_bytes: int = 16384,
        period_us: float = 100.0,
        repeats: int = 24,
    ) -> ShadowTrace:
        """Latency of one local operation per burst, `delay` after the burst's turn.

        The first `point.producers` blocks burst, all SMs probe.
        """
        point = dataclasses.replace(
            point, sync="timetable", window_us=0.0, bursts=repeats * len(delays_us)
        )
        plan = burst_plan(point, self.rank, self.world, self.clock_mhz, probe, probe_bytes)
        heads, stamps = torch.ops.xstage.burst_shadow(
            self._cycles([[period_us]]),
            self._cycles(list(delays_us)),
            wire.pack("burst", plan),
            self._words(),
        )
        times, mhz = _times(heads.cpu().numpy(), stamps.cpu().numpy())
        times = times.reshape(self.num_sms, repeats, len(delays_us), 4).transpose(2, 0, 1, 3)
        return ShadowTrace(point, probe, np.asarray(delays_us), times, mhz)

    def loop(self, plan: BurstLoopPlan, a: torch.Tensor, b: torch.Tensor) -> LoopTrace:
        """The main-loop probe (csrc/burst/loop.cuh)."""
        heads, stamps = torch.ops.xstage.burst_loop(
            a, b, wire.pack("burst_loop", plan), self._words()
        )
        head = heads.cpu().numpy()
        mhz = _clock_mhz(head)
        times = stamps.cpu().numpy().astype(np.float64) / mhz
        return LoopTrace(plan, times, head[:, 5] / mhz, head[:, 6] / mhz, mhz)


@dataclasses.dataclass(frozen=True)
class ShadowTrace:
    """Stamps of `BurstBench.shadow`.

    Attributes
    ----------
    times : array [delays, SMs, repeats, 4]
        Burst begin, burst source free, probe begin, probe end, in us.
    """

    point: Point
    probe: str
    delays_us: FloatArray
    times: FloatArray
    clock_mhz: float

    @property
    def latency(self) -> FloatArray:
        """Latency on the SMs that burst, [delays, producers, repeats], us."""
        return self._latency(slice(0, self.point.producers))

    @property
    def control(self) -> FloatArray:
        """Latency on the SMs that did not burst, us; empty when all did."""
        return self._latency(slice(self.point.producers, None))

    def _latency(self, sms: slice) -> FloatArray:
        return np.asarray(self.times[:, sms, :, 3] - self.times[:, sms, :, 2])


@dataclasses.dataclass(frozen=True)
class LoopTrace:
    """Stamps of `BurstBench.loop`.

    Attributes
    ----------
    times : array [blocks, tiles, 4]
        End of the tile's products; longest wait for a load; wait for the staging buffer; epilogue.
    begin_us, drain_us : array [blocks]
        Start of the block's loop, and from its end until its stores were visible.
    """

    plan: BurstLoopPlan
    times: FloatArray
    begin_us: FloatArray
    drain_us: FloatArray
    clock_mhz: float


def _clock_mhz(heads: npt.NDArray[np.int64]) -> float:
    if not np.all(heads[:, 7] == 1):
        raise CalibrationError(
            f"xstage.burst: {int(np.sum(heads[:, 7] != 1))} of {len(heads)} blocks gave up waiting"
        )
    ns = heads[:, 2] - heads[:, 1]
    return float(np.median((heads[:, 4] - heads[:, 3]) / np.maximum(ns, 1)) * 1e3)


def _times(heads: npt.NDArray[np.int64], stamps: npt.NDArray[np.int32]) -> tuple[FloatArray, float]:
    """Stamps in us on one time axis for all blocks, and the clock in MHz."""
    mhz = _clock_mhz(heads)
    offset = (heads[:, 1] - heads[:, 1].min()) / 1e3
    return stamps.astype(np.float64) / mhz + offset[:, None, None], mhz


def _trace(point: Point, heads: npt.NDArray[np.int64], stamps: npt.NDArray[np.int32]) -> Trace:
    times, mhz = _times(heads, stamps)
    counts = heads[:, 5]
    recorded = np.arange(stamps.shape[1])[None, :] < counts[:, None]
    times = np.where(recorded[:, :, None], times, np.nan)
    return Trace(
        point=point,
        begin=times[:, :, 0],
        issued=times[:, :, 1],
        free=times[:, :, 2],
        done=times[:, :, 3],
        bursts=counts,
        sm=heads[:, 0],
        drain_us=heads[:, 6] / mhz,
        clock_mhz=mhz,
    )
