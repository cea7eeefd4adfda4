"""Attention as a function, for code that keeps no module."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from .attention import Rows, UlyssesAttention

_modules: dict[tuple[object, ...], UlyssesAttention] = {}


def ulysses_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    causal: bool = False,
    scale: float | None = None,
    impl: str = "auto",
    rows: Rows | None = None,
    kv_rows: Rows | None = None,
    **options: Any,
) -> Any:
    """`UlyssesAttention` as a function: modules are made once per set of shapes and kept.

    The first call with new shapes is collective and slow; `UlyssesAttention.prepare` does that at a
    time of your choice, and is what torch.compile needs.

    Parameters
    ----------
    q, k, v, rows, kv_rows
        As `UlyssesAttention.forward`.
    group, causal, scale, impl
        As `UlyssesAttention`.
    **options
        Further arguments of `UlyssesAttention.forward`.

    Returns
    -------
    Tensor or tuple
        As `UlyssesAttention.forward`.

    Examples
    --------
    >>> q, k, v = torch.randn(3, 1, 128, 4, 64, dtype=torch.bfloat16)
    >>> ulysses_attention(q, k, v, causal=True).shape
    torch.Size([1, 128, 4, 64])
    """
    lengths = tuple(
        item if item is None or isinstance(item, int) else tuple(item) for item in (rows, kv_rows)
    )
    shapes = (tuple(q.shape), tuple(k.shape), lengths, options.get("joint_rows") and "joint")
    key = (group, q.device, q.dtype, causal, scale, impl, *shapes)
    module = _modules.get(key)
    if module is None:
        module = UlyssesAttention(
            q.shape[2],
            q.shape[3],
            kv_heads=k.shape[2],
            group=group,
            device=q.device,
            dtype=q.dtype,
            causal=causal,
            scale=scale,
            impl=impl,
        )
        _modules[key] = module
    return module(q, k, v, rows=rows, kv_rows=kv_rows, **options)


def close_all() -> None:
    """Close the modules that `ulysses_attention` keeps; their results end."""
    for module in _modules.values():
        module.close()
    _modules.clear()
