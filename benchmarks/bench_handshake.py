"""What the protocol of a call costs: the handshake against NCCL's all-gather, per size.

    torchrun --nproc-per-node 2 benchmarks/bench_handshake.py

Arms: `copy` (result copied out of a bank), `slot` (result in an output slot, with its credit),
`graph` (20 `copy` calls replayed as one CUDA graph, per call), `nccl` (all_gather_into_tensor).
Times are the maximum over ranks, then the median; every arm is compared with NCCL's result first.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from benchmarks._ranks import local_rank
from benchmarks._report import RESULTS, ResultWriter, Row, line
from xstage_ext import SymmetricWorkspace
from xstage_ext.handshake import handshake, handshake_bytes
from xstage_ext.testing import time_arms

SIZES = (64, 4096, 65536, 1 << 20, 16 << 20)
SLOTS = 2
GRAPH_CALLS = 20


def main() -> None:
    rank = local_rank("bench_handshake")
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    world = dist.get_world_size()
    writer = ResultWriter(RESULTS / "handshake.jsonl") if rank == 0 else None
    for size in SIZES:
        needed = [handshake_bytes(world, size, slots) for slots in (0, SLOTS, 0)]
        with SymmetricWorkspace(nbytes=sum(needed), timeout_ms=20_000) as workspace:
            arms = make_arms(workspace, size, needed)
            expected = arms["nccl"]().clone()
            ok = {name: torch.equal(call(), expected) for name, call in arms.items()}
            for name, timing in time_arms(arms, pairs=20, calls=20).items():
                per = GRAPH_CALLS if name == "graph" else 1
                row = Row(
                    op="handshake",
                    arm=name,
                    shape={"bytes": size},
                    world=world,
                    us_median=timing.us_median / per,
                    us_p10=timing.us_p10 / per,
                    us_p90=timing.us_p90 / per,
                    n=timing.n,
                    egress_GBps=size * (world - 1) / (timing.us_median / per) / 1e3,
                    ok=ok[name],
                )
                if writer is not None:
                    writer.write(row)
                    print(line(row), flush=True)
            workspace.check(synchronize=True)
    dist.destroy_process_group()


def make_arms(
    workspace: SymmetricWorkspace, size: int, needed: list[int]
) -> dict[str, Callable[[], torch.Tensor]]:
    """One callable per arm, each returning uint8 [world, size]."""
    payload = torch.randint(0, 255, (size,), dtype=torch.uint8, device="cuda")
    copy, slot, captured = (
        workspace.channel(name, nbytes)
        for name, nbytes in zip(("copy", "slot", "graph"), needed, strict=True)
    )
    handshake(captured, payload)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(GRAPH_CALLS):
            last = handshake(captured, payload)

    def replay() -> torch.Tensor:
        graph.replay()
        return last

    gathered = torch.empty(workspace.world, size, dtype=torch.uint8, device="cuda")

    def nccl() -> torch.Tensor:
        dist.all_gather_into_tensor(gathered, payload)
        return gathered

    return {
        "copy": lambda: handshake(copy, payload),
        "slot": lambda: handshake(slot, payload, slots=SLOTS),
        "graph": replay,
        "nccl": nccl,
    }


if __name__ == "__main__":
    main()
