"""Measurements that calibrate, validate and the doctor share: points in, rows of numbers out.

A row is a plain dictionary of JSON values. Times are us on the SM clock, rates GB/s of bytes that
cross the link, volumes bytes. The leading rank measures; the others take part where a point says
that all ranks send.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from . import _fits
from ._session import Session
from .burst import BurstBench, Point, Trace

Row = dict[str, Any]
Progress = Callable[[str], None]
FOOTPRINT = 32 << 20
"""Bytes over which successive bursts spread, so that no burst rewrites what is still in flight."""
WARM_US = 150.0
"""Start of a window that is left out: trains begin in step and need a few bursts to settle."""
STALL_FACTOR, STALL_US = 1.25, 0.1
"""A burst counts as stalled beyond this factor of T0 and this much more."""


def spread(point: Point) -> Point:
    """The point with as many slots as cover `FOOTPRINT`, at least two."""
    slots = max(2, min(512, FOOTPRINT // max(1, point.volume)))
    return dataclasses.replace(point, slots=slots)


def label(point: Point, kind: str) -> Row:
    """What was asked for."""
    return {
        "kind": kind,
        "mechanism": point.mechanism,
        "K": point.producers,
        "B": point.nbytes,
        "gap_us": point.gap_us,
        "sync": point.sync,
        "fence": point.fence,
        "local": point.local,
        "both": point.join,
    }


def distribution(times: np.ndarray) -> Row:
    """Mean over all bursts of all producers, the producers' means, and the slow end."""
    with np.errstate(invalid="ignore"):
        producers = np.nanmean(times, axis=1)
    return {
        "mean": float(np.nanmean(times)),
        "median": float(np.nanmedian(times)),
        "p95": float(np.nanpercentile(times, 95)),
        "max": float(np.nanmax(times)),
        "producer_mean": float(np.nanmean(producers)),
        "producer_fastest": float(np.nanmin(producers)),
        "producer_slowest": float(np.nanmax(producers)),
    }


def isolated(bench: BurstBench, point: Point) -> Row:
    """Bursts of all producers together, so far apart that the pipe is empty at every one."""
    period = 30.0 + 2.0 * point.volume / 300e3
    trace = bench.run(
        spread(dataclasses.replace(point, sync="timetable", gap_us=period, bursts=26))
    )
    times = trace.t_iss[:, 2:]
    row = label(trace.point, "isolated") | distribution(times)
    row["slowest"] = float(np.nanmax(times, axis=0).mean())
    if point.fence:
        done = trace.t_done[:, 2:]
        row["visible_mean"] = float(np.nanmean(done))
        row["visible_slowest"] = float(np.nanmax(done, axis=0).mean())
    return row


def settled_until(window_us: float) -> float:
    """Latest begin of a burst that counts: the last ones may still be on their way."""
    return window_us - 20.0


def settled(trace: Trace, window_us: float) -> tuple[np.ndarray, float, float]:
    """Issue times [producers, bursts] of the settled part of a window (NaN outside), its limits."""
    last = float(np.nanmin(np.nanmax(trace.done, axis=1)))
    low, high = WARM_US, min(settled_until(window_us), last)
    inside = (trace.begin >= low) & (trace.begin <= high)
    return np.where(inside, trace.t_iss, np.nan), low, high


def service_shares(trace: Trace, low_us: float, high_us: float) -> list[float]:
    """Rates of the producers relative to their mean, as 17 evenly spaced quantiles."""
    rates = np.sort(
        [
            _fits.throughput(trace.begin[k : k + 1], trace.done[k : k + 1], 1.0, low_us, high_us)
            for k in range(len(trace.begin))
        ]
    )
    at = (np.arange(17) + 0.5) / 17 * len(rates) - 0.5
    shares = np.interp(at, np.arange(len(rates)), rates)
    return [round(float(share), 4) for share in shares / shares.mean()]


def accepted_curve(trace: Trace, high_us: float) -> list[tuple[float, int]]:
    """(time since the first stores, bytes accepted by then) of a saturated train, up to a time.

    Interpolated between ends of bursts, where every producer's queue is full: in the bench's own
    gap behind each it runs low and then fills up again at once. From everybody's first end on.
    """
    start = float(np.nanmean(trace.begin[:, 0]))
    first = max(float(np.nanmax(trace.done[:, 0])) - start, 1.0)
    times = np.geomspace(first, max(high_us - start, first), 24)
    bursts = np.zeros(len(times))
    for done in trace.done:
        ends = done[np.isfinite(done)]
        bursts += np.interp(start + times, ends, np.arange(1, len(ends) + 1))
    taken = bursts * trace.point.nbytes
    return [(float(t), round(float(so_far))) for t, so_far in zip(times, taken, strict=True)]


