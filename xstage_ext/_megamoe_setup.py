"""What a MegaMoE layer needs to know before its first call."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
import torch.distributed as dist

from . import _env
from ._groups import differences
from .errors import WorkspaceError, XStageError
from .planner import choose
from .planner.megamoe import MegaMoePlan
from .planner.problem import MoEProblem
from .support import describe, device_reason, why_not

IMPLS = ("auto", "native", "fallback")
INDEX_DTYPES = (torch.int32, torch.int64)


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


def agree(
    group: dist.ProcessGroup | None, world: int, reason: str | None, facts: dict[str, object]
) -> str | None:
    """Why all ranks fall back, or None; collective, on the host.

    One rank's reason is every rank's. Without any, the ranks' facts must be the same.

    Raises
    ------
    WorkspaceError
        Names each field in which the ranks differ; or the layer was made for other ranks.
    """
    present = dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1
    if present != world:
        raise WorkspaceError(
            f"xstage.MegaMoE: made for a group of {world} ranks, got one of {present}; make a new "
            "layer and load its weights"
        )
    if world == 1:
        return reason
    everyone: list[tuple[str | None, dict[str, object]]] = [(None, {})] * world
    dist.all_gather_object(everyone, (reason, facts), group=group)
    for rank, (theirs, _) in enumerate(everyone):
        if theirs is not None:
            return theirs if theirs == reason else f"rank {rank}: {theirs}"
    problems = differences([theirs for _, theirs in everyone])
    if problems:
        raise WorkspaceError(f"xstage.MegaMoE: ranks disagree in {'; '.join(problems)}")
    return None


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
        f"runs natively, schedule {decision.action}, predicted {us:.0f} us, "
        f"{decision.bytes / 1e6:.0f} MB of workspace per rank: {decision.reason} "
        f"(profile {decision.profile}, {decision.provenance})"
    )


def check_types(x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> None:
    """Types that no path accepts."""
    if x.dtype != torch.bfloat16:
        raise TypeError(f"xstage.megamoe: x: expected torch.bfloat16, got {x.dtype}")
    if topk_idx.dtype not in INDEX_DTYPES:
        text = f"expected torch.int32 or torch.int64, got {topk_idx.dtype}"
        raise TypeError(f"xstage.megamoe: topk_idx: {text}")
    if not topk_weights.dtype.is_floating_point:
        text = f"expected a floating-point dtype, got {topk_weights.dtype}"
        raise TypeError(f"xstage.megamoe: topk_weights: {text}")


def check_grad(**tensors: torch.Tensor) -> None:
    """Nothing that autograd would ask for its part in the result."""
    wanting = [name for name, tensor in tensors.items() if tensor.requires_grad]
    if wanting and torch.is_grad_enabled():
        raise TypeError(
            f"xstage.megamoe: {' and '.join(wanting)}: requires grad, and there is no backward; "
            "call under torch.no_grad(), or detach it or switch its requires_grad off"
        )


def checked_num_tokens(num_tokens: object, x: torch.Tensor) -> int | torch.Tensor | None:
    """How many rows of x are tokens: an integer of any type as int, a tensor as it is."""
    if num_tokens is None:
        return None
    if isinstance(num_tokens, torch.Tensor):
        if num_tokens.dtype not in INDEX_DTYPES or num_tokens.numel() != 1:
            raise TypeError(
                "xstage.megamoe: num_tokens: expected one element of torch.int32 or torch.int64, "
                f"got {num_tokens.dtype} {list(num_tokens.shape)}"
            )
        return num_tokens
    if not isinstance(num_tokens, (int, np.integer)):
        text = f"expected an integer or a tensor of one, got {num_tokens!r}"
        raise TypeError(f"xstage.megamoe: num_tokens: {text}")
    rows = x.shape[0] if x.dim() else 0
    if not 0 <= num_tokens <= rows:
        text = f"expected 0 to {rows} (rows of x), got {num_tokens}"
        raise ValueError(f"xstage.megamoe: num_tokens: {text}")
    return int(num_tokens)


def check_shapes(
    problem: MoEProblem, x: torch.Tensor, topk_idx: torch.Tensor, weights: torch.Tensor
) -> None:
    """What the native operator checks itself, for the fallback."""
    tokens = x.shape[0] if x.dim() else 0
    wanted = {"topk_idx": [tokens, problem.topk], "topk_weights": [tokens, problem.topk]}
    wanted["x"] = [tokens, problem.hidden]
    for name, tensor in (("x", x), ("topk_idx", topk_idx), ("topk_weights", weights)):
        if list(tensor.shape) != wanted[name]:
            text = f"expected {wanted[name]}, got {list(tensor.shape)}"
            raise RuntimeError(f"xstage.megamoe: {name}: {text}")
    if tokens > problem.max_tokens:
        text = f"expected at most {problem.max_tokens} (max_tokens), got {tokens}"
        raise RuntimeError(f"xstage.megamoe: x: tokens: {text}")


def check_out(problem: MoEProblem, x: torch.Tensor, out: torch.Tensor | None) -> None:
    """The caller's tensor for the result, if any, as the native operator checks it."""
    if out is None:
        return
    tokens = x.shape[0] if x.dim() else 0
    wanted = torch.bfloat16, [tokens, problem.hidden]
    if (out.dtype, list(out.shape)) != wanted:
        text = f"expected {wanted[0]} {wanted[1]}, got {out.dtype} {list(out.shape)}"
        raise RuntimeError(f"xstage.megamoe: out: {text}")
    if not out.is_contiguous():
        raise RuntimeError("xstage.megamoe: out: expected a contiguous tensor; call .contiguous()")
