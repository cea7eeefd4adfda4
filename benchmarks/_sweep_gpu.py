"""Measures the sweep's configurations on GPUs, one process per rank; see sweep_84.py.

Per configuration, in one process and in this order: all arms are compared with the unfused
pipeline (torch grouped products and NCCL), the arms of MegaMoE with each other bit for bit; then
all arms are timed interleaved. The unfused pipeline is the serial baseline and an arm too.

Run so far by a test on two CPU processes only; not yet on GPUs.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import socket
import time
from collections.abc import Callable

import _report
import _sweep
import sweep_84
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from _sweep import ARMS, Config

from xstage_ext import MegaMoE, SymmetricWorkspace, machine, reference
from xstage_ext.planner.megamoe import MegaMoePlan
from xstage_ext.testing import Timing, compare, time_arms
from xstage_ext.workspace import region_bytes

TOLERANCE = {"rtol": 2e-2, "atol": 2e-2}


@dataclasses.dataclass(frozen=True)
class Job:
    """What every rank of a run is told."""

    configs: list[Config]
    profile: machine.MachineProfile
    path: pathlib.Path
    resume: bool
    pairs: int
    budget_s: float


def launch(
    configs: list[Config],
    profile: machine.MachineProfile,
    path: pathlib.Path,
    *,
    resume: bool,
    pairs: int,
    budget_s: float,
) -> None:
    """Measure; starts one process per rank unless torchrun has done so."""
    job = Job(configs, profile, path, resume, pairs, budget_s)
    world = configs[0].world
    if "RANK" in os.environ:
        _rank(int(os.environ["RANK"]), job, None)
        if int(os.environ["RANK"]) != 0:
            raise SystemExit(0)
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    mp.spawn(_rank, args=(job, address), nprocs=world, join=True)


def _rank(rank: int, job: Job, address: str | None) -> None:
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
    torch.cuda.set_device(device)
    world = job.configs[0].world
    dist.init_process_group(
        "nccl", init_method=address or "env://", rank=rank, world_size=world, device_id=device
    )
    done = sweep_84.by_config(_report.read(job.path)) if job.resume else {}
    missing = [
        c
        for c in job.configs
        if not sweep_84.is_complete(done.get(json.dumps(c.key), {}), measured=True)
    ]
    writer = _report.ResultWriter(job.path, append=job.resume) if rank == 0 else None
    dist.barrier()
    plans = [distinct_plans(c, job.profile) for c in missing]
    nbytes = max((region_bytes(p.bytes() for p in some) for some in plans), default=0)
    start = time.perf_counter()
    with SymmetricWorkspace(nbytes=nbytes) as workspace, sweep_84.progress_bar() as progress:
        progress.disable = rank != 0
        task = progress.add_task("measuring", total=len(missing))
        for config in missing:
            late = torch.tensor(time.perf_counter() - start, device=device)
            dist.all_reduce(late, dist.ReduceOp.MAX)
            if float(late) > job.budget_s:
                break
            progress.update(task, description=f"measuring {config.name}")
            rows = measure(config, rank, job, workspace)
            if writer is not None:
                for row in rows:
                    writer.write(row)
            progress.advance(task)
    dist.destroy_process_group()


def _plans(config: Config, profile: machine.MachineProfile) -> dict[str, MegaMoePlan]:
    return {arm: _sweep.plan_of(config, arm, profile) for arm in ARMS}


def measure(
    config: Config, rank: int, job: Job, workspace: SymmetricWorkspace
) -> list[_report.Row]:
    """Check and time every arm of a configuration; all ranks call it."""
    routing = config.draw()
    device = workspace.device
    ids = torch.from_numpy(routing.topk_idx[rank]).to(device)
    weights = torch.from_numpy(routing.topk_weights[rank]).to(device)
    generator = torch.Generator(device).manual_seed(config.seed * 16 + rank)
    local, hidden, inner = (
        config.num_experts // config.world,
        config.hidden,
        config.intermediate,
    )

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        values = torch.randn(*shape, generator=generator, device=device)
        return values.mul_(scale).bfloat16()

    x = normal(config.tokens, hidden)
    w13 = normal(local, 2 * inner, hidden, scale=hidden**-0.5)
    w2 = normal(local, hidden, inner, scale=inner**-0.5)
    plans = _plans(config, job.profile)
    layers = {
        plan: _layer(config, plan, w13, w2, workspace) for plan in dict.fromkeys(plans.values())
    }

    def fused(plan: MegaMoePlan) -> Callable[[], torch.Tensor]:
        return lambda: layers[plan](x, ids, weights)

    def serial() -> torch.Tensor:
        return reference.moe_unfused(x, ids, weights, w13, w2)

    calls: dict[str, Callable[[], torch.Tensor]] = {
        _plan_name(plans, plan): fused(plan) for plan in layers
    }
    calls["serial"] = serial
    ok = _correct({name: call() for name, call in calls.items()})
    times = time_arms(calls, pairs=job.pairs)
    for layer in layers.values():
        layer.check()
        layer.close()
    if rank != 0:
        return []
    return _rows(config, job, plans, times, ok)


def distinct_plans(config: Config, profile: machine.MachineProfile) -> list[MegaMoePlan]:
    """Plans of all arms, in their order, each once: arms of one plan are measured once."""
    return list(dict.fromkeys(_plans(config, profile).values()))


def _plan_name(plans: dict[str, MegaMoePlan], plan: MegaMoePlan) -> str:
    return next(arm for arm, its in plans.items() if its == plan)


def _layer(
    config: Config,
    plan: MegaMoePlan,
    w13: torch.Tensor,
    w2: torch.Tensor,
    workspace: SymmetricWorkspace,
) -> MegaMoE:
    layer = MegaMoE(
        num_experts=config.num_experts,
        topk=config.topk,
        hidden=config.hidden,
        intermediate=config.intermediate,
        max_tokens=config.tokens,
        device=workspace.device,
        impl="native",
        plan=dataclasses.asdict(plan),
    )
    layer.w13 = torch.nn.Parameter(w13, requires_grad=False)
    layer.w2 = torch.nn.Parameter(w2, requires_grad=False)
    layer.prepare(workspace)
    return layer


def _correct(results: dict[str, torch.Tensor]) -> dict[str, bool]:
    """Every arm against the unfused pipeline, and against the first arm bit for bit; all ranks."""
    first = next(iter(results.values()))
    ok = {}
    for name, result in results.items():
        close = compare(result, results["serial"], **TOLERANCE).ok
        same = name == "serial" or bool(torch.equal(result, first))
        flag = torch.tensor(float(close and same), device=result.device)
        dist.all_reduce(flag, dist.ReduceOp.MIN)
        ok[name] = bool(flag.item())
    return ok


def _rows(
    config: Config,
    job: Job,
    plans: dict[str, MegaMoePlan],
    times: dict[str, Timing],
    ok: dict[str, bool],
) -> list[_report.Row]:
    rows = []
    for row in sweep_84.predicted_rows(config, job.profile):
        name = _plan_name(plans, plans[row.arm])
        rows.append(_measured(row, row.arm, times[name], ok[name], dict(row.extra)))
    shared = {k: v for k, v in rows[0].extra.items() if not k.startswith(("predicted", "plan"))}
    rows.append(_measured(rows[0], "serial", times["serial"], ok["serial"], shared))
    return rows


def _measured(
    like: _report.Row, arm: str, timing: Timing, ok: bool, extra: dict[str, object]
) -> _report.Row:
    extra.pop("predicted", None)
    us = timing.us_median
    return dataclasses.replace(
        like,
        arm=arm,
        us_median=us,
        us_p10=timing.us_p10,
        us_p90=timing.us_p90,
        n=timing.n,
        tflops=float(like.extra["flops"]) / us / 1e6,
        egress_GBps=float(like.extra["egress_bytes"]) / us / 1e3,
        ok=ok,
        extra=extra,
    )
