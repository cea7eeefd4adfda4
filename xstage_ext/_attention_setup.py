"""What `UlyssesAttention` decides before a call: which path, and what it refuses."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist

from . import _env
from ._arguments import brief, check_place, integer, is_number, lies_on
from ._attention_paths import Operands
from ._groups import first_said
from .errors import PeerError, WorkspaceError, XStageError
from .key_segments import segments_from_mask
from .planner.attention import MAX_RANKS, AttentionPlan, even_split
from .planner.attention_choice import (
    HEAD_DIMS,
    HEAD_DIMS_TEXT,
    AttentionDecision,
    AttentionProblem,
    decide,
)
from .support import describe, device_reason, natively, why_not

Rows = int | Sequence[int]

IMPLS = ("auto", "fa3", "fa4", "torch")
PATHS = ("fused", "serial", "torch")
"""From best to last resort: attention that stores to the owners; our All-to-All around a local
attention; torch.distributed around torch's attention."""
Path = tuple[str, str | None, str | None]
"""One of `PATHS`, why it is not the fused one, and who insists on the kernels."""


def wanted_impl(impl: str) -> tuple[str, str]:
    """The impl that counts, and who asked for it: the environment goes before the caller."""
    if impl not in IMPLS:
        raise ValueError(f"xstage.UlyssesAttention: impl: expected one of {IMPLS}, got {impl!r}")
    override = _env.get("XSTAGE_IMPL")
    if override is None:
        return impl, f"impl={impl}"
    if override not in ("native", "fallback"):
        raise ValueError(f"XSTAGE_IMPL: expected native or fallback, got {override!r}")
    if override == "fallback":
        return "torch", "XSTAGE_IMPL=fallback"
    return "fa3" if impl in ("auto", "torch") else impl, "XSTAGE_IMPL=native"


def has_kernel(op: str, device: torch.device) -> bool:
    """Whether an op is implemented for a device in the loaded libraries."""
    key = "CUDA" if device.type == "cuda" else "CPU"
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"xstage::{op}", key))


def kernel_reason(problem: AttentionProblem, device: torch.device) -> str | None:
    """Why the attention kernels cannot compute a problem on a device; None when they can."""
    reason = device_reason(device) or ranks_reason(problem)
    if reason is not None:
        return reason
    if device.type == "cpu":
        return None
    if problem.head_dim not in HEAD_DIMS:
        return f"head_dim {problem.head_dim}: the kernels are compiled for {HEAD_DIMS_TEXT}"
    if problem.dtype not in (torch.bfloat16, torch.float16):
        return f"dtype {problem.dtype}: the kernels are compiled for bfloat16 and float16"
    if not has_kernel(f"{problem.generation}_a2a", device):
        return f"{problem.generation}_a2a has no kernel in the loaded library"
    return None


def ranks_reason(problem: AttentionProblem) -> str | None:
    """Why no kernel connects so many ranks; None when they do."""
    if problem.world <= MAX_RANKS:
        return None
    return f"{problem.world} ranks: the kernels connect up to {MAX_RANKS}; make subgroups"


@why_not.register
def _(problem: AttentionProblem, device: torch.device) -> str | None:
    return problem.why_not() or kernel_reason(problem, device)


@describe.register
def _(problem: AttentionProblem, device: torch.device) -> str:
    if problem.head_dim not in HEAD_DIMS:  # the CPU takes any size
        return (
            f"runs natively on the CPU, slow and exact; GPUs have no kernel for head size "
            f"{problem.head_dim} (there are {HEAD_DIMS_TEXT})"
        )
    decision = decide(problem)
    memory = workspace_bytes(decision.plan, problem)
    return (
        f"{natively(device)}, {decision.action}, {sum(memory) / 1e6:.0f} MB of workspace per rank: "
        f"{decision.reason} (profile {decision.profile}, {decision.provenance})"
    )


def workspace_bytes(plan: AttentionPlan, problem: AttentionProblem) -> tuple[int, int]:
    """Bytes of the channels for q, k, v and for outputs; 0 for q, k, v on a single rank."""
    element = torch.finfo(problem.dtype).bits // 8
    inputs = plan.a2a_region_bytes(3, problem.batch, problem.head_dim, element)
    outputs = plan.region_bytes(problem.batch, problem.head_dim, element)
    return (0 if problem.world == 1 else inputs), outputs


def first_path(problem: AttentionProblem, device: torch.device, impl: str, source: str) -> Path:
    """The best path that this rank can take."""
    if impl == "torch":
        return "torch", source, None
    insists = None if impl == "auto" else source
    reason = why_not(problem, device)
    if reason is None:
        return "fused", None, insists
    whole = ranks_reason(problem) is None and device_reason(device) is None
    if whole and has_kernel("ulysses_a2a", device):
        return "serial", reason, insists
    return "torch", reason, insists


