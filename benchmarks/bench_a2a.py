"""The All-to-All of Ulysses: ours by bulk and by 16-byte stores, against NCCL.

    torchrun --nproc-per-node 2 benchmarks/bench_a2a.py [--quick]

Arms, each a CUDA graph of several calls, replayed:
  auto, bulk, vector   xstage::ulysses_a2a, layout change inside, results ready to read
  permute+nccl         copy to blocks, all_to_all_single, copy to the final layout
  nccl                 all_to_all_single alone: no layout change, not a usable result

  padded               sequence, where `row_pad_for` says so (24 heads): that many bytes between the
                       rows of the result

Directions: `heads` sends q, k and v in one call, `sequence` one output back. Sizes are bytes that
one rank sends to its peers per call (its own share is not counted); both directions of the link
are busy. Each sample is the maximum over ranks.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable

import torch
import torch.distributed as dist
from _ranks import local_rank
from _report import ResultWriter, Row, line

from xstage_ext.planner.attention import STORE_PATHS, AttentionPlan, row_pad_for
from xstage_ext.testing import Timing, graph_of, time_arms
from xstage_ext.ulysses import ulysses_a2a
from xstage_ext.workspace import SymmetricWorkspace, region_bytes

HEAD_DIM = 128
DIRECTIONS = ("heads", "sequence")
SIZES_MB = (0.25, 1, 4, 16, 32, 64, 128)
CALLS = 8
"""Calls per graph."""


def make_plan(world: int, rows: int, heads: int, path: str, num_sms: int) -> AttentionPlan:
    """An even plan of `rows` rows per rank."""
    shares = (rows,) * world
    head_shares = (heads // world,) * world
    store_path = STORE_PATHS.index(path) if path in STORE_PATHS else 0
    return AttentionPlan(
        shares, shares, head_shares, slots=4, store_path=store_path, num_sms=num_sms
    )


def rows_for(megabytes: float, world: int, tensors: int, heads: int) -> int:
    """Rows per rank so that the remote bytes of a call are about `megabytes`."""
    row_bytes = tensors * heads * HEAD_DIM * 2 * (world - 1) / world
    return max(1, round(megabytes * 1e6 / row_bytes))


def to_heads_by_nccl(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """What users do: block copy, collective, copy into [B, S, h, D]; per tensor."""
    world = dist.get_world_size()
    outs = []
    for tensor in tensors:
        batch, rows, heads, head_dim = tensor.shape
        blocks = tensor.unflatten(2, (world, heads // world)).permute(2, 0, 1, 3, 4).contiguous()
        received = torch.empty_like(blocks)
        dist.all_to_all_single(received, blocks)
        out = received.permute(1, 0, 2, 3, 4).reshape(batch, world * rows, -1, head_dim)
        outs.append(out)
    return outs


def to_sequence_by_nccl(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The way back: [B, S, h, D] to [B, S / P, H, D]."""
    world = dist.get_world_size()
    outs = []
    for tensor in tensors:
        batch, rows, _, head_dim = tensor.shape
        blocks = tensor.unflatten(1, (world, rows // world)).permute(1, 0, 2, 3, 4).contiguous()
        received = torch.empty_like(blocks)
        dist.all_to_all_single(received, blocks)
        out = received.permute(1, 2, 0, 3, 4).reshape(batch, rows // world, -1, head_dim)
        outs.append(out)
    return outs


def same(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    """Bitwise equality."""
    return all(map(torch.equal, got, wanted))


class Bench:
    """One direction and size: inputs, arms, rows of the report."""

    def __init__(
        self,
        workspace: SymmetricWorkspace,
        direction: str,
        megabytes: float,
        heads: int,
        sms: list[int],
    ) -> None:
        self.direction = direction
        self.world = dist.get_world_size()
        self.tensors = 3 if direction == "heads" else 1
        self.heads = heads
        self.row_pad = row_pad_for(heads * HEAD_DIM * 2) if direction == "sequence" else 0
        self.rows = rows_for(megabytes, self.world, self.tensors, heads)
        shape = (
            (1, self.rows, heads, HEAD_DIM)
            if direction == "heads"
            else (1, self.rows * self.world, heads // self.world, HEAD_DIM)
        )
        self.inputs = [
            torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(self.tensors)
        ]
        self.by_nccl = to_heads_by_nccl if direction == "heads" else to_sequence_by_nccl
        self.workspace = workspace
        self.sms = sms
        self.ok: dict[str, bool] = {}

    def ours(self, path: str, num_sms: int) -> Callable[[], list[torch.Tensor]]:
        """A call on a channel of its own."""
        plan = make_plan(self.world, self.rows, self.heads, path, num_sms)
        if self.direction == "sequence":
            plan = plan.to_sequence(row_pad=self.row_pad if path == "padded" else 0)
        nbytes = plan.a2a_region_bytes(self.tensors, 1, HEAD_DIM)
        lease = self.workspace.channel(f"{path}-{num_sms}", nbytes, counter_bytes=0)
        self.leases.append(lease)
        return lambda: ulysses_a2a(lease, plan, self.inputs)

    def run(self, pairs: int) -> dict[str, Timing]:
        """Check every arm, then time all interleaved."""
        self.leases: list = []
        wanted = self.by_nccl(self.inputs)
        arms = {}
        paths = ["auto", "bulk", "vector"] + (["padded"] if self.row_pad else [])
        for path in paths:
            for num_sms in self.sms if path in STORE_PATHS else [0]:
                call = self.ours(path, num_sms)
                name = f"{path}-{num_sms}"
                self.ok[name] = same(call(), wanted)
                arms[name] = graph_of(call, CALLS, warm_ups=3)
        self.ok["permute+nccl"] = True
        arms["permute+nccl"] = graph_of(lambda: self.by_nccl(self.inputs), CALLS, warm_ups=3)
        flat = torch.cat([tensor.flatten() for tensor in self.inputs])
        target = torch.empty_like(flat)
        arms["nccl"] = graph_of(lambda: dist.all_to_all_single(target, flat), CALLS, warm_ups=3)
        timings = time_arms(arms, pairs=pairs)
        torch.cuda.synchronize()
        self.workspace.check()
        for lease in self.leases:
            lease.release()
        return timings

    def rows_of(self, timings: dict[str, Timing]) -> list[Row]:
        """Lines of the report."""
        remote = self.remote_bytes()
        shape = {"direction": self.direction, "rows": self.rows, "heads": self.heads, "D": HEAD_DIM}
        return [
            Row(
                op="ulysses_a2a",
                arm=name,
                shape=shape,
                world=self.world,
                us_median=timing.us_median / CALLS,
                us_p10=timing.us_p10 / CALLS,
                us_p90=timing.us_p90 / CALLS,
                n=timing.n,
                egress_GBps=remote * CALLS / timing.us_median / 1e3,
                ok=self.ok.get(name),
                extra={"remote_MB": round(remote / 1e6, 3), "calls_per_graph": CALLS},
            )
            for name, timing in timings.items()
        ]

    def remote_bytes(self) -> int:
        """That one rank sends to its peers per call."""
        return sum(t.numel() * 2 for t in self.inputs) * (self.world - 1) // self.world


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="three sizes, fewer samples")
    parser.add_argument("--sms", type=int, nargs="*", default=[0], help="blocks; 0: the default")
    parser.add_argument("--out", default="a2a.jsonl", help="file below benchmarks/results/")
    parser.add_argument("--sizes", type=float, nargs="*", help="MB of remote bytes")
    parser.add_argument("--heads", type=int, nargs="*", default=[24, 40], help="heads of models")
    args = parser.parse_args()
    torch.cuda.set_device(local_rank("bench_a2a"))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    sizes = args.sizes or ([1, 32, 128] if args.quick else SIZES_MB)
    arms = 2 + 2 * len(args.sms)
    world = dist.get_world_size()
    # Four slots of everything that a rank receives, with room for rounding.
    per_arm = round(4.2e6 * max(sizes) * world / (world - 1)) + (1 << 20)
    workspace = SymmetricWorkspace(nbytes=region_bytes([per_arm] * arms))
    writer = ResultWriter(args.out) if dist.get_rank() == 0 else None
    for direction, heads, megabytes in itertools.product(DIRECTIONS, args.heads, sizes):
        bench = Bench(workspace, direction, megabytes, heads, args.sms)
        for row in bench.rows_of(bench.run(pairs=10 if args.quick else 20)):
            if writer is not None:
                print(line(row), flush=True)
                writer.write(row)
    workspace.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
