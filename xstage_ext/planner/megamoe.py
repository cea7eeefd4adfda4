"""The plan of a megamoe call: the fields of csrc/megamoe/plan.h."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from ..errors import PlanError
from . import wire

SCHEDULES = ("wave", "interleaved")
STORES = ("st", "bulk", "paced")
WEIGHT_LAYOUTS = ("gate_up", "up_gate", "interleaved")
DISPATCHES = ("pull", "push")
LAYER_FIELDS = (
    "world",
    "num_experts",
    "topk",
    "hidden",
    "intermediate",
    "max_tokens",
    "weight_layout",
    "token_sets",
)
"""Fields that say what the layer is; the others say how it runs."""


@dataclasses.dataclass(frozen=True)
class MegaMoePlan:
    """Integers only; `torch.ops.xstage.plan_fields("megamoe")` says what each means."""

    world: int
    num_experts: int
    topk: int
    hidden: int
    intermediate: int
    max_tokens: int
    block_m: int = 128
    block_n: int = 256
    cluster_size: int = 2
    num_sms: int = 132
    schedule: int = 1
    group_blocks: int = 8
    lead_blocks: int = 16
    wave_blocks: int = 64
    mix: int = 0
    x_ring_blocks: int = 64
    h_ring_blocks: int = 64
    store: int = 2
    slice_rows: int = 4
    weight_layout: int = 0
    dispatch: int = 0
    token_sets: int = 1

    @property
    def experts_per_rank(self) -> int:
        """Experts whose weights one rank holds."""
        return self.num_experts // self.world

    @property
    def linear1_tiles(self) -> int:
        """Column tiles of Linear-1; each makes block_n / 2 columns of the activation."""
        return -(-self.intermediate // (self.block_n // 2))

    @property
    def linear2_tiles(self) -> int:
        """Column tiles of Linear-2."""
        return -(-self.hidden // self.block_n)

    def words(self) -> list[int]:
        """The wire message, the `plan` argument of the ops."""
        return wire.pack("megamoe", self)

    def bytes(self) -> int:
        """Bytes of a rank's region of the workspace."""
        return int(torch.ops.xstage.megamoe_workspace_bytes(self.words()))


def check_given(given: Mapping[str, object]) -> None:
    """Raise PlanError unless these fields of a plan may be given by hand, with these values."""
    known = {field.name for field in dataclasses.fields(MegaMoePlan)}
    unknown = ", ".join(sorted(given.keys() - known))
    if unknown:
        raise PlanError(f"xstage.choose: {unknown}: not a field of MegaMoePlan")
    contradicting = ", ".join(name for name in LAYER_FIELDS if name in given)
    if contradicting:
        raise PlanError(
            f"xstage.choose: {contradicting}: says what the layer is, so a plan takes it from "
            "there; give it as an argument of the layer, not in its plan"
        )
    wire.check("megamoe", given)


wire.verify("megamoe", MegaMoePlan)
