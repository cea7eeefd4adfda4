"""What it costs a compute kernel to send its output tiles to a peer, by way of sending.

    python benchmarks/bench_burst.py                       # one process per GPU, two at least
    torchrun --nproc-per-node 2 benchmarks/bench_burst.py

A main loop of TMA loads and matrix products (csrc/burst/loop.cuh) runs on all SMs of the first rank
and sends a tile every N steps; the arms are interleaved round by round. `--pulls` adds reads of the
next rank on the same egress, as a dispatch makes. A tile is checked against its product first.

Run on two H200: docs/evidence/pacing.md.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import numpy as np
import torch
from _report import ResultWriter, Row

from xstage_ext._session import Session, on_all_gpus
from xstage_ext.burst import LOOP_STORES, BurstLoopPlan, LoopTrace, Point

KIB = 1024
SETTLED = 4
"""Tiles that are left out: blocks begin in step and drift apart."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A main loop: an output tile of `tile_bytes` per `steps` steps of `repeats` products."""

    tile_bytes: int
    steps: int
    repeats: int


@dataclasses.dataclass(frozen=True)
class Arm:
    """A way to send. `duty`: share of the next tile's time over which slices are spread."""

    store: str
    slice_bytes: int = 4 * KIB
    duty: float = 0.9
    rows: bool = False
    stagger: bool = False

    @property
    def name(self) -> str:
        """For tables."""
        parts = [self.store]
        if self.store == "paced":
            parts.append(f"{self.slice_bytes // KIB} KiB over {self.duty:.0%}")
        if self.rows:
            parts.append("rows of 512")
        if self.stagger:
            parts.append("staggered")
        return ", ".join(parts)


CASES = (Case(32 * KIB, 32, 2), Case(64 * KIB, 40, 2), Case(32 * KIB, 64, 1), Case(64 * KIB, 24, 2))
ARMS = (
    Arm("none"),
    Arm("st"),
    Arm("st", stagger=True),
    Arm("bulk"),
    Arm("bulk", stagger=True),
    Arm("paced", 1 * KIB),
    Arm("paced", 2 * KIB),
    Arm("paced", 4 * KIB),
    Arm("paced", 8 * KIB),
    Arm("paced", 4 * KIB, 0.5),
    Arm("st", rows=True),
    Arm("bulk", rows=True),
    Arm("paced", 2 * KIB, rows=True),
    Arm("paced", 4 * KIB, rows=True),
    Arm("paced", 8 * KIB, rows=True),
)
PULLS = (0, 16, 132)
"""Producers of the next rank that read this rank's memory meanwhile, with the gap below."""
PULL_GAP_US = 6.0


