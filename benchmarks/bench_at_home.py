"""Times the planner's families of plans where no row crosses a link: a world of one.

    python benchmarks/bench_at_home.py              # one GPU; build/results/at_home.jsonl
    python benchmarks/bench_at_home.py --record     # benchmarks/results/at_home.jsonl
    python benchmarks/fit_planner.py --fit          # takes the recorded ones for such layers

The layers are those of the sweep that keep half of their rows at home, with all of them there: as
many rows per rank, and the same experts. Every plan is compared with the unfused pipeline in fp32
and with the others bit for bit, timed in turns with them and a large dense product, and alone.
"""

from __future__ import annotations

import pathlib
import time
from typing import Annotated

import _report
import _sweep
import torch
import typer
from _level import levelled
from _ranks import on_ranks
from _sweep_case import DENSE, Case, distinct, time_alone, time_plans
from _sweep_gpu import STRIDE, plans_row
from _sweep_report import console

from xstage_ext import SymmetricWorkspace, machine
from xstage_ext.planner import ranking
from xstage_ext.planner.choose import family_plan
from xstage_ext.planner.megamoe import MegaMoePlan
from xstage_ext.testing import Timing
from xstage_ext.workspace import region_bytes

FILE = "at_home.jsonl"


def layers() -> list[_sweep.Config]:
    """All rows at home; in strides, so that a time limit leaves some of every model."""
    half = [config for config in _sweep.load_configs() if config.remote_share == 0.5]
    return [config.at_home() for config in sorted(half, key=lambda c: c.index * STRIDE % 84)]


def family_plans(config: _sweep.Config, profile: machine.MachineProfile) -> dict[str, MegaMoePlan]:
    """A plan per family; families that come to the same plan have it once."""
    return distinct(
        (name, family_plan(config.problem, profile, ranking.DEFAULTS | fields))
        for name, fields in ranking.FAMILIES.items()
    )


def measure(
    config: _sweep.Config, plans: dict[str, MegaMoePlan], pairs: int, workspace: SymmetricWorkspace
) -> _report.Row:
    """One line for all plans of a layer."""
    case = Case(config, plans, 0, workspace)
    calls = {name: case.fused(name) for name in plans}
    ok, _ = case.check(calls)
    sequence = time_plans(calls | {DENSE: case.dense}, (pairs, 0), [], config.seed)
    samples = levelled(sequence)
    usual = {name: Timing.of(samples[name]).us_median for name in plans}
    alone = levelled(time_alone(calls, usual, config.seed))
    workspace.check(synchronize=True)
    case.close()
    raw = {name: [us for one, us in sequence if one == name] for name in plans}
    tflops = case.dense_flops / Timing.of(samples[DENSE]).us_median / 1e6
    return plans_row(config, plans, samples, raw, ok, alone, tflops)


def _rank(_: int, path: pathlib.Path, pairs: int, budget_s: float) -> None:
    profile = machine.load_here()
    tasks = [(config, family_plans(config, profile)) for config in layers()]
    most = max(region_bytes(plan.bytes() for plan in plans.values()) for _, plans in tasks)
    writer = _report.ResultWriter(path)
    start = time.perf_counter()
    with SymmetricWorkspace(nbytes=most) as workspace:
        for config, plans in tasks:
            if time.perf_counter() - start > budget_s:
                raise SystemExit(f"{budget_s:g} s are over: layers are left")
            row = measure(config, plans, pairs, workspace)
            writer.write(row)
            console.print(line_of(config, row), highlight=False)


def line_of(config: _sweep.Config, row: _report.Row) -> str:
    """A layer in one line: us in turns, and alone."""
    cells = [
        f"{one['name']} {one['us']:.0f} ({Timing.of(one['alone_us']).us_median:.0f})"
        for one in row.extra["plans"]
    ]
    wrong = "" if row.ok else " WRONG"
    dense_us = _sweep.load_of(config, config.draw()).flops / row.extra["matrix_tflops"] / 1e6
    return f"{config.name}: {', '.join(cells)}; dense {dense_us:.0f}{wrong}"


def main(
    record: Annotated[
        bool, typer.Option(help="Write to benchmarks/results/ instead of build/results/.")
    ] = False,
    pairs: Annotated[int, typer.Option(help="Samples per plan, in turns.")] = 20,
    budget_s: Annotated[float, typer.Option(help="Begin no layer after so long.")] = 400,
) -> None:
    """Measure; see the text at the top of this file."""
    if not torch.cuda.is_available():
        raise SystemExit("bench_at_home measures a GPU, and none is visible here")
    folder = _report.RESULTS if record else _report.LOCAL_RESULTS
    on_ranks(1, _rank, folder / FILE, pairs, budget_s)
    wrong = [line["shape"] for line in _report.read(folder / FILE) if not line["ok"]]
    if wrong:
        raise SystemExit(f"WRONG results: {wrong}")


if __name__ == "__main__":
    typer.run(main)
