"""The ways that `UlyssesAttention` can compute.

fused   our All-to-All of q, k, v; attention that stores to the owners of the rows
serial  our All-to-All, a local attention (our kernel, or torch's where ours lacks the head size),
        our All-to-All back
torch   torch.distributed and torch's attention: any group, any device, any head size
All of them take uneven shards and heads.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist

from .channel import ChannelLease
from .planner.attention import AttentionPlan
from .planner.attention_choice import AttentionProblem
from .reference_attention import key_is_valid


@dataclasses.dataclass(frozen=True)
class Semantics:
    """What a call means, beside its tensors."""

    key_segments: torch.Tensor | None
    scale: float | None
    causal: bool
    want_lse: bool


@dataclasses.dataclass(frozen=True)
class Route:
    """How a prepared module computes, on this rank."""

    path: str
    generation: str
    local_kernel: bool  # whether the local attention of the serial path is ours
    rank: int
    world: int
    group: dist.ProcessGroup | None


@dataclasses.dataclass(frozen=True)
class CallWords:
    """The wire messages of one shape; constants to torch.compile."""

    problem: AttentionProblem
    plan: AttentionPlan
    forth: tuple[int, ...]
    back: tuple[int, ...]
    local: tuple[int, ...]
    head_phase: int
    inputs: tuple[int, ...]  # workspace of the channel for q, k, v
    outputs: tuple[int, ...]

    @classmethod
    def of(
        cls,
        problem: AttentionProblem,
        plan: AttentionPlan,
        rank: int,
        inputs: ChannelLease | None,
        outputs: ChannelLease | None,
        digest: int,
    ) -> CallWords:
        """Words of a plan over the leases; without leases (torch path) they stay empty."""
        phase = plan.head_phase(rank)
        if outputs is None:
            return cls(problem, plan, (), (), (), phase, (), ())
        # A local call knows one rank; what its heads share of key groups stays in head_phase.
        local = dataclasses.replace(
            plan,
            rows=(sum(plan.rows),),
            kv_rows=(sum(plan.kv_rows),),
            heads=(plan.heads[rank],),
        )
        return cls(
            problem,
            plan,
            tuple(plan.words()),
            tuple(plan.to_sequence().words()),
            tuple(local.words()),
            phase,
            () if inputs is None else tuple(inputs.words(digest)),
            tuple(outputs.words(digest)),
        )


Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def run(
    route: Route, operands: Operands, words: CallWords, meaning: Semantics
) -> tuple[torch.Tensor, torch.Tensor]:
    """Result [B, rows of the rank, heads, D] and log-sum-exp of the rank's heads (or empty)."""
    if route.path == "torch":
        return _by_torch(route, operands, words.plan, meaning)
    ops = torch.ops.xstage
    q, k, v = operands
    if route.world > 1:
        q, k, v = ops.ulysses_a2a([q, k, v], words.forth, words.inputs)
    if route.path == "fused":
        fused = ops.fa3_a2a if route.generation == "fa3" else ops.fa4_a2a
        out, lse = fused(
            q,
            k,
            v,
            meaning.key_segments,
            meaning.scale,
            meaning.causal,
            meaning.want_lse,
            words.forth,
            words.outputs,
        )
        return out, lse
    local, lse = _local(route, (q, k, v), words, meaning)
    if route.world > 1:
        local = ops.ulysses_a2a([local], words.back, words.outputs)[0]
    return local, lse


def _local(
    route: Route, operands: Operands, words: CallWords, meaning: Semantics
) -> tuple[torch.Tensor, torch.Tensor]:
    if not route.local_kernel:
        return _torch_attention(operands, words.plan.kv_group, words.head_phase, meaning)
    ops = torch.ops.xstage
    attention = ops.fa3 if route.generation == "fa3" else ops.fa4
    out, lse = attention(
        *operands,
        meaning.key_segments,
        meaning.scale,
        meaning.causal,
        meaning.want_lse,
        words.head_phase,
        words.local,
    )
    return out, lse


def _by_torch(
    route: Route, operands: Operands, plan: AttentionPlan, meaning: Semantics
) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v = (
        to_heads_by_collective(tensor, plan, route.rank, index == 0, route.group)
        for index, tensor in enumerate(operands)
    )
    out, lse = _torch_attention((q, k, v), plan.kv_group, plan.head_phase(route.rank), meaning)
    return to_sequence_by_collective(out, plan, route.rank, route.group), lse


