"""Memory of a group inside one process: a world of one, or virtual ranks on one device."""

from __future__ import annotations

import torch

from ..errors import WorkspaceError


class LocalMemory:
    """`world` plain tensors."""

    def __init__(self, world: int, nbytes: int, device: torch.device, name: str) -> None:
        self.name = name
        try:
            self._blocks = [
                torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(world)
            ]
        except RuntimeError as error:  # torch has a type of its own for this on CUDA only
            times = "" if world == 1 else f"{world} times "
            raise WorkspaceError(
                f"workspace: cannot allocate {times}{nbytes} bytes on {device}: "
                f"{str(error).splitlines()[0]}"
            ) from error
        self.addresses = [block.data_ptr() for block in self._blocks]
        self.own_ranks = list(range(world))

    def block(self, rank: int) -> torch.Tensor:
        return self._blocks[rank]

    def free(self) -> None:
        self._blocks = []
