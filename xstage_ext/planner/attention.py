"""The plan of attention and All-to-All calls: the fields of csrc/attention/plan.h."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch

from ..errors import PlanError
from . import wire

MAX_RANKS = 8
"""Ranks that the kernels connect; the fallback takes any number."""
TILE_ORDERS = ("own_last", "natural", "longest_first")
STORE_PATHS = ("tensor", "bulk", "vector")
COMPLETIONS = ("end_of_call", "every_tile")
_ARRAYS = ("rows", "kv_rows", "heads")
LAUNCH_FIELDS = (
    "block_m",
    "block_n",
    "num_sms",
    "tile_order",
    "store_path",
    "slice_bytes",
    "slice_steps",
    "completion",
)
"""Fields of `AttentionPlan` that a caller may give; the others follow from the problem."""


def even_split(total: int, parts: int) -> tuple[int, ...]:
    """Cut a number into parts that differ by at most one, larger ones first.

    >>> even_split(1025, 2)
    (513, 512)
    """
    return tuple(total // parts + (part < total % parts) for part in range(parts))


def row_pad_for(row_bytes: int) -> int:
    """Bytes between rows of `row_bytes` that keep parts of them from meeting in memory.

    Where every rank writes its part of each row, rows of a multiple of 3 KiB slow peers down: the
    address map of an H200 counts in threes. Halves of 6 KiB rows (24 heads of 128) arrive at 294
    GB/s, quarters at 247, and at 364 with 128 bytes more per row.
    """
    return 128 if row_bytes % 3072 == 0 else 0


@dataclasses.dataclass(frozen=True)
class AttentionPlan:
    """Integers only; `torch.ops.xstage.plan_fields("attention")` says what each means.

    Attributes
    ----------
    rows, kv_rows : tuple of int
        Query and key rows that each rank owns; any lengths, also 0.
    heads : tuple of int
        Query heads that each rank computes; any counts, also 0.
    kv_group : int
        Query heads per key head. Ranks whose query heads share a key head each get a copy of it.
    others
        Launch parameters; 0 leaves the choice to the kernel.
    """

    rows: tuple[int, ...]
    kv_rows: tuple[int, ...]
    heads: tuple[int, ...]
    kv_group: int = 1
    num_query: int = 1
    direction: int = 0
    slots: int = 2
    block_m: int = 0
    block_n: int = 0
    num_sms: int = 0
    tile_order: int = 0
    store_path: int = 0
    slice_bytes: int = 0
    slice_steps: int = 0
    completion: int = 0
    row_pad: int = 0

    def __post_init__(self) -> None:
        lengths = {len(getattr(self, name)) for name in _ARRAYS}
        if len(lengths) != 1 or self.world < 1:
            raise PlanError(
                "xstage: attention plan: expected rows, kv_rows and heads of equally many ranks, "
                f"got {len(self.rows)}, {len(self.kv_rows)} and {len(self.heads)}"
            )

    @property
    def world(self) -> int:
        """Ranks of the group."""
        return len(self.rows)

    def key_heads(self, rank: int) -> tuple[int, int]:
        """First key head that a rank needs, and how many."""
        begin = sum(self.heads[:rank])
        end = begin + self.heads[rank]
        if begin == end:
            return 0, 0
        first = begin // self.kv_group
        return first, (end - 1) // self.kv_group + 1 - first

    def head_phase(self, rank: int) -> int:
        """Place of a rank's first query head within its group."""
        return sum(self.heads[:rank]) % self.kv_group

    def to_sequence(self, num_tensors: int = 1, row_pad: int = 0) -> AttentionPlan:
        """The plan of the All-to-All back: query-like tensors, from heads to sequence shards.

        `row_pad` bytes lie between the rows of the results; see `row_pad_for`.
        """
        return dataclasses.replace(self, direction=1, num_query=num_tensors, row_pad=row_pad)

    def words(self) -> list[int]:
        """The wire message, the `plan` argument of the ops: for 1 to 8 ranks."""
        values: dict[str, int] = {"world": self.world}
        for field in dataclasses.fields(self):
            if field.name not in _ARRAYS:
                values[field.name] = getattr(self, field.name)
        for name in _ARRAYS:
            shares = getattr(self, name)
            for rank in range(MAX_RANKS):
                values[f"{name}_{rank}"] = shares[rank] if rank < len(shares) else 0
        return wire.pack("attention", _Wire(**values))

    def region_bytes(self, batch: int, head_dim: int, element_bytes: int = 2) -> int:
        """Bytes of a channel for the fused ops: `slots` outputs [B, rows, all heads, D]."""
        needed: int = torch.ops.xstage.attention_region_bytes(
            self.words(), batch, head_dim, element_bytes
        )
        return needed

    def a2a_region_bytes(
        self, num_tensors: int, batch: int, head_dim: int, element_bytes: int = 2
    ) -> int:
        """Bytes of a channel for `ulysses_a2a`: `slots` times what a call brings."""
        needed: int = torch.ops.xstage.ulysses_a2a_region_bytes(
            self.words(), num_tensors, batch, head_dim, element_bytes
        )
        return needed


def check_launch_fields(fields: Mapping[str, object]) -> None:
    """What a caller gives instead of the planner.

    Raises
    ------
    PlanError
        No launch field, or a value outside of what the ops take; by name.
    """
    for name in fields:
        if name not in LAUNCH_FIELDS:
            known = ", ".join(LAUNCH_FIELDS)
            raise PlanError(f"xstage: attention plan: expected fields of {known}, got {name!r}")
    wire.check("attention", fields)


_SCALARS: Sequence[str] = (
    "world",
    "kv_group",
    "num_query",
    "direction",
    "slots",
    *LAUNCH_FIELDS,
    "row_pad",
)
_Wire = dataclasses.make_dataclass(
    "AttentionWire",
    [(name, int) for name in _SCALARS]
    + [(f"{name}_{rank}", int) for name in _ARRAYS for rank in range(MAX_RANKS)],
    frozen=True,
)
wire.verify("attention", _Wire)
