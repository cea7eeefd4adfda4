"""Measures what the exhibits draw: traces of megamoe's arms, or other benchmarks; evidence.py."""

from __future__ import annotations

import dataclasses
import pathlib
import subprocess
import sys
from typing import Any

import _report
import _sweep
import numpy as np
from _ranks import on_ranks
from _sweep_case import Case
from _tile_trace import TileTrace, decode, phases_us

from xstage_ext import SymmetricWorkspace, machine
from xstage_ext.workspace import region_bytes

SPAN_ARMS = ("wave/st", "interleaved/st", "wave", "interleaved")
CONTROL = "local control"
"""The plan of the first arm, all experts' rows kept at home: what a tile costs without a link."""
TRACES = "tile_traces.jsonl"
CALLS = 8
"""Warm calls in front of a traced one."""
OP = "megamoe_tiles"
BIN_US = 10.0


def command_of(file: str, folder: pathlib.Path) -> list[str]:
    """What measures a result file of `folder` anew, but for traces: a benchmark and its arguments.

    The repository's own results keep the short names that their lines tell.
    """
    recorded = folder == _report.RESULTS
    path = file if recorded else str(folder / file)
    two_ranks = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    script = str(_report.ROOT / "benchmarks" / SCRIPTS[file])
    arguments = {
        # Its usual limit on time may leave configurations out.
        "sweep_84.jsonl": [script, "--budget-s", "7200", *(["--record"] if recorded else [])],
        "attention.jsonl": [*two_ranks, script, "--out", path],
        "burst_loop.jsonl": [script, "--output", path],
    }
    return [sys.executable, *arguments[file]]


SCRIPTS = {
    "sweep_84.jsonl": "sweep_84.py",
    "attention.jsonl": "bench_attention.py",
    "burst_loop.jsonl": "bench_burst.py",
}


def measure(file: str, folder: pathlib.Path, index: int) -> int:
    """Write a result file of `folder` anew; the exit status. `index`: of the traced layer."""
    if file == TRACES:
        config = _sweep.load_configs()[index]
        on_ranks(config.world, _rank, config, machine.load_here(), folder / file)
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    return subprocess.run(command_of(file, folder), cwd=_report.ROOT, check=False).returncode


def _rank(
    rank: int, config: _sweep.Config, profile: machine.MachineProfile, path: pathlib.Path
) -> None:
    """Trace every arm behind warm calls; rank 0 writes its tiles."""
    arms = dict(zip((*SPAN_ARMS, CONTROL), (*SPAN_ARMS, SPAN_ARMS[0]), strict=True))
    plans = {name: _sweep.plan_of(config, arm, profile) for name, arm in arms.items()}
    nbytes = region_bytes(plan.bytes() for plan in plans.values())
    writer = _report.ResultWriter(path) if rank == 0 else None
    with SymmetricWorkspace(nbytes=nbytes) as workspace:
        case = Case(config, plans, rank, workspace)
        remote = case.ids
        local = remote % config.local_experts + rank * config.local_experts
        for name in plans:
            case.ids = local if name == CONTROL else remote
            trace = case.trace(name, CALLS)
            workspace.check(synchronize=True)
            if writer is not None:
                row = _row(config, name, decode(trace), phases_us(trace))
                row.extra["plan"] = dataclasses.asdict(plans[name])
                writer.write(row)
        case.close()


def _row(
    config: _sweep.Config, arm: str, tiles: TileTrace, phases: dict[str, float]
) -> _report.Row:
    """The spans of Linear-2 tiles as percentiles, and the activity of the tensor cores."""
    spans = tiles.of_phase(2).hand_over_us
    p10, p50, p90 = np.percentile(spans, [10, 50, 90])
    extra: dict[str, Any] = {
        "index": config.index,
        "percentiles_us": np.percentile(spans, range(101)).round(3).tolist(),
        "bin_us": BIN_US,
        "activity": tiles.activity(BIN_US).round(4).tolist(),
        "kernel_clock_mhz": float(tiles.clock_mhz[0]),
    }
    return _report.Row(
        OP, arm, config.key, config.world, p50, p10, p90, len(spans), extra=extra | phases
    )
