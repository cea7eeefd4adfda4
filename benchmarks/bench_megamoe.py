"""MegaMoE against its floors, its published baseline, bare matrix products and an unfused pipeline.

    torchrun --nproc-per-node 2 benchmarks/bench_megamoe.py [--shape 0] [--pairs 20]

Two GPUs stand in for one GPU's load among eight: every rank holds the local experts of the table,
and 7/8 of all choices fall on the peer's experts. Where tokens are pushed one crosses once for each
seventh of these experts that wants it, as it would cross once to each of seven peers. Floors are
printed for that case. Arms, all in one process, interleaved, each the maximum over ranks:

  wave st, inter st        16-byte stores by the math warps, Expert-Wave and interleaved schedule,
                           a row pulled per choice: the published experiment
  wave bulk, inter bulk    asynchronous stores, each half tile at once
  wave paced, inter paced  asynchronous stores, a row per warp and step
  chosen                   the planner's plan
  two ranks                the planner's plan for the two ranks as they are: a token crosses once
  local                    our kernel, the same rows, all experts on this rank
  gemms                    torch's two grouped products alone, no activation, no copies between
  fp8 rival                the public Hopper FP8 MegaMoE (deep_gemm) where it is installed: half
                           the bytes, twice the arithmetic rate, so a reference, no competitor
  unfused                  sort, NCCL All-to-All, grouped products, NCCL back, weighted sum

Every arm is compared with the unfused pipeline before timing, ours with each other bit for bit.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from _ranks import local_rank
from _report import ResultWriter, Row, line
from _rival_moe import rival_arm
from _sweep import AS_IT_IS, proxy_sets, sent_tokens

from xstage_ext import SymmetricWorkspace, machine, reference
from xstage_ext.planner import choose
from xstage_ext.planner.megamoe import DISPATCHES, MegaMoePlan
from xstage_ext.planner.problem import MoEProblem
from xstage_ext.testing import Timing, compare, make_routing, time_arms
from xstage_ext.workspace import region_bytes

RANKS = 8
"""Of the group that two ranks stand in for."""
REMOTE_SHARE = (RANKS - 1) / RANKS
RTOL = ATOL = 2e-2

MIXED = {"schedule": 1, "mix": 1, "group_blocks": 8, "lead_blocks": 16, "x_ring_blocks": 32}
"""The interleaved order that measured best: tiles mixed, short leads, few rows ahead."""

ARMS: dict[str, dict[str, int]] = {
    "wave st": {"schedule": 0, "store": 0, "dispatch": 0},
    "inter st": {**MIXED, "store": 0, "dispatch": 0},
    "wave bulk": {"schedule": 0, "store": 1},
    "inter bulk": {**MIXED, "store": 1},
    "wave paced": {"schedule": 0, "store": 2, "slice_rows": 1},
    "inter paced": {**MIXED, "store": 2, "slice_rows": 1},
    "chosen": {},
    AS_IT_IS: {},
}
"""Fields of the plan that an arm fixes; the planner chooses the others."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """One line of the table: tokens and experts are those of one rank."""

    tokens: int
    hidden: int
    intermediate: int
    local_experts: int
    topk: int

    def problem(self, world: int, arm: str = "chosen") -> MoEProblem:
        """For the planner."""
        ranks = world if arm == AS_IT_IS else RANKS
        return MoEProblem(
            world=world,
            num_experts=self.local_experts * world,
            topk=self.topk,
            hidden=self.hidden,
            intermediate=self.intermediate,
            max_tokens=self.tokens,
            remote_share=REMOTE_SHARE if world > 1 else None,
            token_sets=proxy_sets(ranks, world, self.local_experts),
        )


SHAPES = (
    Shape(8192, 4096, 1536, 16, 4),
    Shape(4096, 7168, 2048, 16, 8),
    Shape(128, 7168, 2048, 16, 8),
    Shape(8192, 2048, 768, 32, 8),
)

Call = Callable[[], torch.Tensor]

RIVAL = "fp8 rival"


class Layer:
    """Tensors of this rank for one shape."""

    def __init__(self, shape: Shape, rank: int, world: int) -> None:
        self.shape, self.rank, self.world = shape, rank, world
        share = REMOTE_SHARE if world > 1 else None
        experts = shape.local_experts * world
        routing = make_routing(world, shape.tokens, experts, shape.topk, remote_share=share, seed=1)
        self.remote_share = routing.remote_share
        self.received = int(
            routing.counts(experts).reshape(world, world, -1).sum(axis=(0, 2))[rank]
        )
        self.ids = torch.from_numpy(routing.topk_idx[rank]).int().cuda()
        self.weights = torch.from_numpy(routing.topk_weights[rank]).cuda()
        generator = torch.Generator("cuda").manual_seed(rank)

        def normal(*sizes: int, scale: float = 1.0) -> torch.Tensor:
            values = torch.randn(*sizes, generator=generator, device="cuda", dtype=torch.bfloat16)
            return values.mul_(scale)

        hidden, inner = shape.hidden, shape.intermediate
        self.x = normal(shape.tokens, hidden)
        self.w13 = normal(shape.local_experts, 2 * inner, hidden, scale=hidden**-0.5)
        self.w2 = normal(shape.local_experts, hidden, inner, scale=inner**-0.5)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """x, topk_idx, topk_weights, w13, w2."""
        return self.x, self.ids, self.weights, self.w13, self.w2

    @property
    def flops(self) -> float:
        """Of the rows that this rank receives."""
        return 6.0 * self.received * self.shape.hidden * self.shape.intermediate

    def egress_bytes(self, plan: MegaMoePlan | None) -> float:
        """Tokens and results that leave this rank, in bf16; None: a row per choice."""
        results = tokens = self.shape.tokens * self.shape.topk * self.remote_share
        if plan is not None and DISPATCHES[plan.dispatch] == "push":
            local, ids = self.shape.local_experts, self.ids.cpu().numpy()
            tokens = sent_tokens(ids, self.rank, local, plan.token_sets)
        return (tokens + results) * 2.0 * self.shape.hidden

    def fused(self, plan: MegaMoePlan, workspace: SymmetricWorkspace, name: str) -> Call:
        """The operator with a plan; its memory comes from the workspace."""
        lease = workspace.channel(name, plan.bytes())
        words, plan_words = lease.words(), plan.words()
        ids = self.ids if plan.world > 1 or self.world == 1 else self.ids % plan.num_experts
        return lambda: torch.ops.xstage.megamoe(
            self.x, ids, self.weights, self.w13, self.w2, plan_words, words
        )

    def gemms(self) -> Call:
        """Both grouped products on as many rows as this rank receives, spread evenly."""
        local, inner = self.shape.local_experts, self.shape.intermediate
        counts = torch.full((local,), self.received // local, device="cuda")
        counts[: self.received % local] += 1
        rows = torch.randn(self.received, self.shape.hidden, device="cuda").bfloat16()
        hidden = torch.randn(self.received, inner, device="cuda").bfloat16()

        def call() -> torch.Tensor:
            reference.grouped_linear(rows, self.w13, counts)
            return reference.grouped_linear(hidden, self.w2, counts)

        return call

    def unfused(self) -> torch.Tensor:
        """The serial pipeline."""
        return reference.moe_unfused(*self.tensors)


def plans_of(shape: Shape, world: int, names: list[str]) -> dict[str, MegaMoePlan]:
    """The plan of every fused arm."""
    plans = {
        name: choose.choose(shape.problem(world, name), None, **ARMS[name]).plan for name in names
    }
    if world > 1:
        # A rank of its own: duplicates of an expert within a token are legal.
        plans["local"] = choose.choose(shape.problem(1), None).plan
    return plans


def all_ranks(ok: bool) -> bool:
    """Whether it holds on every rank."""
    flag = torch.tensor(float(ok), device="cuda")
    if dist.is_initialized():
        dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag.item())


def check(calls: dict[str, Call], wanted: torch.Tensor) -> dict[str, bool]:
    """Fused arms against the unfused pipeline, and against each other bit for bit."""
    first: torch.Tensor | None = None
    ok = {}
    for name, call in calls.items():
        if name in ("gemms", "local"):
            ok[name] = all_ranks(bool(call().isfinite().all()))
            continue
        result = call().clone()
        if name == "unfused":
            good = torch.allclose(result, wanted, rtol=RTOL, atol=ATOL)
        elif first is None:
            first, good = result, compare(result, wanted, rtol=RTOL, atol=ATOL).ok
        else:
            good = bool(torch.equal(first, result))
        ok[name] = all_ranks(good)
    return ok


def rows_of(
    layer: Layer, plans: dict[str, MegaMoePlan], times: dict[str, Timing], ok: dict[str, bool]
) -> list[Row]:
    """What was measured, with the floors of this shape."""
    shape, world = layer.shape, layer.world
    profile = machine.load("h200x2")
    rows = []
    for name, timing in times.items():
        us = timing.us_median
        floors = choose.floors(shape.problem(world, name), profile)
        extra: dict[str, str | float] = {
            "remote_share": round(layer.remote_share, 4),
            "floor_compute_us": round(floors.compute_us, 1),
            "floor_egress_us": round(floors.egress_us, 1) if world > 1 else 0.0,
            "floor_weights_us": round(floors.weights_us, 1),
        }
        if name in plans:
            extra["plan"] = " ".join(map(str, plans[name].words()))
            extra["workspace_bytes"] = plans[name].bytes()
        remote = name not in ("local", "gemms")
        sent = layer.egress_bytes(plans.get(name)) if remote else 0.0
        rows.append(
            Row(
                "megamoe",
                name,
                dataclasses.asdict(shape),
                world,
                us,
                timing.us_p10,
                timing.us_p90,
                timing.n,
                tflops=layer.flops / us / 1e6,
                egress_GBps=sent / us / 1e3,
                ok=ok[name],
                extra=extra,
            )
        )
    return rows


def measure(
    shape: Shape, names: list[str], pairs: int, rank: int, world: int, with_rival: bool
) -> list[Row]:
    """All arms of one shape; every rank calls it."""
    layer = Layer(shape, rank, world)
    plans = plans_of(shape, world, names)
    shared = region_bytes(plan.bytes() for name, plan in plans.items() if name != "local")
    with SymmetricWorkspace(nbytes=shared) as workspace:
        calls = {
            name: layer.fused(plan, workspace, name)
            for name, plan in plans.items()
            if name != "local"
        }
        own = None
        if "local" in plans:
            nbytes = region_bytes([plans["local"].bytes()])
            own = SymmetricWorkspace(nbytes=nbytes, backend="virtual", world=1)
            calls["local"] = layer.fused(plans["local"], own, "local")
        calls["gemms"] = layer.gemms()
        calls["unfused"] = layer.unfused
        wanted = layer.unfused()
        ok = check(calls, wanted)
        rival, why_not = None, "not asked for"
        if with_rival:
            rival, why_not = rival_arm(layer.tensors, wanted)
        if rival is not None:
            calls[RIVAL], ok[RIVAL] = rival, True
        elif rank == 0:
            print(f"{RIVAL}: skipped: {why_not}", flush=True)
        times = time_arms(calls, pairs=pairs)
        workspace.check(synchronize=True)
        if own is not None:
            own.close()
    return rows_of(layer, plans, times, ok) if rank == 0 else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", type=int, action="append", help="lines of the table, from 0")
    parser.add_argument("--arms", nargs="*", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--no-rival", action="store_true", help="it compiles its kernels first")
    parser.add_argument("--out", default="megamoe.jsonl")
    options = parser.parse_args()
    rank, world = 0, 1
    device = torch.device("cuda", local_rank("bench_megamoe", alone=True))
    if "RANK" in os.environ:
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
        rank, world = dist.get_rank(), dist.get_world_size()
    writer = ResultWriter(options.out) if rank == 0 else None
    for index in options.shape or range(len(SHAPES)):
        shape = SHAPES[index]
        for row in measure(shape, options.arms, options.pairs, rank, world, not options.no_rival):
            assert writer is not None
            print(line(row), flush=True)
            writer.write(row)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
