"""Attention and its All-to-All in plain torch, in fp32: what the ops mean.

One process, whole tensors, no tricks. Slow, and memory grows with Sq x Sk.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .planner.attention import AttentionPlan


def key_is_valid(key_segments: torch.Tensor, num_keys: int) -> torch.Tensor:
    """bool [B, Sk]: key j is valid when some run of its batch entry has begin <= j < end.

    Parameters
    ----------
    key_segments : int32 [B, N, 2]
        Half-open runs (begin, end) in key rows; empty when end <= begin.
    """
    keys = torch.arange(num_keys, device=key_segments.device)
    begin, end = key_segments[..., :1], key_segments[..., 1:]
    return ((keys >= begin) & (keys < end)).any(1)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key_segments: torch.Tensor | None = None,
    scale: float | None = None,
    causal: bool = False,
    kv_group: int | None = None,
    head_phase: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale q k^T + mask) v in fp32.

    Parameters
    ----------
    q : [B, Sq, Hq, D]
    k, v : [B, Sk, Hkv, D]
    key_segments : int32 [B, N, 2], optional
        Valid keys; what other keys hold, NaN included, reaches no result.
    scale : float, optional
        None: 1 / sqrt(D).
    causal : bool
        Aligned at the ends: query i sees keys j <= i + Sk - Sq.
    kv_group, head_phase : int
        Query head i reads key head (i + head_phase) // kv_group. None: Hq // Hkv.

    Returns
    -------
    out : float32 [B, Sq, Hq, D]
        A query without any key gives zeros.
    lse : float32 [B, Hq, Sq]
        Logarithm of the softmax's denominator; minus infinity without any key.
    """
    batch, num_queries, heads, head_dim = q.shape
    num_keys = k.shape[1]
    group = heads // k.shape[2] if kv_group is None else kv_group
    key_head = (torch.arange(heads, device=q.device) + head_phase) // group
    visible = torch.ones(batch, 1, num_queries, num_keys, dtype=torch.bool, device=q.device)
    if causal:
        visible = visible.tril(num_keys - num_queries)
    if key_segments is not None:
        valid = key_is_valid(key_segments, num_keys)
        visible = visible & valid[:, None, None]
        k = k.masked_fill(~valid[:, :, None, None], 0)
        v = v.masked_fill(~valid[:, :, None, None], 0)
    k, v = k[:, :, key_head].float(), v[:, :, key_head].float()
    scale = head_dim**-0.5 if scale is None else scale
    scores = torch.einsum("bqhd,bkhd->bhqk", q.float(), k) * scale
    scores = scores.masked_fill(~visible, -torch.inf)
    # A row of minus infinities has no softmax; its weights are zero by definition here.
    weights = scores.softmax(-1).masked_fill(~visible, 0.0)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v), scores.logsumexp(-1)


def shards(tensor: torch.Tensor, rows: Sequence[int]) -> list[torch.Tensor]:
    """Cut [B, S, ...] into the ranks' shards [B, rows of r, ...]."""
    return list(tensor.split(list(rows), 1))


def to_heads(plan: AttentionPlan, tensor: torch.Tensor, query: bool = True) -> list[torch.Tensor]:
    """What every rank holds behind the All-to-All: [B, S, heads of r, D] of a whole tensor."""
    if query:
        return list(tensor.split(list(plan.heads), 2))
    ranges = [plan.key_heads(rank) for rank in range(plan.world)]
    return [tensor[:, :, first : first + count] for first, count in ranges]
