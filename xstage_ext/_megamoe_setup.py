"""What a MegaMoE layer needs to know before its first call."""

from __future__ import annotations

import dataclasses
import math

import torch
import torch.distributed as dist

from . import _env
from ._arguments import is_number
from ._groups import differences, first_said
from .errors import PlanError, WorkspaceError, XStageError
from .planner import choose
from .planner.megamoe import MegaMoePlan
from .planner.problem import MoEProblem
from .support import describe, device_reason, natively, why_not

IMPLS = ("auto", "native", "fallback")


def new_weight(*shape: int, device: torch.device) -> torch.nn.Parameter:
    """An uninitialised bf16 weight."""
    data = torch.empty(*shape, dtype=torch.bfloat16, device=device)
    return torch.nn.Parameter(data, requires_grad=False)


def wanted_impl(impl: str) -> tuple[str, str]:
    """The impl that counts, and who asked for it: the environment goes before the caller."""
    override = _env.get("XSTAGE_IMPL")
    chosen, source = (impl, "impl") if override is None else (override, "XSTAGE_IMPL")
    if chosen not in IMPLS:
        raise ValueError(f"xstage.MegaMoE: {source}: expected one of {IMPLS}, got {chosen!r}")
    return chosen, source


def check_factors(clamp: float | None, routed_scaling_factor: float) -> None:
    """Refuses what is no number, and numbers that would make every result NaN."""
    if clamp is not None and not (is_number(clamp) and clamp > 0):
        raise PlanError(f"xstage.MegaMoE: clamp: expected a positive number, got {clamp!r}")
    if not (is_number(routed_scaling_factor) and math.isfinite(routed_scaling_factor)):
        raise PlanError(
            "xstage.MegaMoE: routed_scaling_factor: expected a finite number, got "
            f"{routed_scaling_factor!r}"
        )


def agree(
    group: dist.ProcessGroup | None,
    world: int,
    reason: str | None,
    facts: dict[str, object],
    refusal: XStageError | None,
    insists: str | None,
) -> tuple[str | None, str | None]:
    """Why all ranks fall back, and who insists on the kernel, or None; collective, on the host.

    One rank's reason is every rank's, and so is one rank's `insists`: with both, no rank goes on.
    Without a reason, the ranks' facts must be the same.

    Raises
    ------
    PlanError
        A rank found no plan (`refusal`); names it and says why.
    WorkspaceError
        Names each field in which the ranks differ; or the layer was made for other ranks.
    """
    present = dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1
    if present != world:
        raise WorkspaceError(
            f"xstage.MegaMoE: made for a group of {world} ranks, got one of {present}; make a new "
            "layer and load its weights"
        )
    own = (reason, None if refusal is None else str(refusal), facts, insists)
    everyone = [own] * world
    if world > 1:
        dist.all_gather_object(everyone, own, group=group)
    for rank, (_, text, _, _) in enumerate(everyone):
        if text is not None:
            raise PlanError(f"xstage.MegaMoE: rank {rank} has no plan: {text}") from refusal
    insists = first_said([theirs for _, _, _, theirs in everyone], insists)
    reason = first_said([theirs for theirs, _, _, _ in everyone], reason)
    if reason is not None:
        return reason, insists
    problems = differences([theirs for _, _, theirs, _ in everyone])
    if problems:
        raise WorkspaceError(f"xstage.MegaMoE: ranks disagree in {'; '.join(problems)}")
    return None, insists


def counter_bytes(plan: MegaMoePlan) -> int:
    """Bytes at the region's start that a reset must zero: everything before the counts."""
    for line in torch.ops.xstage.megamoe_layout(plan.words()).splitlines():
        name, offset, *_ = line.split(" ")
        if name == "kCounts":
            return int(offset)
    raise XStageError("xstage.MegaMoE: the binary's layout has no kCounts")


def given_fields(plan: dict[str, int] | None, device: torch.device) -> dict[str, int]:
    """Fields of the plan that the planner must take: the caller's, and the SMs of this GPU."""
    given = dict(plan or {})
    if device.type == "cuda":
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        given.setdefault("num_sms", num_sms // 2 * 2)
    return given


def refuse_late_prepare(name: str, closed: bool, device: torch.device) -> None:
    """Where a layer that is not prepared cannot be called."""
    if closed:
        raise WorkspaceError(f"xstage.MegaMoE: {name}: it is closed")
    late = "call prepare() on every rank before the first call is captured or compiled"
    if torch.compiler.is_compiling():
        raise RuntimeError(late)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise WorkspaceError(f"xstage.MegaMoE: {name}: {late}")


def differing(one: MegaMoePlan | None, other: MegaMoePlan) -> str:
    """The fields in which two plans differ."""
    if one is None:
        return "no plan"
    a, b = dataclasses.asdict(one), dataclasses.asdict(other)
    return ", ".join(f"{k}: {a[k]} and {b[k]}" for k in a if a[k] != b[k]) or "not prepared"


@why_not.register
def _(problem: MoEProblem, device: torch.device) -> str | None:
    return problem.why_not() or device_reason(device)


@describe.register
def _(problem: MoEProblem, device: torch.device) -> str:
    profile = choose.profile_here()
    decision = choose.choose(problem, profile)
    us = choose.predicted_us(problem, decision.plan, profile)
    return (
        f"{natively(device)}, schedule {decision.action}, predicted {us:.0f} us, "
        f"{decision.bytes / 1e6:.0f} MB of workspace per rank: {decision.reason} "
        f"(profile {decision.profile}, {decision.provenance})"
    )