def train_row(trace: Trace, kind: str) -> Row:
    """Summary of a free-running train in a fixed time window."""
    times, low, high = settled(trace, trace.point.window_us)
    gaps = trace.begin[:, 1:] - trace.done[:, :-1]
    inside = np.isfinite(times[:, 1:])
    row = label(trace.point, kind) | distribution(times)
    row["R_GBps"] = _fits.throughput(trace.begin, trace.done, trace.point.nbytes, low, high)
    row["gap_seen_us"] = float(np.nanmean(np.where(inside, gaps, np.nan)))
    if trace.point.gap_us == 0.0 and trace.point.gaps_us is None:
        row["shares"] = service_shares(trace, low, high)
        row["accepted"] = accepted_curve(trace, high)
    if trace.point.fence:
        done = np.where(np.isfinite(times), trace.t_done, np.nan)
        row["visible_mean"] = float(np.nanmean(done))
    return row


def window_for(point: Point) -> Point:
    """The point with a window that holds at least 40 settled bursts, and room to record them."""
    period = max(0.5, point.gap_us, point.volume / 380e3)
    window = WARM_US + max(400.0, 40 * period)
    bursts = int(min(4000, 1.6 * window / max(0.4, point.gap_us) + 50))
    return spread(dataclasses.replace(point, window_us=window, bursts=bursts))


def train(bench: BurstBench, point: Point, kind: str = "train") -> Row:
    """One free-running train on this rank alone."""
    return train_row(bench.run(window_for(point)), kind)


def train_everywhere(session: Session, point: Point, kind: str = "both") -> Row:
    """The same train on every rank at once; returns this rank's row. Collective."""
    bench = session.bench
    joined = window_for(dataclasses.replace(point, join=True))
    # A first run of the same size alone: allocations would wait for kernels that wait for peers.
    bench.run(dataclasses.replace(joined, join=False, window_us=50.0))
    session.barrier()
    row = train_row(bench.run(joined), kind)
    session.barrier()
    return row


def wake_link(bench: BurstBench) -> None:
    """50 ms of traffic: the first trains after a pause run a few per cent slower."""
    point = Point("bulk", bench.num_sms, 64 << 10, window_us=5000.0, bursts=1)
    for _ in range(10):
        bench.run(spread(point))


def gap_overhead(bench: BurstBench) -> tuple[float, float]:
    """(shortest, late) of the bench itself, us: a gap of G lasts max(shortest, G + late)."""
    point = Point("st", bench.num_sms, 1024, window_us=400.0, bursts=1000, local=True)
    shortest = train_row(bench.run(point), "overhead")["gap_seen_us"]
    later = train_row(bench.run(dataclasses.replace(point, gap_us=5.0)), "overhead")["gap_seen_us"]
    return shortest, later - 5.0


def shadow_rows(
    bench: BurstBench, point: Point, probe: str, delays_us: Sequence[float]
) -> list[Row]:
    """Latency of a local operation by delay after a burst (or without one: `producers` 0)."""
    period = 45.0 + 2.0 * point.volume / 300e3
    trace = bench.shadow(spread(point), delays_us, probe, period_us=period, repeats=16)
    rows = []
    for i, delay in enumerate(delays_us):
        burst = trace.latency if point.producers else trace.control
        seen = burst[i][:, 1:]
        rows.append(
            label(point, "shadow")
            | {
                "probe": probe,
                "delay_us": float(delay),
                "median": float(np.median(seen)),
                "mean": float(seen.mean()),
                "p95": float(np.percentile(seen, 95)),
            }
        )
    return rows


def copy_engine_GBps(session: Session) -> float:
    """One direction by the copy engine, out of a plain tensor copy to the next rank. Collective.

    The next rank's memory is its landing area, so that no handle has to travel.
    """
    source = torch.empty(128 << 20, dtype=torch.uint8, device=session.device)
    area = session.landing((session.rank + 1) % session.world)[: source.numel()]
    rate = 0.0
    if session.leads:
        rate = _best_rate(lambda: area.copy_(source), source.numel())
    session.barrier()
    return rate


def _best_rate(call: Callable[[], object], nbytes: float, repeats: int = 8) -> float:
    call()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return nbytes / float(np.median(times)) / 1e6


def matrix_tflops(device: torch.device) -> float:
    """Dense bf16 products of random matrices, TFLOP/s of the whole GPU."""
    n = 8192
    a = torch.randn(n, n, device=device).to(torch.bfloat16)
    b = torch.randn(n, n, device=device).to(torch.bfloat16)
    return _best_rate(lambda: a @ b, 2.0 * n**3 / 1e3)


def memory_GBps(device: torch.device) -> float:
    """Read and write of device memory, GB/s: a copy of 1 GiB counts twice."""
    a = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    b = torch.empty_like(a)
    return _best_rate(lambda: b.copy_(a), 2.0 * a.numel())