def decided(
    problem: AttentionProblem, fields: Mapping[str, int]
) -> tuple[AttentionDecision | None, XStageError | None]:
    """The planner's choice, or why this rank has none."""
    try:
        return decide(problem, None, **fields), None
    except XStageError as error:
        return None, error


def agree_on_path(
    own: Path,
    facts: Mapping[str, object],
    refusal: Exception | None,
    world: int,
    group: dist.ProcessGroup | None,
) -> Path:
    """The last resort among all ranks' paths is every rank's path; collective.

    One rank that insists on the kernels does so for every rank.

    Parameters
    ----------
    own
        This rank's path, as `first_path` says it.
    facts
        What must be the same on every rank.
    refusal
        Why this rank will not go on; every rank then raises.

    Raises
    ------
    WorkspaceError
        The ranks' facts differ; names each field.
    PeerError
        Another rank refused.
    """
    texts = {name: str(value) for name, value in facts.items()}
    everyone = [(own, texts, None if refusal is None else str(refusal))] * world
    if world > 1:
        dist.all_gather_object(everyone, everyone[0], group=group)
    if refusal is not None:
        raise refusal
    for rank, (_, _, theirs) in enumerate(everyone):
        if theirs is not None:
            raise PeerError(f"rank {rank} of {world} refused the call: {theirs}")
    differing = [name for name in facts if len({other[1][name] for other in everyone}) > 1]
    if differing:
        problems = [
            f"{name}: " + ", ".join(f"rank {r} has {o[1][name]}" for r, o in enumerate(everyone))
            for name in differing
        ]
        raise WorkspaceError(
            f"xstage.UlyssesAttention: the ranks disagree: {'; '.join(problems)}; rows and kv_rows "
            "say how many rows each rank has"
        )
    last = max(range(world), key=lambda rank: PATHS.index(everyone[rank][0][0]))
    path, reason, _ = everyone[last][0]
    if reason is not None and (path, reason) != own[:2]:
        reason = f"rank {last}: {reason}"
    return path, reason, first_said([theirs for (_, _, theirs), *_ in everyone], own[2])


def shares_of(rows: Rows, world: int, name: str) -> tuple[int, ...]:
    """Rows of every rank: an int is a whole length, cut as evenly as possible.

    Raises
    ------
    TypeError, ValueError
        No integers, negative ones, or not as many as ranks.
    """
    what = f"xstage.UlyssesAttention: {name}"
    if type(rows) is not int and isinstance(rows, Iterable):
        shares = tuple(integer(number, what, TypeError) for number in rows)
    else:
        shares = even_split(integer(rows, what, TypeError), world)
    if len(shares) != world:
        raise ValueError(f"{what}: expected one length for each of {world} ranks, got {shares}")
    if min(shares) < 0:
        raise ValueError(f"{what}: expected no negative number, got {rows}")
    return shares


def one_mask(
    mask: torch.Tensor, segments: torch.Tensor | None, size: tuple[int, int]
) -> torch.Tensor:
    """Runs of a key mask of `size` (batch, keys), unless the runs were given too."""
    if segments is not None:
        raise ValueError("xstage.UlyssesAttention: give key_segments or key_mask, not both")
    if mask.dim() == 2 and tuple(mask.shape) != size:
        raise ValueError(
            f"xstage.UlyssesAttention: key_mask: expected bool {list(size)}, a flag per key of the "
            f"whole sequence, got {list(mask.shape)}"
        )
    return segments_from_mask(mask)


