"""What a MegaMoE layer needs to know before its first call."""

from __future__ import annotations

import dataclasses

import torch

from . import _env
from .errors import XStageError
from .planner import choose
from .planner.megamoe import MegaMoePlan
from .planner.problem import MoEProblem
from .support import describe, device_reason, why_not

IMPLS = ("auto", "native", "fallback")


def new_weight(*shape: int, device: torch.device) -> torch.nn.Parameter:
    data = torch.empty(*shape, dtype=torch.bfloat16, device=device)
    return torch.nn.Parameter(data, requires_grad=False)


def wanted_impl(impl: str) -> tuple[str, str]:
    """The impl that counts, and who asked for it: the environment goes before the caller."""
    override = _env.get("XSTAGE_IMPL")
    chosen, source = (impl, "impl") if override is None else (override, "XSTAGE_IMPL")
    if chosen not in IMPLS:
        raise ValueError(f"xstage.MegaMoE: {source}: expected one of {IMPLS}, got {chosen!r}")
    return chosen, source


def counter_bytes(plan: MegaMoePlan) -> int:
    """Bytes at the region's start that a reset must zero: everything before the counts."""
    for line in torch.ops.xstage.megamoe_layout(plan.words()).splitlines():
        name, offset, *_ = line.split(" ")
        if name == "kCounts":
            return int(offset)
    raise XStageError("xstage.MegaMoE: the binary's layout has no kCounts")


def differing(one: MegaMoePlan | None, other: MegaMoePlan) -> str:
    if one is None:
        return "no plan"
    a, b = dataclasses.asdict(one), dataclasses.asdict(other)
    return ", ".join(f"{k}: {a[k]} and {b[k]}" for k in a if a[k] != b[k]) or "not prepared"


@why_not.register
def _(problem: MoEProblem, device: torch.device) -> str | None:
    return problem.why_not() or device_reason(device)


@describe.register
def _(problem: MoEProblem, device: torch.device) -> str:
    decision = choose.choose(problem)
    return (
        f"runs natively, schedule {decision.action}, {decision.bytes / 1e6:.0f} MB of workspace "
        f"per rank: {decision.reason} (profile {decision.profile}, {decision.provenance})"
    )
