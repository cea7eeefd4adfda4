"""The process group that the GPU tests of this folder share."""

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
