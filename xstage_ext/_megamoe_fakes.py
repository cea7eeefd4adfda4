"""What torch.compile needs to know about the megamoe ops: shapes of their results."""

from __future__ import annotations

import torch


@torch.library.register_fake("xstage::megamoe")
def _(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    plan: list[int],
    workspace: list[int],
    num_tokens: torch.Tensor | None = None,
    clamp: float | None = None,
    routed_scaling_factor: float = 1.0,
    expert_load: torch.Tensor | None = None,
) -> torch.Tensor:
    return x.new_empty(x.shape)


@torch.library.register_fake("xstage::megamoe_out")
def _(
    out: torch.Tensor,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    plan: list[int],
    workspace: list[int],
    num_tokens: torch.Tensor | None = None,
    clamp: float | None = None,
    routed_scaling_factor: float = 1.0,
    expert_load: torch.Tensor | None = None,
) -> None:
    return None


@torch.library.register_fake("xstage::megamoe_virtual")
def _(
    x: list[torch.Tensor],
    topk_idx: list[torch.Tensor],
    topk_weights: list[torch.Tensor],
    w13: list[torch.Tensor],
    w2: list[torch.Tensor],
    plan: list[int],
    workspaces: list[int],
    clamp: float | None = None,
    routed_scaling_factor: float = 1.0,
) -> list[torch.Tensor]:
    return [tokens.new_empty(tokens.shape) for tokens in x]
