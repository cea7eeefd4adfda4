"""Runs a function once per rank and GPU: under torchrun here, else in processes of its own."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def on_ranks(world: int, function: Callable[..., None], *arguments: Any) -> None:
    """Call `function(rank, *arguments)` on every rank, inside an NCCL process group.

    Under torchrun only rank 0 returns: what follows is its alone.
    """
    if "RANK" in os.environ:
        rank = int(os.environ["RANK"])
        _rank(rank, world, "env://", function, arguments)
        if rank != 0:
            raise SystemExit(0)
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    mp.spawn(_rank, args=(world, address, function, arguments), nprocs=world, join=True)


def local_rank(script: str, alone: bool = False) -> int:
    """Which GPU of this machine is this process's; ends with how to start where there is none.

    `alone`: the script also measures one GPU, without torchrun.
    """
    if "LOCAL_RANK" not in os.environ and not alone:
        raise SystemExit(
            f"{script} measures between ranks: torchrun --nproc-per-node 2 benchmarks/{script}.py"
        )
    if not torch.cuda.is_available():
        raise SystemExit(f"{script} measures GPUs, and none is visible here")
    return int(os.environ.get("LOCAL_RANK", 0))


def _rank(
    rank: int,
    world: int,
    address: str,
    function: Callable[..., None],
    arguments: tuple[Any, ...],
) -> None:
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl", init_method=address, rank=rank, world_size=world, device_id=device
    )
    try:
        function(rank, *arguments)
    finally:
        dist.destroy_process_group()
