"""Measures the sweep's configurations on GPUs, one process per rank; see sweep_84.py.

Per configuration, in one process and in this order: all plans are compared with the unfused
pipeline in fp32, and with each other bit for bit; all plans, a large dense product, and the unfused
pipeline of torch and NCCL, are timed in turns, slower plans and the pipeline with fewer samples;
the plans that may be fastest are timed alone, each following itself; two are traced once.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import os
import pathlib
import time
from collections.abc import Mapping, Sequence

import _plans
import _report
import _sweep
import numpy as np
import sweep_84
import torch
import torch.distributed as dist
from _level import levelled
from _ranks import on_ranks
from _sweep import ARMS, Config
from _sweep_case import DENSE, RARELY, Call, Case, Stages, distinct, time_alone, time_plans
from _sweep_report import BASELINE, Wanted, by_config, console

from xstage_ext import SymmetricWorkspace, machine
from xstage_ext.planner import ranking
from xstage_ext.planner.megamoe import MegaMoePlan
from xstage_ext.testing import Timing
from xstage_ext.workspace import region_bytes

STRIDE = 37
"""Configurations run in steps of this: what a time limit cuts off comes from all models alike."""


@dataclasses.dataclass(frozen=True)
class Job:
    """What every rank of a run is told.

    Attributes
    ----------
    pairs : int
        Samples per arm and fast plan.
    first : int
        Rounds in which every plan of the grid runs; 0: arms only.
    trials : bool
        The grid holds plans that the planner does not consider; see `_sweep.TRIALS`.
    """

    configs: list[Config]
    profile: machine.MachineProfile
    path: pathlib.Path
    resume: bool
    pairs: int
    first: int
    budget_s: float
    trials: bool = False

    @property
    def wanted(self) -> Wanted:
        """When a configuration need not be measured again."""
        serial_n = -(-self.pairs // RARELY)
        return Wanted(self.pairs, self.profile.name, serial_n, [_report.commit()])


@dataclasses.dataclass(frozen=True)
class Task:
    """A configuration with its plans and, on rank 0, its rows as predicted.

    Attributes
    ----------
    arms : dict
        The name under which the plan of every arm is measured: arms may share one.
    plans : dict
        All plans by name: those of the arms, then those of the grid, each once.
    """

    config: Config
    arms: dict[str, str]
    plans: dict[str, MegaMoePlan]
    predicted: list[_report.Row]

    @property
    def timed(self) -> list[str]:
        """Plans of the arms, each once."""
        return list(dict.fromkeys(self.arms.values()))


def launch(job: Job) -> None:
    """Measure; starts one process per rank unless torchrun has done so."""
    on_ranks(job.configs[0].world, _rank, job)


def task_of(config: Config, job: Job, predict: bool) -> Task:
    """Plans of a configuration, the same on every rank."""
    wanted = {arm: _sweep.plan_of(config, arm, job.profile) for arm in ARMS}
    grid = _sweep.grid_plans(config, job.profile, job.trials) if job.first else {}
    plans = distinct([*wanted.items(), *grid.items()])
    name_of = {plan: name for name, plan in plans.items()}
    rows = sweep_84.predicted_rows(config, job.profile) if predict else []
    return Task(config, {arm: name_of[plan] for arm, plan in wanted.items()}, plans, rows)


def tasks_of(job: Job, rank: int) -> list[Task]:
    """What the result file lacks. The simulator runs without Python's lock: threads help."""
    done = by_config(_report.read(job.path)) if job.resume else {}
    wanted = job.wanted
    missing = [
        c
        for c in sorted(job.configs, key=lambda c: c.index * STRIDE % 84)
        if not wanted.are_met(done.get(json.dumps(c.key)))
    ]
    with concurrent.futures.ThreadPoolExecutor(min(12, os.cpu_count() or 1)) as threads:
        return list(threads.map(lambda config: task_of(config, job, rank == 0), missing))


