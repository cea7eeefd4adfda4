"""Runs the trace build of megamoe on two ranks and hands back the decoded tiles (evidence.py).

Not run yet: it needs two GPUs.
"""

from __future__ import annotations

import dataclasses
import pathlib
import socket
import tempfile

import _sweep
import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from _tile_trace import TileTrace, decode

from xstage_ext import SymmetricWorkspace, machine
from xstage_ext.planner import wire
from xstage_ext.workspace import region_bytes

RECORDS = 512
"""Tiles per math warpgroup and call that the trace can hold."""


def trace_arms(
    config: _sweep.Config, arms: list[str], profile: machine.MachineProfile, calls: int
) -> dict[str, TileTrace]:
    """Decoded trace of rank 0 by arm; the call before it was warm. Starts one process per rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    with tempfile.TemporaryDirectory() as folder:
        arguments = (address, config, arms, profile, calls, folder)
        mp.spawn(_rank, args=arguments, nprocs=config.world, join=True)
        traces = {}
        for number, arm in enumerate(arms):
            with np.load(pathlib.Path(folder) / f"{number}.npz") as values:
                traces[arm] = TileTrace(**{name: values[name] for name in values.files})
    return traces


def _rank(
    rank: int,
    address: str,
    config: _sweep.Config,
    arms: list[str],
    profile: machine.MachineProfile,
    calls: int,
    folder: str,
) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", init_method=address, rank=rank, world_size=config.world,
        device_id=torch.device("cuda", rank),
    )  # fmt: skip
    routing = config.draw()
    ids = torch.from_numpy(routing.topk_idx[rank]).cuda()
    weights = torch.from_numpy(routing.topk_weights[rank]).cuda()
    local = config.num_experts // config.world
    x = torch.randn(config.tokens, config.hidden, device="cuda").bfloat16()
    shape = local, 2 * config.intermediate, config.hidden
    w13 = torch.randn(shape, device="cuda", dtype=torch.bfloat16) / config.hidden**0.5
    shape = local, config.hidden, config.intermediate
    w2 = torch.randn(shape, device="cuda", dtype=torch.bfloat16) / config.intermediate**0.5
    for number, arm in enumerate(arms):
        control = arm == "local control"
        plan = _sweep.plan_of(config, "wave/st" if control else arm, profile)
        mine = ids % local + rank * local if control else ids
        with SymmetricWorkspace(nbytes=region_bytes([plan.bytes()])) as workspace:
            lease = workspace.channel(arm, plan.bytes())
            words = plan.words()
            digest = wire.digest(arm, words)
            for _ in range(calls):
                torch.ops.xstage.megamoe(
                    x, mine, weights, w13, w2, words, lease.words(digest), None, None, 1.0, None
                )
            _, trace = torch.ops.xstage.megamoe_traced(
                x, mine, weights, w13, w2, words, lease.words(digest), RECORDS
            )
            torch.cuda.synchronize()
            workspace.check()
        if rank == 0:
            tiles = decode(trace)
            path = pathlib.Path(folder) / f"{number}.npz"
            np.savez(path, **dataclasses.asdict(tiles))
    dist.barrier()
    dist.destroy_process_group()
