"""What the GPU tests of this folder share: the process group, and a load for the link."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist


@contextlib.contextmanager
def gpu_world(backend: str, *, bind: bool = False) -> Iterator[tuple[int, int]]:
    """(rank, world) of WORLD on this rank's GPU; ends the group that it began.

    `bind` names the GPU to the process group, as NCCL wants for set-up without a first collective.
    """
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    mine = not dist.is_initialized()
    if mine:
        options: dict[str, Any] = {"device_id": torch.device("cuda", local)} if bind else {}
        dist.init_process_group(backend, **options)
    yield dist.get_rank(), dist.get_world_size()
    if mine:
        dist.barrier()
        dist.destroy_process_group()


class BusyLink:
    """Copies to the next GPU by a copy engine, on a stream of their own."""

    def __init__(self) -> None:
        own = torch.cuda.current_device()
        # One process sees its peer's device only where the launcher shows it.
        self._target = torch.empty(
            64 << 20, dtype=torch.uint8, device=f"cuda:{(own + 1) % torch.cuda.device_count()}"
        )
        self._source = torch.empty_like(self._target, device="cuda")
        self._stream = torch.cuda.Stream()
        self._last: torch.cuda.Event | None = None
        self.copies = 0

    def keep_busy(self) -> None:
        """Two more copies (0.35 ms) when the last ones are done; called beside what is tested."""
        if self._last is not None and not self._last.query():
            return
        with torch.cuda.stream(self._stream):
            for _ in range(2):
                self._target.copy_(self._source, non_blocking=True)
                self.copies += 1
            self._last = self._stream.record_event()
