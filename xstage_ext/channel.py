"""One operator instance's share of a symmetric workspace."""

from __future__ import annotations

import contextlib
import itertools
import traceback
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING

import torch

from ._resources import DIGEST_WORD, round_up
from .errors import WorkspaceError

if TYPE_CHECKING:
    from .workspace import SymmetricWorkspace


def distinct(name: str, taken: Collection[str]) -> str:
    """The name, or "name (2)" and so on where it is taken."""
    numbered = (f"{name} ({number})" for number in itertools.count(2))
    return next(one for one in itertools.chain([name], numbered) if one not in taken)


def first_gap(taken: Iterable[ChannelLease], size: int, start: int, end: int) -> int | None:
    """First offset where `size` bytes are free; the same on every rank, as leases are."""
    for lease in sorted(taken, key=lambda one: one.offset):
        if lease.offset - start >= size:
            return start
        start = max(start, lease.offset + lease.reserved_bytes)
    return start if end - start >= size else None


class ChannelLease:
    """The counters and the region of one operator instance (one layer, or layers in one order).

    Its calls follow each other on one stream; use a channel per stream.

    Attributes
    ----------
    name, index, offset, nbytes
        As reserved; `offset` counts from the start of every block.
    released
        Given back, so that counters and region may be somebody else's: every use of it raises.
    """

    def __init__(
        self,
        workspace: SymmetricWorkspace,
        name: str,
        index: int,
        offset: int,
        nbytes: int,
        counter_bytes: int | None,
    ) -> None:
        self.workspace = workspace
        self.name = name
        self.index = index
        self.offset = offset
        self.nbytes = nbytes
        self.reserved_bytes = round_up(nbytes)
        self.counter_bytes = nbytes if counter_bytes is None else counter_bytes
        self.released = False
        self._users: list[str] = []
        self._words: dict[int, list[int]] = {}

    def require_held(self) -> None:
        """Raise WorkspaceError once the lease is released; the same for all who share it."""
        if self.released:
            raise WorkspaceError(
                f"workspace: channel {self.name!r} was released, by close() of the module that "
                "reserved it; those that share it end too: close() and prepare() them again"
            )

    def enrol(self, name: str) -> str:
        """A name for one more module that calls on this channel, unlike those of the others.

        In the digests of its calls, it shows when ranks call the modules in another order. Every
        rank enrols the same modules in the same order.
        """
        self._users.append(distinct(name, self._users))
        return self._users[-1]

    def words(self, digest: int = 0, rank: int | None = None) -> list[int]:
        """The `workspace` argument of an operator for one call.

        Parameters
        ----------
        digest
            Signed 64-bit digest of plan and shapes; rides in the call's signal and is compared.
        rank
            Which virtual rank; None: this process's (first) rank.

        Raises
        ------
        WorkspaceError, PeerTimeout, PeerError
            As `SymmetricWorkspace.check`; also when the lease is released.
        """
        self.require_held()
        self.workspace.begin()
        resources = self.workspace._resources
        rank = resources.own_ranks[0] if rank is None else rank
        words = self._words.get(rank)
        if words is None:
            words = resources.words(
                rank, channel=self.index, offset=self.offset, nbytes=self.nbytes
            )
            self._words[rank] = words
        words = list(words)
        words[DIGEST_WORD] = digest
        return words

    def virtual_words(self, digest: int = 0) -> list[int]:
        """The `workspaces` argument of an operator that plays all virtual ranks."""
        return [word for rank in self.workspace.own_ranks for word in self.words(digest, rank)]

    def region(self, rank: int | None = None) -> torch.Tensor:
        """The region in a rank's block: uint8 [nbytes]; None: this process's (first) rank."""
        self.require_held()
        self.workspace._require_open()
        resources = self.workspace._resources
        rank = resources.own_ranks[0] if rank is None else rank
        return resources.memory.block(rank)[self.offset : self.offset + self.nbytes]

    def refuse(self, reason: str) -> None:
        """See `SymmetricWorkspace.refuse`."""
        if not self.released:
            self.workspace.refuse(f"channel {self.name!r}: {reason}", self.index)

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Around one call's host code: an exception inside refuses the call for all ranks.

        Checks for faults afterwards where that costs nothing: on the CPU the call has ended.
        """
        self.require_held()
        workspace = self.workspace
        try:
            yield
        except BaseException as error:  # an interrupt too
            # Whoever keeps the error would keep the failed call's tensors, and so its slots.
            traceback.clear_frames(error.__traceback__)
            if not workspace.closed and workspace._failure is None:
                if isinstance(error, Exception):
                    workspace.check()  # a fault that a kernel found explains the error better
                self.refuse(f"{type(error).__name__}: {error}".splitlines()[0])
            raise
        if workspace.device.type == "cpu":
            workspace.check()

    def release(self) -> None:
        """Give counters and region back. All ranks release in the same order, when idle."""
        self.released = True
        self.workspace._release(self)
