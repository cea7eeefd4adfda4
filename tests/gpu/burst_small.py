"""Small runs of the burst operators that touch every path, for compute-sanitizer:

compute-sanitizer --tool racecheck python -m tests.gpu.burst_small
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from tests.gpu.test_burst import LOOP, Virtual, landed_right, virtual_rank
from xstage_ext.burst import LOOP_STORES, PROBES, Point

MECHANISMS = ("st", "bulk", "tma")
EVERYONE = (0, 1, 2)


def bursts(virtual: Virtual, mechanism: str) -> None:
    """Whole and scattered rows, every way to begin, with and without a fence, to three ranks."""
    for landing in virtual.landing:
        landing.zero_()
    plain = Point(mechanism, 5, 6 << 10 if mechanism != "tma" else 8 << 10, bursts=3, seed=4)
    rows = {"row_bytes": 512, "row_stride": 1024, "nbytes": 4096}
    for changes in (
        {"destinations": EVERYONE},
        {"fence": True, "sync": "barrier", "gap_us": 2.0},
        {"late_wait": True, "sync": "timetable", "gap_us": 20.0},
        rows | {"destinations": (0,), "gaps_us": np.array([[0.0, 1.0], [3.0, 0.5]])},
    ):
        point = dataclasses.replace(plain, **changes)
        trace = virtual.bench.run(point)
        assert np.all(trace.bursts == 3)
        assert landed_right(virtual, point), (mechanism, changes)
    window = dataclasses.replace(plain, window_us=200.0, gap_us=20.0)
    assert virtual.bench.run(window).bursts.min() >= 1


def shadows(virtual: Virtual, mechanism: str) -> None:
    """Every probe behind a burst, on SMs that burst and on others."""
    for probe in PROBES:
        trace = virtual.bench.shadow(
            Point(mechanism, 3, 4096), (0.5, 3.0), probe, period_us=40.0, repeats=1
        )
        assert trace.latency.shape == (2, 3, 1)


def loops(virtual: Virtual) -> None:
    """Every way in which a tile of the main loop leaves, whole and as rows, to two ranks."""
    a = torch.ones(128, 64, device="cuda", dtype=torch.bfloat16)
    b = torch.ones(128 * 4, 64, device="cuda", dtype=torch.bfloat16)
    plan = dataclasses.replace(
        LOOP, blocks=2, tiles=2, steps=4, repeats=1, destinations=0b101, slice_cycles=100
    )
    for store in LOOP_STORES.values():
        for row in (16384, 512):
            virtual.bench.loop(
                dataclasses.replace(plan, store=store, chunk_bytes=row, row_stride=row), a, b
            )
        virtual.bench.loop(dataclasses.replace(plan, store=store, tile_bytes=65536), a, b)


if __name__ == "__main__":
    with virtual_rank(1, 3, timeout_ms=120_000) as world_of_three:
        for name in MECHANISMS:
            bursts(world_of_three, name)
            shadows(world_of_three, name)
        world_of_three.bench.run(Point("pull", 4, 4096, bursts=2))
        world_of_three.bench.run(Point("st", 0, 4096))
        loops(world_of_three)
    with virtual_rank(0, 1, timeout_ms=120_000) as alone:
        alone.bench.run(Point("st", 5, 4096, bursts=2, join=True))
    torch.cuda.synchronize()
    print("burst_small: ok")
