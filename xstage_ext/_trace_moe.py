"""Runs traced megamoe calls: one layer, several plans, what was predicted beside what was seen."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Iterator

import torch
import torch.distributed as dist

from .machine import MachineProfile
from .planner import choose
from .planner.megamoe import MegaMoePlan
from .planner.problem import MoEProblem
from .simulate import simulate_megamoe
from .testing import make_routing, meet
from .trace import MegaMoETrace
from .workspace import SymmetricWorkspace, region_bytes

RECORDS = 512
"""Per CTA and track; a call of 8192 tokens and 16 experts has about 60 tiles per CTA."""

ARMS: dict[str, dict[str, int]] = {
    "wave, st": {"schedule": 0, "store": 0},
    "interleaved, st": {"schedule": 1, "store": 0},
    "interleaved, paced": {"schedule": 1, "store": 2},
}
"""Plans that are traced by default; the planner chooses the other fields."""


@contextlib.contextmanager
def ranks() -> Iterator[tuple[int, int]]:
    """(rank, world) of the processes that torchrun started, each on its GPU; (0, 1) without it."""
    if "RANK" not in os.environ:
        yield 0, 1
        return
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    try:
        yield dist.get_rank(), dist.get_world_size()
    finally:
        dist.destroy_process_group()


@dataclasses.dataclass(frozen=True)
class MoETensors:
    """Inputs of one rank."""

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor
    w13: torch.Tensor
    w2: torch.Tensor

    @property
    def all(self) -> tuple[torch.Tensor, ...]:
        """In the order of the op's arguments."""
        return self.x, self.topk_idx, self.topk_weights, self.w13, self.w2

    @classmethod
    def random(
        cls, problem: MoEProblem, rank: int, device: torch.device | str = "cuda"
    ) -> MoETensors:
        """Normal data and balanced routing, alike on all ranks that ask with the same problem."""
        routing = make_routing(
            problem.world,
            problem.max_tokens,
            problem.num_experts,
            problem.topk,
            remote_share=problem.remote_share,
            seed=1,
        )
        generator = torch.Generator(device).manual_seed(rank)

        def normal(*sizes: int, scale: float = 1.0) -> torch.Tensor:
            values = torch.randn(*sizes, generator=generator, device=device, dtype=torch.bfloat16)
            return values.mul_(scale)

        experts, hidden, inner = problem.experts_per_rank, problem.hidden, problem.intermediate
        return cls(
            normal(problem.max_tokens, hidden),
            torch.from_numpy(routing.topk_idx[rank]).int().to(device),
            torch.from_numpy(routing.topk_weights[rank]).to(device),
            normal(experts, 2 * inner, hidden, scale=hidden**-0.5),
            normal(experts, hidden, inner, scale=inner**-0.5),
        )


def trace_plan(tensors: MoETensors, plan: MegaMoePlan, calls: int = 6) -> MegaMoETrace:
    """The last of a few traced calls. Every rank of WORLD calls it, also for a plan of one rank."""
    nbytes = region_bytes([plan.bytes()])
    with (
        SymmetricWorkspace(nbytes=nbytes, backend="virtual", world=1)
        if plan.world == 1
        else SymmetricWorkspace(nbytes=nbytes)
    ) as workspace:
        words = workspace.channel("trace", plan.bytes()).words()
        # In a world of one all experts are this rank's.
        ids = tensors.topk_idx % plan.num_experts if plan.world == 1 else tensors.topk_idx
        for _ in range(calls):
            meet()
            _, records = torch.ops.xstage.megamoe_traced(
                tensors.x,
                ids,
                tensors.topk_weights,
                tensors.w13,
                tensors.w2,
                plan.words(),
                words,
                RECORDS,
            )
        workspace.check(synchronize=True)
    return MegaMoETrace.read(records)


def report(
    problem: MoEProblem, profile: MachineProfile, rank: int, folder: pathlib.Path | None
) -> str:
    """Traces every arm, and between ranks `local`; writes files on rank 0, returns the text."""
    tensors = MoETensors.random(problem, rank)
    problems = {name: (problem, fields) for name, fields in ARMS.items()}
    # Alone, a rank needs enough experts for the choices of a token.
    if problem.world > 1 and problem.topk <= problem.experts_per_rank:
        alone = dataclasses.replace(
            problem, world=1, num_experts=problem.experts_per_rank, remote_share=None
        )
        problems["local stores, interleaved, st"] = alone, ARMS["interleaved, st"]
    texts = []
    for name, (asked, fields) in problems.items():
        decision = choose.choose(asked, profile, **fields)
        trace = trace_plan(tensors, decision.plan)
        predicted = simulate_megamoe(
            decision.plan, asked.even_counts(), profile, num_tokens=asked.load
        )
        seen = max((s.end_us for s in trace.spans), default=0.0)
        texts.append(
            f"== {name}: predicted {predicted.total_us:.0f} us, seen {seen:.0f} us\n"
            f"{trace.breakdown()}\n{trace.summary()}"
        )
        if folder is not None and rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            stem = name.replace(",", "").replace(" ", "_")
            trace.save_chrome(folder / f"{stem}.json")
            trace.save_picture(folder / f"{stem}.png")
    return "\n\n".join(texts)