def _rank(rank: int, job: Job) -> None:
    stages = Stages()
    with stages("plan"):
        tasks = tasks_of(job, rank)
        dist.barrier()
    writer = _report.ResultWriter(job.path, append=job.resume) if rank == 0 else None
    needs = [region_bytes(plan.bytes() for plan in task.plans.values()) for task in tasks]
    start = time.perf_counter()
    with stages("workspace"):
        workspace = SymmetricWorkspace(nbytes=max(needs, default=0))
    with workspace, sweep_84.progress_bar() as progress:
        progress.disable = rank != 0
        bar = progress.add_task("measuring", total=len(tasks))
        for task in tasks:
            late = torch.tensor(time.perf_counter() - start, device=workspace.device)
            dist.all_reduce(late, dist.ReduceOp.MAX)
            if float(late) > job.budget_s:
                break
            progress.update(bar, description=f"measuring {task.config.name}")
            rows = measure(task, rank, job, workspace, stages)
            if writer is not None:
                writer.replace(*rows)
                console.print(_line(rows), highlight=False)
            progress.advance(bar)
    if rank == 0:
        console.print(f"rank 0 spent: {stages}", highlight=False)


def measure(
    task: Task, rank: int, job: Job, workspace: SymmetricWorkspace, stages: Stages
) -> list[_report.Row]:
    """Check and time every plan of a configuration; all ranks call it."""
    with stages("tensors"):
        case = Case(task.config, task.plans, rank, workspace)
    calls = {name: case.fused(name) for name in task.plans} | {"serial": case.serial}
    with stages("check"):
        ok, error = case.check(calls)
    kept = [*task.timed, *(name for name in task.plans if name in ranking.FAMILIES)]
    with stages("times"):
        timed = calls | {DENSE: case.dense}
        rounds, always = (job.pairs, job.first), [*kept, DENSE]
        sequence = time_plans(timed, rounds, always, task.config.seed)
        samples = levelled([(name, us) for name, us in sequence if name != "serial"])
        times = {name: Timing.of(seen) for name, seen in samples.items()}
    with stages("alone"):
        alone = time_alone_of(calls, times, task, kept) if _on_gpu(workspace) else {}
    with stages("trace"):
        names = dict.fromkeys(task.arms[arm] for arm in TRACED)
        traces = {name: case.spans(name) for name in names} if _on_gpu(workspace) else {}
    workspace.check(synchronize=True)
    case.close()
    if rank != 0:
        return []
    raw = {name: [us for one, us in sequence if one == name] for name in calls}
    times["serial"] = Timing.of(raw["serial"])
    serial = next(row for row in task.predicted if row.arm == BASELINE)
    serial = dataclasses.replace(
        serial, arm="serial", extra={k: v for k, v in serial.extra.items() if k in SERIAL_FACTS}
    )
    matrix_tflops = case.dense_flops / times[DENSE].us_median / 1e6
    load = _sweep.load_of(task.config, task.config.draw())

    def floors(arm: str) -> dict[str, float | str]:
        return sweep_84.ceiling_facts(load.of(arm), job.profile, matrix_tflops)

    rows = [_plans.measured(serial, times["serial"], ok["serial"], floors("serial"))]
    for row in task.predicted:
        name = task.arms[row.arm]
        extra = floors(row.arm) | {"measured_as": name, "relative_error": error}
        if name in alone:
            extra["alone_us"] = float(np.median(alone[name]))
        extra["raw_us"] = Timing.of(raw[name]).us_median
        rows.append(_plans.measured(row, times[name], ok[name], extra))
    spans = [_trace_row(task, name, times[name], trace) for name, trace in traces.items()]
    plans = plans_row(task.config, task.plans, samples, raw, ok, alone, matrix_tflops)
    return [*rows, *spans, plans]


