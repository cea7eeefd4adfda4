"""What the user has: an attention layer under Ulysses sequence parallelism."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch

from .._arguments import integer, set_integers
from ..errors import PlanError
from . import wire
from .attention import AttentionPlan, even_split

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclasses.dataclass(frozen=True)
class AttentionProblem:
    """One attention layer under Ulysses sequence parallelism.

    Attributes
    ----------
    heads, kv_heads : int
        Query and key heads of the whole model; kv_heads divides heads. Both may be fewer than the
        ranks, and need not be multiples of their number.
    head_dim : int
        On CUDA 64 or 128; any size on the CPU and in the fallback.
    rows, kv_rows : tuple of int
        Query and key rows that each rank owns; kv_rows None: the same as rows. The kernels connect
        up to 8 ranks, the fallback any number.
    batch : int
        Sequences, all of the same rows.
    causal : bool
        A query row sees keys up to its own place, counted from the ends of both sequences.
    dtype : torch.dtype
        bfloat16 or float16; on the CPU also float32.
    heads_per_rank : tuple of int or None
        Query heads that each rank computes; None: as even as possible, larger shares first.
    generation : str
        "fa3" or "fa4": whose pipeline.
    slots : int
        Results that stay valid at the same time.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rows: tuple[int, ...]
    kv_rows: tuple[int, ...] | None = None
    batch: int = 1
    causal: bool = False
    dtype: torch.dtype = torch.bfloat16
    heads_per_rank: tuple[int, ...] | None = None
    generation: str = "fa3"
    slots: int = 2

    def __post_init__(self) -> None:
        me = "xstage.AttentionProblem"
        for name in ("rows", "kv_rows", "heads_per_rank"):
            value = getattr(self, name)
            if value is None and name != "rows":
                continue
            if not isinstance(value, Iterable):
                raise PlanError(
                    f"{me}: {name}: expected one number per rank, got {value}; for one rank "
                    f"({value},)"
                )
            numbers = tuple(integer(number, f"{me}: {name}") for number in value)
            object.__setattr__(self, name, numbers)
        set_integers(self, ("heads", "kv_heads", "head_dim", "batch", "slots"))
        wire.check("attention", {"slots": self.slots})
        reason = self.why_not()
        if reason is not None:
            raise PlanError(f"{me}: {reason}")

    def why_not(self) -> str | None:
        """Why no plan exists, naming fields and values; else None."""
        world = len(self.rows)
        if world < 1:
            return "rows: expected the lengths of at least one rank, got none"
        for name in ("heads", "head_dim"):
            if getattr(self, name) < 1:
                return f"{name}: expected 1 or more, got {getattr(self, name)}"
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            return (
                f"kv_heads: expected a divisor of {self.heads} heads, got {self.kv_heads} "
                f"({world} ranks share the heads)"
            )
        for name in ("kv_rows", "heads_per_rank"):
            value = getattr(self, name)
            if value is not None and len(value) != world:
                return f"{name}: expected {world} ranks as in rows, got {len(value)}"
        if sum(self.query_shares) != self.heads:
            return f"heads_per_rank: expected a sum of {self.heads}, got {self.heads_per_rank}"
        for name in ("rows", "kv_rows", "heads_per_rank"):
            if min(getattr(self, name) or (0,)) < 0:
                return f"{name}: expected no negative number, got {getattr(self, name)}"
        if self.batch < 0:
            return f"batch: expected 0 or more, got {self.batch}"
        if self.dtype not in DTYPES:
            known = ", ".join(str(dtype) for dtype in DTYPES)
            return f"dtype: expected one of {known}, got {self.dtype!r}"
        if self.generation not in ("fa3", "fa4"):
            return f"generation: expected fa3 or fa4, got {self.generation!r}"
        return None

    @property
    def world(self) -> int:
        """Ranks of the group."""
        return len(self.rows)

    @property
    def key_rows(self) -> tuple[int, ...]:
        """Key rows that each rank owns."""
        return self.rows if self.kv_rows is None else self.kv_rows

    @property
    def query_shares(self) -> tuple[int, ...]:
        """Query heads that each rank computes."""
        return self.heads_per_rank or even_split(self.heads, len(self.rows))

    @property
    def flops(self) -> float:
        """Of the rank with most heads."""
        pairs = sum(self.rows) * sum(self.key_rows) * (0.5 if self.causal else 1.0)
        return 4.0 * self.batch * max(self.query_shares) * pairs * self.head_dim

    @property
    def egress_bytes(self) -> float:
        """Output bytes that leave the rank with most heads; its own rows stay."""
        away = sum(self.rows) - self.rows[self.query_shares.index(max(self.query_shares))]
        return 2.0 * self.batch * max(self.query_shares) * away * self.head_dim

    def plan(self, **fields: int) -> AttentionPlan:
        """The plan with these launch fields."""
        group = self.heads // self.kv_heads
        shared: dict[str, int] = {"slots": self.slots} | fields
        return AttentionPlan(self.rows, self.key_rows, self.query_shares, group, **shared)
