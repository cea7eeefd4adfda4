"""The public Hopper FP8 MegaMoE (sgl-deep-gemm) as a reference arm of bench_megamoe.

It computes in FP8 with a scale per 128 elements, so it moves half the bytes and has twice the
arithmetic rate: a reference, not an arm of the comparison. Only the fused kernel is timed; its
inputs are quantised and staged before.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

_GROUP = 128
_MOST = 448.0  # largest e4m3 value
TOLERANCE = 0.08
"""Relative error that FP8 with these scales may have."""


def load() -> tuple[Any, str | None]:
    """The package, or why it is not here."""
    try:
        module = importlib.import_module("deep_gemm")
    except Exception as error:  # an ImportError, or what its own initialisation raises
        return None, f"deep_gemm cannot be imported: {error}"
    if not hasattr(module, "fp8_mega_moe"):
        return None, "this deep_gemm has no fp8_mega_moe"
    return module, None


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [experts, rows, columns] to e4m3, one fp32 scale per 128 x 128; expert by expert."""
    experts, rows, columns = weight.shape
    scales = weight.new_empty(experts, rows // _GROUP, columns // _GROUP, dtype=torch.float32)
    values = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    for one, scale, value in zip(weight, scales, values, strict=True):
        blocks = one.float().view(rows // _GROUP, _GROUP, columns // _GROUP, _GROUP)
        scale.copy_(blocks.abs().amax(dim=(1, 3)).clamp_min(1e-8) / _MOST)
        value.copy_((blocks / scale[:, None, :, None]).view_as(one))
    return values, scales


class Rival:
    """One layer of this rank for the FP8 kernel; every rank of the group makes it."""

    def __init__(self, module: Any, tensors: tuple[torch.Tensor, ...]) -> None:
        x, ids, weights, w13, w2 = tensors
        world = dist.get_world_size()
        self._module = module
        self._weights = module.transform_weights_for_mega_moe_sm90(
            *(
                tuple(torch.cat(t) for t in zip(*map(quantise, w.split(1)), strict=True))
                for w in (w13, w2)
            )
        )
        self._buffer = module.get_symm_buffer_for_sm90_mega_moe(
            dist.group.WORLD,
            len(w13) * world,
            x.shape[0],
            ids.shape[1],
            x.shape[1],
            w2.shape[2],
        )
        self._y = torch.empty_like(x)
        self._stage: Callable[[], object] = lambda: module.mega_moe_pre_dispatch_sm90(
            x,
            ids.int(),
            weights,
            self._buffer.x,
            self._buffer.x_sf,
            self._buffer.topk_idx,
            self._buffer.topk_weights,
            x.shape[0],
        )
        self._stage()

    def __call__(self) -> torch.Tensor:
        """The fused kernel alone."""
        self._module.fp8_mega_moe(self._y, *self._weights, self._buffer)
        return self._y


def rival_arm(
    tensors: tuple[torch.Tensor, ...],
    wanted: torch.Tensor,
) -> tuple[Callable[[], torch.Tensor] | None, str]:
    """The arm, checked against the bf16 result, or None and why; the same on every rank."""
    module, reason = load()
    call: Rival | None = None
    if reason is None and not dist.is_initialized():
        reason = "it needs a process group"
    if reason is None:
        try:
            call = Rival(module, tensors)
            error = float((call().float() - wanted.float()).norm() / wanted.float().norm())
            reason = None if error < TOLERANCE else f"relative error {error:.3g}"
        except Exception as error:  # a rival that fails must not end the benchmark
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
    if dist.is_initialized():
        reasons: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(reasons, reason)
        reason = next((r for r in reasons if r is not None), None)
    return (call, "") if reason is None else (None, reason)