def copied(result: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The result in the caller's tensor."""
    if out.shape != result.shape or out.dtype != result.dtype:
        raise ValueError(
            f"xstage.UlyssesAttention: out: expected {result.dtype} {list(result.shape)}, got "
            f"{out.dtype} {list(out.shape)}"
        )
    return out.copy_(result)


def text_rows(joint_rows: Sequence[int] | None, causal: bool) -> tuple[int, ...]:
    """The owner rule of joint text."""
    if causal or joint_rows is None:
        raise NotImplementedError(
            "xstage.UlyssesAttention: joint: needs joint_rows, and has no place in a causal order"
        )
    return tuple(joint_rows)


def with_text(rows: tuple[int, ...], text: tuple[int, ...]) -> tuple[int, ...]:
    """Every rank's rows with its text rows."""
    return tuple(own + added for own, added in zip(rows, text, strict=True))


def joined(joint: Operands, own: Operands, text: int) -> Operands:
    """[B, text + rows, heads, D]: this rank's text before its other rows."""
    for name, added, tensor in zip("qkv", joint, own, strict=True):
        expected = [tensor.shape[0], text, *tensor.shape[2:]]
        if list(added.shape) != expected:
            raise ValueError(
                f"xstage.UlyssesAttention: joint {name}: expected {expected} by {name} and this "
                f"rank's joint_rows, got {list(added.shape)}"
            )
    q, k, v = (torch.cat(pair, 1) for pair in zip(joint, own, strict=True))
    return q, k, v


def capturing(device: torch.device) -> bool:
    """Whether the current stream records a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def refuse_first_call(name: str, shape: object, closed: bool, device: torch.device) -> None:
    """Where a shape cannot be called for the first time."""
    me = f"xstage.UlyssesAttention: {name}:"
    if torch.compiler.is_compiling():
        raise RuntimeError(
            f"{me} {'it is closed; ' if closed else ''}call prepare() and then the module once "
            f"with this shape before torch.compile, got {shape}"
        )
    if closed:
        raise WorkspaceError(f"{me} it is closed")
    if capturing(device):
        raise WorkspaceError(
            f"{me} first call of shape {shape} inside a CUDA graph capture; call prepare() and "
            "then the module once eagerly before capturing"
        )


def refuse_options(
    attn_mask: torch.Tensor | None, dropout_p: float, joint: object, joint_rows: object
) -> None:
    """What callers of other attention functions may pass, and no path computes."""
    if joint is None and joint_rows is not None:
        raise ValueError(
            f"xstage.UlyssesAttention: joint_rows: expected None without joint, got {joint_rows!r}"
        )
    if attn_mask is not None:
        raise NotImplementedError(
            "xstage.UlyssesAttention: attn_mask: only masks of whole keys are supported; pass "
            "key_segments or a bool key_mask [B, Sk]"
        )
    if dropout_p != 0.0:
        raise NotImplementedError(
            f"xstage.UlyssesAttention: dropout_p: expected 0, got {dropout_p}; inference only"
        )


def check_scale(scale: float | None) -> None:
    """Every path wants a positive scale; the kernels' references rely on it."""
    if scale is not None and not (is_number(scale) and 0 < scale < math.inf):
        raise ValueError(
            f"xstage.UlyssesAttention: scale: expected a positive finite number, got {scale!r}"
        )


def check_places(device: torch.device, **others: object) -> None:
    """Tensors beside q, k and v: on the module's device, if they are given."""
    for name, tensor in others.items():
        if tensor is None:
            continue
        if not isinstance(tensor, torch.Tensor):
            text = f"expected a tensor on {device}, got {brief(tensor)}"
            raise TypeError(f"xstage.UlyssesAttention: {name}: {text}")
        check_place(tensor, device, "xstage.UlyssesAttention", name)


def check_dims(operands: Operands, head_dim: int | str, prefix: str = "") -> None:
    """Tensors of four dimensions, the last of them `head_dim` where that is known."""
    for letter, tensor in zip("qkv", operands, strict=True):
        name = prefix + letter
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"xstage.UlyssesAttention: {name}: expected a tensor, got {brief(tensor)}"
            )
        if tensor.dim() != 4 or (head_dim != "D" and tensor.shape[-1] != head_dim):
            raise ValueError(
                f"xstage.UlyssesAttention: {name}: expected [B, rows, heads, {head_dim}], got "
                f"{list(tensor.shape)}"
            )


def check_tensors(
    operands: Operands, head_dim: int, dtype: torch.dtype, device: torch.device, prefix: str = ""
) -> None:
    """Types that no path accepts; `prefix` goes before q, k and v in error texts.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
    """
    if len(operands) != 3:
        raise ValueError(
            f"xstage.UlyssesAttention: {prefix.strip()}: expected three tensors (q, k, v), got "
            f"{len(operands)}"
        )
    check_dims(operands, head_dim, prefix)
    for letter, tensor in zip("qkv", operands, strict=True):
        name = prefix + letter
        if tensor.dtype != dtype or not lies_on(tensor, device):
            raise TypeError(
                f"xstage.UlyssesAttention: {name}: expected {dtype} on {device}, got "
                f"{tensor.dtype} on {tensor.device}"
            )
        if tensor.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(
                f"xstage.UlyssesAttention: {name} requires grad, but there is no backward; use "
                "torch.inference_mode() or torch.no_grad()"
            )


def refuse_shapes(operands: Operands, problem: AttentionProblem, rank: int) -> None:
    """Name the operand whose rows or heads do not fit, the whole head counts and the degree."""
    queries = (problem.rows[rank], problem.heads)
    keys = (problem.key_rows[rank], problem.kv_heads)
    for name, tensor, (rows, heads) in zip("qkv", operands, (queries, keys, keys), strict=True):
        if tuple(tensor.shape[:3]) != (problem.batch, rows, heads):
            raise ValueError(
                f"xstage.UlyssesAttention: {name}: expected [{problem.batch}, {rows}, {heads}, "
                f"{problem.head_dim}] on rank {rank} of {problem.world} ({problem.heads} query and "
                f"{problem.kv_heads} key heads, {sum(problem.rows)} and {sum(problem.key_rows)} "
                f"rows in all), got {list(tensor.shape)}"
            )
