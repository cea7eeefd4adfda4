"""What the user has: the shape of a layer and its load. Plans are made from this."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt

from .._arguments import is_number, set_integers
from ..errors import PlanError
from .megamoe import WEIGHT_LAYOUTS

_BF16 = 2
_INTEGERS = (
    *("world", "num_experts", "topk", "hidden", "intermediate", "max_tokens"),
    "token_sets",
)
_MULTIPLE = 64


@dataclasses.dataclass(frozen=True)
class MoEProblem:
    """A mixture-of-experts layer on a group of ranks, and the tokens of a call.

    Attributes
    ----------
    world : int
        Ranks of the group, 1 to 8.
    num_experts : int
        Routed experts of the whole group; a multiple of world, at most 128 per rank.
    topk : int
        Experts per token, all different: 1 to 16, at most num_experts.
    hidden, intermediate : int
        Widths in elements; multiples of 64.
    max_tokens : int
        Most tokens per rank in any call. It sizes memory.
    tokens : int or None
        Tokens per rank in the calls to plan for; None: `max_tokens`. The same on every rank, so
        that every rank makes the same plan; actual calls may bring other numbers.
    remote_share : float or None
        Share of the rows that cross the link; None: 1 - 1 / world. A world of one has none.
    weight_layout : str
        Rows of w13: "gate_up", "up_gate" or "interleaved".
    token_sets : int
        Sets of a rank's experts, alike in number. Where sources push tokens, one crosses the link
        once for each set that holds an expert of it; 1: once per rank. Only measurements in which
        few ranks stand in for many need others: with 7, two ranks send as much as eight.
    """

    world: int
    num_experts: int
    topk: int
    hidden: int
    intermediate: int
    max_tokens: int
    tokens: int | None = None
    remote_share: float | None = None
    weight_layout: str = "gate_up"
    token_sets: int = 1

    def __post_init__(self) -> None:
        set_integers(self, _INTEGERS if self.tokens is None else (*_INTEGERS, "tokens"))
        reason = self.why_not()
        if reason is not None:
            raise PlanError(f"xstage.MoEProblem: {reason}")
        if self.remote_share is not None:
            object.__setattr__(self, "remote_share", float(self.remote_share))

    def why_not(self) -> str | None:
        """Why no plan exists, with the field, its value, the nearest good one; else None."""
        limits = {
            "world": (1, 8),
            "topk": (1, 16),
            "num_experts": (self.world, 128 * self.world),
            "max_tokens": (1, 1 << 20),
        }
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            if not low <= value <= high:
                return f"{name}: expected {low} to {high}, got {value}"
        if self.num_experts % self.world:
            nearest = -(-self.num_experts // self.world) * self.world
            return (
                f"num_experts: expected a multiple of world ({self.world}), got "
                f"{self.num_experts}; the next is {nearest}"
            )
        if self.topk > self.num_experts:
            return f"topk: expected at most num_experts ({self.num_experts}), got {self.topk}"
        for name in ("hidden", "intermediate"):
            value = getattr(self, name)
            if value < _MULTIPLE or value % _MULTIPLE or value > 65536:
                nearest = min(65536, max(_MULTIPLE, -(-value // _MULTIPLE) * _MULTIPLE))
                return (
                    f"{name}: expected a multiple of {_MULTIPLE} up to 65536, got {value}; "
                    f"pad the weights with zeros to {nearest}"
                )
        if self.max_tokens * self.topk >= 1 << 28:
            return (
                f"max_tokens: expected max_tokens x topk below 2^28, got "
                f"{self.max_tokens} x {self.topk}"
            )
        if self.tokens is not None and not 0 <= self.tokens <= self.max_tokens:
            return f"tokens: expected 0 to max_tokens ({self.max_tokens}), got {self.tokens}"
        share = self.remote_share
        if share is not None and not (is_number(share) and 0.0 <= share <= 1.0):
            return f"remote_share: expected 0 to 1, got {share!r}"
        if not 1 <= self.token_sets <= self.experts_per_rank:
            return (
                f"token_sets: expected 1 to {self.experts_per_rank} (experts per rank), got "
                f"{self.token_sets}"
            )
        if self.weight_layout not in WEIGHT_LAYOUTS:
            known = ", ".join(WEIGHT_LAYOUTS)
            return f"weight_layout: expected one of {known}, got {self.weight_layout}"
        return None

    @property
    def load(self) -> int:
        """Tokens per rank to plan for."""
        return self.max_tokens if self.tokens is None else self.tokens

    @property
    def experts_per_rank(self) -> int:
        """Experts whose weights one rank holds."""
        return self.num_experts // self.world

    @property
    def rows(self) -> int:
        """Rows that a rank's experts receive when the load is even."""
        return self.load * self.topk

    @property
    def remote(self) -> float:
        """Share of the rows that cross the link; none in a world of one."""
        if self.world == 1:
            return 0.0
        return 1.0 - 1.0 / self.world if self.remote_share is None else self.remote_share

    @property
    def flops(self) -> float:
        """Floating-point operations of one rank."""
        return 6.0 * self.rows * self.hidden * self.intermediate

    @property
    def sent_tokens(self) -> float:
        """How often a token crosses the link where sources push: owners, or sets of their experts,
        that hold one of its experts. The mean when all choices of experts are as likely; with sets
        a token may choose an expert twice."""
        sets = (self.world - 1) * self.token_sets
        share = self.remote / max(sets, 1)  # of a token's choices that fall on a set
        if self.token_sets > 1:
            return sets * (1.0 if share == 1.0 else -math.expm1(self.topk * math.log1p(-share)))
        # The k-th choice falls on one of the experts that are left.
        left = (
            min(1.0, share * self.num_experts / (self.num_experts - k)) for k in range(self.topk)
        )
        return sets * (1.0 - math.prod(1.0 - chance for chance in left))

    def egress_bytes(self, dispatch: str) -> float:
        """Bytes that leave a rank: tokens on their way to experts, and results; those of local
        experts do not count.

        Parameters
        ----------
        dispatch : str
            Of `DISPATCHES`: "pull", a row per choice, or "push", a row per token and owner.
        """
        results = self.remote * self.topk
        tokens = results if dispatch == "pull" else self.sent_tokens
        return (tokens + results) * self.load * self.hidden * _BF16

    @property
    def weight_bytes(self) -> float:
        """Bytes of one rank's weights."""
        return 3.0 * self.experts_per_rank * self.hidden * self.intermediate * _BF16

    def even_counts(self) -> npt.NDArray[np.int64]:
        """Rows per (source, expert of this rank) under even routing: int64 [world, local experts].

        The remote share decides how much this rank (rank 0) keeps; sums differ by rounding only.
        """
        local = self.experts_per_rank
        own = round(self.rows * (1.0 - self.remote))
        per_source = [own] if self.world == 1 else [own, *self._spread(self.rows - own)]
        counts = np.zeros((self.world, local), dtype=np.int64)
        for source, rows in enumerate(per_source):
            # What does not divide goes to other experts for every source.
            spare = (np.arange(rows % local) + source * (rows % local)) % local
            counts[source] = rows // local
            counts[source, spare] += 1
        return counts

    def _spread(self, rows: int) -> list[int]:
        peers = self.world - 1
        return [rows // peers + (i < rows % peers) for i in range(peers)]
