"""What a mixture-of-experts layer means: an fp32 reference, and the unfused pipeline.

    y[t] = routed_scaling_factor * sum over k of topk_weights[t, k] * expert_e(x[t])
    e = topk_idx[t, k]
    expert_e(x) = w2[e] @ (silu(min(gate, clamp)) * clip(up, -clamp, clamp)),
    gate, up = the two halves of w13[e] @ x

Routing weights multiply in fp32 where the results of a token are added up, in ascending k. Slots
with id -1 are skipped, whatever their weight holds.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F

LAYOUTS = ("gate_up", "up_gate", "interleaved")
"""Rows of w13: gate then up, up then gate, or one gate row and one up row in turns."""


def split_gate_up(w13: torch.Tensor, weight_layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the gate and the up rows of w13 [..., 2 * intermediate, hidden]."""
    half = w13.shape[-2] // 2
    if weight_layout == "gate_up":
        return w13[..., :half, :], w13[..., half:, :]
    if weight_layout == "up_gate":
        return w13[..., half:, :], w13[..., :half, :]
    if weight_layout == "interleaved":
        return w13[..., 0::2, :], w13[..., 1::2, :]
    raise ValueError(
        f"xstage.reference: weight_layout: expected one of {LAYOUTS}, got {weight_layout!r}"
    )


def activate(gate: torch.Tensor, up: torch.Tensor, clamp: float | None = None) -> torch.Tensor:
    """silu(gate) * up in fp32, rounded to the dtype of `gate`; the clamp comes first."""
    g, u = gate.float(), up.float()
    if clamp is not None:
        g, u = g.clamp(max=clamp), u.clamp(-clamp, clamp)
    return (F.silu(g) * u).to(gate.dtype)


def moe_reference(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    *,
    clamp: float | None = None,
    routed_scaling_factor: float = 1.0,
    weight_layout: str = "gate_up",
    rounded: bool = False,
) -> torch.Tensor:
    """The layer in fp32, all experts at hand.

    Parameters
    ----------
    x : Tensor
        [tokens, hidden], any float dtype.
    topk_idx : Tensor
        [tokens, topk], integers; ids outside 0 .. experts - 1 are skipped.
    topk_weights : Tensor
        [tokens, topk], any float dtype.
    w13, w2 : Tensor
        [experts, 2 * intermediate, hidden] and [experts, hidden, intermediate].
    clamp, routed_scaling_factor, weight_layout
        As in `xstage_ext.MegaMoE`.
    rounded : bool
        Round gate, up, the activation and every expert's result to bf16, where the fused kernel
        does; sums stay in fp32.

    Returns
    -------
    Tensor
        [tokens, hidden], fp32.
    """

    def store(value: torch.Tensor) -> torch.Tensor:
        return value.bfloat16().float() if rounded else value

    y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(w13.shape[0]):
        token, slot = torch.nonzero(topk_idx == expert, as_tuple=True)
        if token.numel() == 0:
            continue
        gate_rows, up_rows = split_gate_up(w13[expert].float(), weight_layout)
        rows = x[token].float()
        gate, up = store(rows @ gate_rows.T), store(rows @ up_rows.T)
        result = store(store(activate(gate, up, clamp)) @ w2[expert].float().T)
        y.index_add_(0, token, result * topk_weights[token, slot].float()[:, None])
    return y * routed_scaling_factor


def grouped_linear(rows: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """rows [n, in], sorted by expert, times weights [experts, out, in]; counts [experts] int64."""
    if rows.is_cuda and rows.dtype == torch.bfloat16 and rows.shape[0] > 0:
        ends = counts.cumsum(0).to(torch.int32)
        return F.grouped_mm(rows, weights.transpose(1, 2), offs=ends)
    parts = torch.split(rows, counts.tolist())
    results = [part @ weight.T for part, weight in zip(parts, weights, strict=True)]
    return torch.cat(results) if results else rows.new_empty(0, weights.shape[1])


def moe_unfused(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    clamp: float | None = None,
    routed_scaling_factor: float = 1.0,
    weight_layout: str = "gate_up",
    expert_load: torch.Tensor | None = None,
) -> torch.Tensor:
    """The layer as torch and a collective library do it: sort, All-to-All, two grouped products.

    Every rank of `group` calls it. It reads counts on the host, so it cannot be captured in a CUDA
    graph.

    Parameters
    ----------
    x, topk_idx, topk_weights
        This rank's tokens, as in `moe_reference`; token counts may differ between ranks.
    w13, w2 : Tensor
        Weights of this rank's experts: [experts / world, ...].
    group : ProcessGroup, optional
        None: WORLD if torch.distributed is initialised, else this process alone.
    expert_load : Tensor, optional
        int64 [experts / world]; received rows are added.

    Returns
    -------
    Tensor
        [tokens, hidden] in the dtype of x.
    """
    world = dist.get_world_size(group) if dist.is_initialized() else 1
    local, topk = w13.shape[0], topk_idx.shape[1]
    flat = topk_idx.reshape(-1).long()
    choices = torch.nonzero((flat >= 0) & (flat < world * local)).flatten()
    choices = choices[torch.argsort(flat[choices], stable=True)]
    sent = torch.bincount(flat[choices], minlength=world * local)

    received = sent if world == 1 else torch.empty_like(sent)
    if world > 1:
        dist.all_to_all_single(received, sent, group=group)
    to_rank = sent.reshape(world, local).sum(1).tolist()
    from_rank = received.reshape(world, local).sum(1).tolist()
    rows = _exchange(x[choices // topk], from_rank, to_rank, group, world)

    # Received rows stand by source, then expert; the products want them by expert.
    experts = torch.arange(world * local, device=x.device) % local
    order = torch.argsort(experts.repeat_interleave(received), stable=True)
    counts = received.reshape(world, local).sum(0)
    if expert_load is not None:
        expert_load += counts
    hidden = grouped_linear(rows[order], w13, counts)
    gate, up = split_gate_up(hidden.T, weight_layout)
    results = torch.empty_like(rows)
    results[order] = grouped_linear(activate(gate.T, up.T, clamp), w2, counts)

    back = _exchange(results, to_rank, from_rank, group, world)
    # One row per slot, so that slots add up in ascending order, whatever came back first.
    slots = torch.zeros(flat.shape[0], x.shape[1], dtype=x.dtype, device=x.device)
    slots[choices] = back
    weights = torch.zeros(flat.shape[0], dtype=torch.float32, device=x.device)
    weights[choices] = topk_weights.reshape(-1).float()[choices]
    weighted = slots.reshape(-1, topk, x.shape[1]).float() * weights.reshape(-1, topk, 1)
    y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for slot in range(topk):
        y += weighted[:, slot]
    return (y * routed_scaling_factor).to(x.dtype)


def _exchange(
    rows: torch.Tensor,
    receive: list[int],
    send: list[int],
    group: dist.ProcessGroup | None,
    world: int,
) -> torch.Tensor:
    """All-to-All of rows by counts per rank."""
    if world == 1:
        return rows
    result = rows.new_empty(sum(receive), rows.shape[1])
    dist.all_to_all_single(result, rows.contiguous(), receive, send, group=group)
    return result
