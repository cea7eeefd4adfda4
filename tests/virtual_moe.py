"""A mixture-of-experts layer whose ranks are virtual, for tests of the plain ops."""

from __future__ import annotations

import dataclasses
import itertools

import torch

from xstage_ext import SymmetricWorkspace, reference
from xstage_ext.planner.megamoe import MegaMoePlan

ROUNDED = {"rtol": 2e-2, "atol": 2e-2}
"""Both sides round at the same places; sums of bf16 products differ in their order only."""


@dataclasses.dataclass
class Layer:
    """All ranks of a layer, their weights and a virtual workspace."""

    plan: MegaMoePlan
    w13: torch.Tensor
    w2: torch.Tensor
    workspace: SymmetricWorkspace

    @classmethod
    def make(cls, plan: MegaMoePlan, seed: int = 0) -> Layer:
        generator = torch.Generator().manual_seed(seed)
        e, h, i = plan.num_experts, plan.hidden, plan.intermediate
        w13 = torch.randn(e, 2 * i, h, generator=generator) / h**0.5
        w2 = torch.randn(e, h, i, generator=generator) / i**0.5
        workspace = SymmetricWorkspace(
            nbytes=plan.bytes() + 1024, device="cpu", world=plan.world, timeout_ms=5000
        )
        return cls(plan, w13.bfloat16(), w2.bfloat16(), workspace)

    def __post_init__(self) -> None:
        self.lease = self.workspace.channel("moe", self.plan.bytes())

    def ranks(self, weights: torch.Tensor) -> list[torch.Tensor]:
        return list(weights.split(self.plan.experts_per_rank))

    def __call__(
        self,
        x: list[torch.Tensor],
        ids: list[torch.Tensor],
        scores: list[torch.Tensor],
        **options: float,
    ) -> list[torch.Tensor]:
        with self.lease.guard():
            ys: list[torch.Tensor] = torch.ops.xstage.megamoe_virtual(
                x, ids, scores, self.ranks(self.w13), self.ranks(self.w2), self.plan.words(),
                self.lease.virtual_words(), **options,
            )  # fmt: skip
        return ys

    def check(
        self,
        x: list[torch.Tensor],
        ids: list[torch.Tensor],
        scores: list[torch.Tensor],
        **options: float,
    ) -> list[torch.Tensor]:
        ys = self(x, ids, scores, **options)
        layout = ("gate_up", "up_gate", "interleaved")[self.plan.weight_layout]
        for rank, y in enumerate(ys):
            expected = reference.moe_reference(
                x[rank], ids[rank], scores[rank], self.w13, self.w2, rounded=True,
                weight_layout=layout, **options,
            )  # fmt: skip
            assert y.shape == x[rank].shape
            torch.testing.assert_close(y.float(), expected, **ROUNDED)
        return ys


def plan_of(world: int = 2, **fields: int) -> MegaMoePlan:
    """A small plan whose rings are as short as the schedule allows."""
    values = {
        "world": world, "num_experts": 4 * world, "topk": 2, "hidden": 192, "intermediate": 64,
        "max_tokens": 300, "num_sms": 6, "block_m": 64, "group_blocks": 2, "lead_blocks": 1,
        "wave_blocks": 3, "x_ring_blocks": 2, "h_ring_blocks": 5,
    }  # fmt: skip
    return MegaMoePlan(**(values | fields))


def batch(plan: MegaMoePlan, counts: list[int], seed: int = 1) -> tuple[list[torch.Tensor], ...]:
    """Random tokens and distinct experts for every rank."""
    generator = torch.Generator().manual_seed(seed)
    xs, ids, scores = [], [], []
    for count in counts:
        xs.append(torch.randn(count, plan.hidden, generator=generator).bfloat16())
        top = torch.rand(count, plan.num_experts, generator=generator).topk(plan.topk)
        scores.append(top.values)
        ids.append(top.indices)
    return xs, ids, scores


def regions(plan: MegaMoePlan) -> dict[str, slice]:
    """Where every region of a rank's memory lies."""
    lines = torch.ops.xstage.megamoe_layout(plan.words()).splitlines()
    spans = {name: (int(at), int(size)) for name, at, size, _ in (li.split(" ", 3) for li in lines)}
    return {name: slice(at, at + size) for name, (at, size) in spans.items()}


def pushed_tokens(
    plan: MegaMoePlan, x: list[torch.Tensor], ids: list[torch.Tensor]
) -> list[torch.Tensor]:
    """What a push brings to the places of every owner's kTokens.

    Returns
    -------
    list of Tensor
        By owner: the bits, int16 [world - 1, token_sets, max_tokens, hidden]; -1 (a NaN) where
        nothing comes.
    """
    shape = plan.world - 1, plan.token_sets, plan.max_tokens, plan.hidden
    owners = []
    for owner in range(plan.world):
        places = torch.full(shape, -1, dtype=torch.int16, device=x[0].device)
        for distance, slot in itertools.product(range(1, plan.world), range(plan.topk)):
            source = (owner + distance) % plan.world
            local = ids[source][:, slot] - owner * plan.experts_per_rank
            here = ((local >= 0) & (local < plan.experts_per_rank)).nonzero()[:, 0]
            sets = local[here] * plan.token_sets // plan.experts_per_rank
            places[distance - 1, sets.long(), here] = x[source][here].view(torch.int16)
        owners.append(places)
    return owners