def _torch_attention(
    operands: Operands, kv_group: int, head_phase: int, meaning: Semantics
) -> tuple[torch.Tensor, torch.Tensor]:
    refuse_lse(meaning)
    out = sdpa(*operands, meaning, kv_group, head_phase)
    return out, out.new_empty(0, dtype=torch.float32)


def refuse_lse(meaning: Semantics) -> None:
    """What torch's attention does not give."""
    if meaning.want_lse:
        raise NotImplementedError(
            "xstage.UlyssesAttention: return_lse: torch's attention gives no log-sum-exp; see "
            "fallback_reason for why it is used"
        )


def sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    meaning: Semantics,
    kv_group: int,
    head_phase: int,
) -> torch.Tensor:
    """torch's attention on [B, S, H, D], with the ops' meaning of causal and of key segments."""
    num_queries, num_keys, heads = q.shape[1], k.shape[1], q.shape[2]
    if heads == 0 or num_queries == 0 or num_keys == 0:
        return torch.zeros_like(q, memory_format=torch.contiguous_format)
    if kv_group > 1:
        key_head = (torch.arange(heads, device=q.device) + head_phase) // kv_group
        k, v = k[:, :, key_head], v[:, :, key_head]
    mask = None
    if meaning.key_segments is not None:
        valid = key_is_valid(meaning.key_segments, num_keys)
        # Weights of hidden keys are exact zeros, but zero times NaN is NaN.
        v = torch.where(valid[:, :, None, None], v, torch.zeros_like(v))
        k = torch.where(valid[:, :, None, None], k, torch.zeros_like(k))
        mask = valid[:, None, None]
    if meaning.causal and (mask is not None or num_queries != num_keys):
        corner = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q.device)
        corner = corner.tril(num_keys - num_queries)
        mask = corner if mask is None else mask & corner
    out = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=meaning.causal and mask is None,
        scale=meaning.scale,
    ).transpose(1, 2)
    if mask is not None:
        seen = mask.any(-1).transpose(1, 2) if mask.dim() == 4 else mask.any(-1)[None, :, None]
        out = torch.where(seen.unsqueeze(-1), out, torch.zeros_like(out))
    return out


def to_heads_by_collective(
    tensor: torch.Tensor,
    plan: AttentionPlan,
    rank: int,
    query: bool,
    group: dist.ProcessGroup | None,
) -> torch.Tensor:
    """Sequence form to head form with all_to_all_single; [B, S, heads of the rank, D]."""
    rows = plan.rows if query else plan.kv_rows
    ranges = [_head_range(plan, r, query) for r in range(plan.world)]
    blocks = [tensor[:, :, first : first + count] for first, count in ranges]
    batch, head_dim = tensor.shape[0], tensor.shape[3]
    shapes = [(batch, rows[r], ranges[rank][1], head_dim) for r in range(plan.world)]
    return torch.cat(_exchange(blocks, shapes, group), 1)


def to_sequence_by_collective(
    tensor: torch.Tensor, plan: AttentionPlan, rank: int, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Head form to sequence form with all_to_all_single; [B, rows of the rank, all heads, D]."""
    blocks = list(tensor.split(list(plan.rows), 1))
    batch, head_dim = tensor.shape[0], tensor.shape[3]
    shapes = [(batch, plan.rows[rank], plan.heads[r], head_dim) for r in range(plan.world)]
    return torch.cat(_exchange(blocks, shapes, group), 2)


def _head_range(plan: AttentionPlan, rank: int, query: bool) -> tuple[int, int]:
    return (sum(plan.heads[:rank]), plan.heads[rank]) if query else plan.key_heads(rank)


def _exchange(
    blocks: list[torch.Tensor],
    shapes: list[tuple[int, int, int, int]],
    group: dist.ProcessGroup | None,
) -> list[torch.Tensor]:
    if len(blocks) == 1:
        return blocks
    sent = torch.cat([block.reshape(-1) for block in blocks])
    sizes = [shape[0] * shape[1] * shape[2] * shape[3] for shape in shapes]
    received = sent.new_empty(sum(sizes))
    dist.all_to_all_single(received, sent, sizes, [block.numel() for block in blocks], group=group)
    return [part.view(shape) for part, shape in zip(received.split(sizes), shapes, strict=True)]
