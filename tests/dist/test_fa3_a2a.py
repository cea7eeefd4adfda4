"""Attention with the output All-to-All between GPUs.

    torchrun --nproc-per-node 2 -m pytest tests/dist/test_fa3_a2a.py

Every rank runs the same tests; results agree bit for bit with `fa3` and collectives.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tests.dist.world import BusyLink, gpu_world
from xstage_ext import SymmetricWorkspace
from xstage_ext.channel import ChannelLease
from xstage_ext.planner.attention import AttentionPlan, even_split

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture(scope="module")
def group() -> Iterator[tuple[int, int]]:
    """(rank, world) of an NCCL WORLD on this rank's GPU."""
    with gpu_world("cpu:gloo,cuda:nccl") as facts:
        yield facts


def operands(plan: AttentionPlan, rank: int, head_dim: int, batch: int = 1) -> Tensors:
    """This rank's heads over all rows; the same whole tensors on every rank before the cut."""
    generator = torch.Generator("cuda").manual_seed(7)
    heads = sum(plan.heads)

    def make(rows: int, count: int) -> torch.Tensor:
        shape = (batch, rows, count, head_dim)
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    q = make(sum(plan.rows), heads)
    k, v = (make(sum(plan.kv_rows), heads // plan.kv_group) for _ in range(2))
    begin = sum(plan.heads[:rank])
    first, count = plan.key_heads(rank)
    keys = slice(first, first + count)
    return q[:, :, begin : begin + plan.heads[rank]], k[:, :, keys], v[:, :, keys]


def gathered(plan: AttentionPlan, rank: int, out: torch.Tensor) -> torch.Tensor:
    """This rank's rows of all heads, by broadcasts of every rank's attention."""
    pieces = []
    for source in range(plan.world):
        shape = (out.shape[0], sum(plan.rows), plan.heads[source], out.shape[3])
        piece = out.contiguous() if source == rank else out.new_empty(shape)
        dist.broadcast(piece, source)
        pieces.append(piece)
    begin = sum(plan.rows[:rank])
    return torch.cat(pieces, 2)[:, begin : begin + plan.rows[rank]]


def call(
    lease: ChannelLease, plan: AttentionPlan, tensors: Tensors, causal: bool = False
) -> torch.Tensor:
    out: torch.Tensor = torch.ops.xstage.fa3_a2a(
        *tensors, None, None, causal, False, plan.words(), lease.words()
    )[0]
    return out


def plans(world: int) -> list[AttentionPlan]:
    """Even, uneven and shared; some ranks without rows."""
    short = tuple(1 + 130 * rank for rank in range(world))
    empty = (0,) * (world - 1) + (300,)
    return [
        AttentionPlan(even_split(4096, world), even_split(4096, world), (6,) * world),
        AttentionPlan(even_split(4429, world), even_split(4429, world), even_split(7, world)),
        AttentionPlan(short, even_split(777, world), (3,) * world),
        AttentionPlan(empty, even_split(500, world), (2,) * world),
        AttentionPlan((128,) * world, (128,) * world, (8,) * world, kv_group=8 * world),
        AttentionPlan(
            even_split(3000, world),
            even_split(3000, world),
            (4,) * world,
            slice_bytes=4096,
            slice_steps=1,
        ),
        AttentionPlan(even_split(3000, world), even_split(3000, world), (4,) * world, completion=1),
    ]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("index", range(7))
def test_every_row_reaches_its_owner(
    group: tuple[int, int], index: int, head_dim: int, causal: bool
) -> None:
    rank, world = group
    plan = plans(world)[index]
    tensors = operands(plan, rank, head_dim, batch=2)
    local, _ = torch.ops.xstage.fa3(
        *tensors,
        causal=causal,
        head_phase=plan.head_phase(rank),
        plan=AttentionPlan(
            (sum(plan.rows),), (sum(plan.kv_rows),), (plan.heads[rank],), plan.kv_group
        ).words(),
    )
    wanted = gathered(plan, rank, local)
    nbytes = plan.region_bytes(2, head_dim)
    with SymmetricWorkspace(nbytes=2 * nbytes, timeout_ms=20_000) as workspace:
        lease = workspace.channel("out", nbytes, counter_bytes=0)
        lease.region().fill_(0xFF)
        torch.cuda.synchronize()
        dist.barrier()
        for _ in range(4):
            out = call(lease, plan, tensors, causal)
            assert torch.equal(out, wanted)
            del out
        workspace.check(synchronize=True)


@pytest.mark.parametrize("paced", [False, True], ids=["burst", "paced"])
def test_no_flag_overtakes_its_payload(group: tuple[int, int], paced: bool, level: int) -> None:
    """Each call's values differ from the last one's by a power of two, so that one stale row shows;
    250,000 tiles per rank (10^6 at level 2), while another stream keeps the link busy."""
    rank, world = group
    slices = {"slice_bytes": 2048, "slice_steps": 1} if paced else {}
    plan = AttentionPlan(
        even_split(1024, world), even_split(1024, world), (12,) * world, slots=3, **slices
    )
    q, k, v = operands(plan, rank, 128)
    scaled = [(v * 2.0**power).contiguous() for power in range(5)]
    wanted = gathered(plan, rank, torch.ops.xstage.fa3(q, k, v)[0])
    expected = [wanted * 2.0**power for power in range(5)]
    calls = (250_000 if level == 1 else 1_000_000) // (12 * 8)
    differing = torch.zeros((), device="cuda", dtype=torch.int64)
    nbytes = plan.region_bytes(1, 128)
    noise = torch.randn(8 << 20, device="cuda")
    other = torch.empty_like(noise)
    busy = torch.cuda.Stream()
    with SymmetricWorkspace(nbytes=2 * nbytes, timeout_ms=20_000) as workspace:
        lease = workspace.channel("out", nbytes, counter_bytes=0)
        for number in range(calls):
            if number % 50 == 0:
                busy.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(busy):
                    dist.all_to_all_single(other, noise)
            out = call(lease, plan, (q, k, scaled[number % 5]))
            differing += (out != expected[number % 5]).any()
            del out
        assert int(differing) == 0
        workspace.check(synchronize=True)
    torch.cuda.synchronize()


@pytest.mark.parametrize("paced", [False, True], ids=["burst", "paced"])
def test_identical_calls_are_bitwise_equal(group: tuple[int, int], paced: bool) -> None:
    """5,000 calls while a copy engine loads the link."""
    rank, world = group
    slices = {"slice_bytes": 4096, "slice_steps": 1} if paced else {}
    plan = AttentionPlan(
        even_split(1025, world), even_split(1025, world), (6,) * world, slots=3, **slices
    )
    tensors = operands(plan, rank, 128)
    nbytes = plan.region_bytes(1, 128)
    link = BusyLink()
    with SymmetricWorkspace(nbytes=2 * nbytes, timeout_ms=20_000) as workspace:
        lease = workspace.channel("out", nbytes, counter_bytes=0)
        first = call(lease, plan, tensors).clone()
        assert torch.equal(first, gathered(plan, rank, torch.ops.xstage.fa3(*tensors)[0]))
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(5000):
            link.keep_busy()
            out = call(lease, plan, tensors)
            wrong += (out.view(torch.int16) != first.view(torch.int16)).sum()
            del out
        assert int(wrong) == 0 and link.copies > 100
        workspace.check(synchronize=True)
    torch.cuda.synchronize()


def test_skewed_ranks_and_graphs(group: tuple[int, int]) -> None:
    rank, world = group
    plan = AttentionPlan(even_split(999, world), even_split(999, world), (3,) * world, slots=4)
    tensors = operands(plan, rank, 128)
    nbytes = plan.region_bytes(1, 128)
    with SymmetricWorkspace(nbytes=2 * nbytes, timeout_ms=20_000) as workspace:
        lease = workspace.channel("out", nbytes, counter_bytes=0)
        wanted = gathered(plan, rank, torch.ops.xstage.fa3(*tensors)[0])
        for number in range(40):
            if number % world == rank:
                torch.cuda._sleep(2_000_000)
            out = call(lease, plan, tensors)
            assert number % 8 or torch.equal(out, wanted)
            del out
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = call(lease, plan, tensors)
        for number in range(20):
            tensors[0].mul_(-1 if number % 2 else 1)
            graph.replay()
            replayed = out.clone()
            wanted = gathered(plan, rank, torch.ops.xstage.fa3(*tensors)[0])
            assert torch.equal(replayed, wanted)
        del out
        workspace.check(synchronize=True)