SERIAL_FACTS = (*sweep_84.FACTS, "egress_bytes")
"""The unfused pipeline sends a row per choice, as the baseline does."""
NEAR = 1.06
"""Plans that take more than so many times the fastest in turns are not timed alone."""


def time_alone_of(
    calls: Mapping[str, Call], times: Mapping[str, Timing], task: Task, kept: Sequence[str]
) -> dict[str, list[float]]:
    """Alone, by name: the arms, and the plans of families that may be fastest."""
    usual = {name: times[name].us_median for name in kept}
    sets = task.config.token_sets
    most = NEAR * min(us for name, us in usual.items() if task.plans[name].token_sets == sets)
    names = [name for name in usual if name in task.timed or usual[name] <= most]
    mine = {name: calls[name] for name in names}
    return levelled(time_alone(mine, usual, task.config.seed))


TRACED = ("wave/st", "planner")
"""Arms whose tiles are traced: spans of remote stores, waits, clock."""


def _on_gpu(workspace: SymmetricWorkspace) -> bool:
    return workspace.device.type == "cuda"


def _trace_row(task: Task, name: str, timing: Timing, trace: dict[str, float]) -> _report.Row:
    """What the trace build said of one call by a plan, beside the plan's time."""
    us = timing.us_median, timing.us_p10, timing.us_p90
    extra = trace | {"plan": dataclasses.asdict(task.plans[name])}
    key, world = task.config.key, task.config.world
    return _report.Row(_plans.TRACE_OP, name, key, world, *us, timing.n, extra=extra)


def plans_row(
    config: Config,
    by_name: Mapping[str, MegaMoePlan],
    samples: Mapping[str, list[float]],
    raw: Mapping[str, list[float]],
    ok: Mapping[str, bool],
    alone: Mapping[str, list[float]],
    matrix_tflops: float,
) -> _report.Row:
    """One row for all plans of a configuration, by name; see `_plans.py`.

    `halves_us` are medians of every other sample: choose by one, judge by the other. `samples_us`
    are in the order of the rounds, as the clock said; times are of levelled samples. `alone_us` are
    times alone, levelled, by pass; `matrix_tflops` is what a dense product reached in the rounds.
    """
    plans = []
    for name, plan in by_name.items():
        timing = Timing.of(samples[name])
        halves = [float(np.median(samples[name][i::2])) for i in (0, 1)]
        times = {"us": timing.us_median, "us_p10": timing.us_p10, "us_p90": timing.us_p90}
        plans.append(
            {"name": name, "plan": dataclasses.asdict(plan), "ok": ok[name], "n": timing.n}
            | {key: round(us, 2) for key, us in times.items()}
            | {"halves_us": [round(us, 2) for us in halves]}
            | {"samples_us": [round(us, 1) for us in raw[name]]}
            | {"raw_us": round(Timing.of(raw[name]).us_median, 2)}
            | {"alone_us": [round(us, 2) for us in alone.get(name, [])]}
        )
    best = min((Timing.of(samples[name]) for name in by_name), key=lambda t: t.us_median)
    return _report.Row(
        _plans.OP,
        "all",
        config.key,
        config.world,
        best.us_median,
        best.us_p10,
        best.us_p90,
        best.n,
        ok=all(ok[name] for name in by_name),
        extra={"held_out": config.held_out, "plans": plans, "matrix_tflops": matrix_tflops},
    )


def _line(rows: list[_report.Row]) -> str:
    """A configuration in one line: measured, and in brackets predicted, us."""
    arms = [row for row in rows if row.op == "megamoe"]
    cells = (
        f"{row.arm} {row.us_median:.0f}"
        + (f" ({row.extra['predicted_us']:.0f})" if "predicted_us" in row.extra else "")
        + ("" if row.ok else " WRONG")
        for row in arms
    )
    shape = arms[0].shape
    head = f"{shape['model']} T={shape['tokens']} {shape['remote_share']:g} {shape['routing']}"
    return f"{head}: {', '.join(cells)}"
