"""What a workspace asks of its memory."""

from __future__ import annotations

from typing import Protocol

import torch


class BlockMemory(Protocol):
    """One zeroed block of `nbytes` bytes per rank, mapped into this process.

    Attributes
    ----------
    name
        Backend name as users write it.
    addresses
        Address of every rank's block as this process (and its device) sees it, in rank order.
    own_ranks
        Ranks whose block belongs to this process: one, or all virtual ranks.
    """

    name: str
    addresses: list[int]
    own_ranks: list[int]

    def block(self, rank: int) -> torch.Tensor:
        """The block of a rank: uint8 [nbytes]. The tensor keeps the mapping alive."""
        ...

    def free(self) -> None:
        """Drop this process's references; local, never collective, safe to call twice."""
        ...