def plan_of(session: Session, case: Case, arm: Arm, tile_us: float, tiles: int) -> BurstLoopPlan:
    """Integers for the operator; `tile_us` is the tile's time without any store."""
    mhz = session.bench.clock_mhz
    slices = max(1, case.tile_bytes // arm.slice_bytes)
    stride = 4096 if arm.rows else 16 * KIB
    return BurstLoopPlan(
        blocks=session.bench.num_sms,
        tiles=tiles,
        steps=case.steps,
        repeats=case.repeats,
        store=LOOP_STORES[arm.store],
        tile_bytes=case.tile_bytes,
        slice_bytes=arm.slice_bytes,
        slice_cycles=round(arm.duty * tile_us * mhz / slices),
        chunk_bytes=512 if arm.rows else 16 * KIB,
        row_stride=stride,
        block_stride=case.tile_bytes // 512 * 4096 if arm.rows else case.tile_bytes,
        stagger_cycles=round(tile_us * mhz) if arm.stagger else 0,
        destinations=1 << ((session.rank + 1) % session.world),
        join=1,
    )


def tile_is_right(session: Session, a: torch.Tensor, b: torch.Tensor) -> bool | None:
    """Whether the last tile of block 1 lies at the peer as computed; None on other ranks."""
    case = Case(32 * KIB, 8, 2)
    if session.leads:
        plan = plan_of(session, case, Arm("paced"), 5.0, 2)
        session.bench.loop(dataclasses.replace(plan, join=0), a, b)
    session.barrier()
    ok = None
    if session.leads:
        landed = session.landing(1)[32 * KIB : 64 * KIB].view(128, 16, 16)
        row = torch.arange(128, device=a.device)[:, None]
        piece = torch.arange(16, device=a.device)[None, :] ^ (row & 7)
        got = landed[row, piece].reshape(128, 256).view(torch.bfloat16)
        steps = (7 + case.steps + torch.arange(case.steps, device=a.device)) % (len(b) // 128)
        total = b.view(-1, 128, 64)[steps].float().sum(0)
        ok = bool(torch.equal(got, (a.float() @ total.T * 2).to(torch.bfloat16)))
    session.barrier()
    return ok


def numbers(trace: LoopTrace) -> dict[str, float]:
    """Per-tile time and waits of the settled tiles, us."""
    times = trace.times
    per_tile = (times[:, -1, 0] - times[:, SETTLED - 1, 0]) / (times.shape[1] - SETTLED)
    settled = times[:, SETTLED:]
    return {
        "tile_us": float(per_tile.mean()),
        "tile_slowest_us": float(per_tile.max()),
        "load_wait_p99_us": float(np.percentile(settled[:, :, 1], 99)),
        "load_wait_max_us": float(settled[:, :, 1].max()),
        "staging_wait_us": float(settled[:, :, 2].mean()),
        "epilogue_us": float(settled[:, :, 3].mean()),
        "drain_us": float(trace.drain_us.max()),
    }


def one_run(
    session: Session, case: Case, arm: Arm, tile_us: float, pulls: int, tensors: Any
) -> dict[str, float] | None:
    """One launch on the first rank; the next rank pulls meanwhile. Collective."""
    tiles = 24
    pull = Point(
        "pull",
        pulls,
        16 * KIB,
        PULL_GAP_US,
        window_us=1.3 * tiles * tile_us,
        bursts=512,
        destinations=(0,),
        join=True,
    )
    result = None
    if session.leads:
        plan = plan_of(session, case, arm, tile_us, tiles)
        session.bench.loop(dataclasses.replace(plan, join=0), *tensors)  # allocates
        session.barrier()
        result = numbers(session.bench.loop(plan, *tensors))
    else:
        chosen = pull if pulls and session.rank == 1 else Point("st", 0, 4096, join=True)
        session.bench.run(dataclasses.replace(chosen, join=False, window_us=20.0))
        session.barrier()
        session.bench.run(chosen)
    session.barrier()
    return result


def case_rows(
    session: Session, case: Case, pulls: int, rounds: int, tensors: Any, ok: bool | None
) -> list[Row]:
    """All arms of a case, interleaved; the median over rounds. Rows on the leading rank."""
    tile_us = 0.5 * case.steps * case.repeats
    first = one_run(session, case, ARMS[0], tile_us, 0, tensors)
    tile_us = session.gather(first)[0]["tile_us"]  # type: ignore[index]
    seen: dict[str, list[dict[str, float]]] = {arm.name: [] for arm in ARMS}
    for number in range(rounds):
        order = ARMS if number % 2 == 0 else ARMS[::-1]
        for arm in order:
            result = one_run(session, case, arm, tile_us, pulls, tensors)
            if result is not None:
                seen[arm.name].append(result)
    if not session.leads:
        return []
    base = float(np.median([run["tile_us"] for run in seen["none"]]))
    rows = []
    for arm in ARMS:
        runs = seen[arm.name]
        samples = [run["tile_us"] for run in runs]
        extra = {key: float(np.median([run[key] for run in runs])) for key in runs[0]}
        extra["over_no_store"] = extra["tile_us"] / base - 1.0
        sent = 0 if arm.store == "none" else session.bench.num_sms * case.tile_bytes
        rows.append(
            Row(
                "burst_loop",
                arm.name,
                dataclasses.asdict(case) | {"pulls": pulls},
                session.world,
                float(np.median(samples)),
                float(np.percentile(samples, 10)),
                float(np.percentile(samples, 90)),
                len(samples),
                egress_GBps=sent / float(np.median(samples)) / 1e3,
                ok=ok,
                extra=extra,
            )
        )
    return rows


def _on_rank(session: Session, rounds: int, pulls: tuple[int, ...], output: str) -> None:
    session.bench.calibrate_clock()
    generator = torch.Generator(device=session.device).manual_seed(1)
    whole = [
        torch.randint(-2, 3, (rows, 64), device=session.device, generator=generator)
        for rows in (128, 128 * 256)
    ]
    ok = tile_is_right(session, *(t.to(torch.bfloat16) for t in whole))
    tensors = [
        torch.randn(t.shape, device=session.device, generator=generator).to(torch.bfloat16)
        for t in whole
    ]
    writer = ResultWriter(output) if session.leads else None
    for number in pulls:
        for case in CASES if number == 0 else CASES[:2]:
            for row in case_rows(session, case, number, rounds, tensors, ok):
                assert writer is not None
                writer.write(row)
                print(
                    f"{case.tile_bytes // KIB} KiB per {case.steps}x{case.repeats} steps, "
                    f"{number:3d} pulls, {row.arm:36s} {row.us_median:7.2f} us/tile "
                    f"{row.extra['over_no_store']:+6.1%}  {row.egress_GBps:4.0f} GB/s  "
                    f"load wait p99 {row.extra['load_wait_p99_us']:5.2f} "
                    f"max {row.extra['load_wait_max_us']:5.2f} us  "
                    f"epilogue {row.extra['epilogue_us']:5.2f} us",
                    flush=True,
                )


def main() -> None:
    """Parse the command line and run on all GPUs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--pulls", type=int, nargs="*", default=list(PULLS))
    parser.add_argument("--output", default="burst_loop.jsonl")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench_burst measures GPUs, and none is visible here")
    on_all_gpus(_on_rank, options.rounds, tuple(options.pulls), options.output)


if __name__ == "__main__":
    main()
