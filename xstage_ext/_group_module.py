"""What the modules of this package have in common: memory of their own process."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
import torch.distributed as dist

Self = TypeVar("Self", bound="GroupModule")


def whose_memory(workspace: object, share: object) -> str:
    """Where `prepare` takes memory from: the same on every rank, since making it is collective."""
    return "share" if share is not None else "own" if workspace is None else "workspace"


class GroupModule(torch.nn.Module):
    """A module that holds memory and addresses once prepared.

    A copy, also one that is unpickled elsewhere, has the options and the weights; memory and
    addresses stay with the original, so the copy is prepared anew. Copies in the same process share
    the group; a module of a group that is not WORLD cannot be pickled.
    """

    def _join(self, group: dist.ProcessGroup | None) -> None:
        """The group (None: WORLD, or this process alone), its ranks and this process's rank."""
        distributed = dist.is_available() and dist.is_initialized()
        self.group = group
        self.world = dist.get_world_size(group) if distributed else 1
        self.rank = dist.get_rank(group) if distributed else 0

    def _forget(self) -> None:
        """Set what `prepare` and calls change as it is in a new module."""
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        bare = type(self).__new__(type(self))
        bare.__dict__.update(super().__getstate__())  # type: ignore[no-untyped-call]
        bare._forget()
        return bare.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._join(self.group)  # this process may be another rank than the one that pickled

    def __deepcopy__(self: Self, memo: dict[int, Any]) -> Self:
        memo[id(self.group)] = self.group
        memo[id(self)] = clone = type(self).__new__(type(self))
        clone.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return clone
