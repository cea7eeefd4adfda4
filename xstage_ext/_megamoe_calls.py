"""What a call of a MegaMoE layer is given, and what its paths accept of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch

from ._arguments import brief, check_place
from .planner.problem import MoEProblem

INDEX_DTYPES = (torch.int32, torch.int64)


class Given(NamedTuple):
    """The arguments of `MegaMoE.forward`."""

    x: torch.Tensor
    topk_idx: torch.Tensor
    weights: torch.Tensor
    num_tokens: int | torch.Tensor | None
    out: torch.Tensor | None


def accepted(given: Given, w13: torch.Tensor, w2: torch.Tensor, device: torch.device) -> Given:
    """What either path takes, with routing weights in fp32; refuses what neither takes."""
    x, topk_idx, weights, num_tokens, out = given
    tensors = {"x": x, "topk_idx": topk_idx, "topk_weights": weights, "w13": w13, "w2": w2}
    if isinstance(num_tokens, torch.Tensor):
        tensors["num_tokens"] = num_tokens
    if out is not None:
        tensors["out"] = out
    check_tensors(tensors, device)
    check_types(x, topk_idx, weights)
    check_grad(x=x, topk_weights=weights, w13=w13, w2=w2)
    return Given(x, topk_idx, weights.float(), checked_num_tokens(num_tokens, x), out)


def check_tensors(tensors: Mapping[str, object], device: torch.device) -> None:
    """Tensors, and on the layer's device."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"xstage.megamoe: {name}: expected a tensor, got {brief(tensor)}")
        check_place(tensor, device, "xstage.megamoe", name)


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
    if not isinstance(num_tokens, (int, np.integer)) or isinstance(num_tokens, bool):
        text = f"expected an integer or a tensor of one, got {num_tokens!r}"
        raise TypeError(f"xstage.megamoe: num_tokens: {text}")
    rows = x.shape[0] if x.dim() else 0
    if not 0 <= num_tokens <= rows:
        text = f"expected 0 to {rows} (rows of x), got {num_tokens}"
        raise ValueError(f"xstage.megamoe: num_tokens: {text}")
    return int(num_tokens)


def check_shapes(problem: MoEProblem, given: Given) -> None:
    """What the native operator checks itself of the tensors that it sees."""
    rows = given.x.shape[0] if given.x.dim() else 0
    for name, tensor, width in (
        ("x", given.x, problem.hidden),
        ("topk_idx", given.topk_idx, problem.topk),
        ("topk_weights", given.weights, problem.topk),
    ):
        if list(tensor.shape) != [rows, width]:
            text = f"expected {[rows, width]}, got {list(tensor.shape)}"
            raise RuntimeError(f"xstage.megamoe: {name}: {text}")
    tokens = given.num_tokens if isinstance(given.num_tokens, int) else rows
    if tokens > problem.max_tokens:
        text = f"expected at most {problem.max_tokens} (max_tokens), got {tokens}"
        raise RuntimeError(f"xstage.megamoe: x: tokens: {text}")
    check_out(problem, given.x, given.out)


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
