"""Attention as a function, for code that keeps no module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ._arguments import check_group
from ._attention_setup import Rows, check_dims, shares_of
from .attention import UlyssesAttention

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
    slots: int = 2,
    rows: Rows | None = None,
    kv_rows: Rows | None = None,
    **options: Any,
) -> Any:
    """`UlyssesAttention` as a function: modules are made when needed and kept.

    A module serves all lengths up to a size a little above those of its first call, at most four
    sizes for each doubling. The first call of a size is collective and slow;
    `UlyssesAttention.prepare` does that at a time of your choice, and is what torch.compile needs.

    Parameters
    ----------
    q, k, v, rows, kv_rows
        As `UlyssesAttention.forward`.
    group, causal, scale, impl, slots
        As `UlyssesAttention`. More than `slots` results of one size alive at a time: ask for more,
        or copy with `out`.
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
    check_dims((q, k, v), "D")
    check_group(group, "xstage.ulysses_attention")
    world = dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1
    text = options.get("joint_rows")
    key_rows = rows if kv_rows is None and k.shape[1] == q.shape[1] else kv_rows
    room = _room(rows, q, text, world), _room(key_rows, k, text, world), q.shape[0]
    model = (*q.shape[2:], k.shape[2], q.dtype, causal, scale)
    key = (group, q.device, impl, slots, model, room)
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
            slots=slots,
        )
        module.prepare((room[0],) * world, (room[1],) * world, batch=room[2])
        _modules[key] = module
    return module(q, k, v, rows=rows, kv_rows=kv_rows, **options)


def _room(rows: Rows | None, own: torch.Tensor, text: Sequence[int] | None, world: int) -> int:
    """Rows per rank to prepare for: the longest shard with its text, rounded up.

    The same on every rank, so it looks at this rank's rows only where all have as many.
    """
    if rows is None:
        shares: tuple[int, ...] = (own.shape[1],)
    else:
        shares = shares_of(rows, world, "rows")
    longest = max(1, *shares) + max(text or (0,))
    step = max(64, 1 << max(0, longest.bit_length() - 3))
    return -(-longest // step) * step


def close_all() -> None:
    """Close the modules that `ulysses_attention` keeps; their results end."""
    for module in _modules.values():
        module.close()
    _modules.clear()
