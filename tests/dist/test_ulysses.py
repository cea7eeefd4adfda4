"""The All-to-All and `UlyssesAttention` between GPUs.

    torchrun --nproc-per-node 2 -m pytest tests/dist/test_ulysses.py

Every rank runs the same tests; tests/cpu/test_ulysses.py runs the same module.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from tests.dist.world import BusyLink, gpu_world
from xstage_ext import SymmetricWorkspace, UlyssesAttention
from xstage_ext import reference_attention as reference
from xstage_ext.errors import PeerError, WorkspaceError
from xstage_ext.key_segments import segments_from_lengths
from xstage_ext.planner.attention import STORE_PATHS, AttentionPlan, even_split
from xstage_ext.ulysses import ulysses_a2a

PATHS = [STORE_PATHS.index(name) for name in ("bulk", "vector")]
CLOSE = {"rtol": 1e-2, "atol": 1e-2}


@pytest.fixture(scope="module")
def group() -> Iterator[tuple[int, int]]:
    """(rank, world) of an NCCL WORLD on this rank's GPU."""
    with gpu_world("nccl", bind=True) as facts:
        yield facts


def whole(rows: int, heads: tuple[int, int], head_dim: int = 128, seed: int = 0, batch: int = 1):
    """q, k, v of the whole sequence, the same on every rank."""
    generator = torch.Generator("cuda").manual_seed(seed)
    options = {"generator": generator, "device": "cuda", "dtype": torch.bfloat16}
    q = torch.randn(batch, rows, heads[0], head_dim, **options)
    k, v = (torch.randn(batch, rows, heads[1], head_dim, **options) for _ in range(2))
    return q, k, v


def mine(tensor: torch.Tensor, rows: tuple[int, ...], rank: int) -> torch.Tensor:
    return reference.shards(tensor, rows)[rank]


def plan_of(world: int, rows: int, heads: int, kv_group: int = 1, **more: int) -> AttentionPlan:
    shares = even_split(rows, world)
    return AttentionPlan(shares, shares, even_split(heads, world), kv_group, **more)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: STORE_PATHS[path])
@pytest.mark.parametrize(
    ("rows", "heads", "head_dim", "batch"),
    [(1025, (24, 24), 128, 1), (257, (28, 7), 128, 2), (8423, (3, 1), 64, 1), (1, (2, 2), 64, 1)],
)
def test_there_and_back(group, path, rows, heads, head_dim, batch) -> None:
    rank, world = group
    plan = plan_of(world, rows, heads[0], heads[0] // heads[1], store_path=path)
    nbytes = plan.a2a_region_bytes(3, batch, head_dim)
    with SymmetricWorkspace(nbytes=nbytes, timeout_ms=10_000) as workspace:
        lease = workspace.channel("a2a", nbytes, counter_bytes=0)
        for call in range(20):
            q, k, v = whole(rows, heads, head_dim, call, batch)
            outs = ulysses_a2a(lease, plan, [mine(t, plan.rows, rank) for t in (q, k, v)])
            for index, (out, tensor) in enumerate(zip(outs, (q, k, v), strict=True)):
                assert torch.equal(out, reference.to_heads(plan, tensor, index == 0)[rank])
            back = ulysses_a2a(lease, plan.to_sequence(), outs[:1])
            assert torch.equal(back[0], mine(q, plan.rows, rank))
            del outs, out, back
        workspace.check(synchronize=True)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: STORE_PATHS[path])
def test_payload_before_flag_under_load(group, path: int) -> None:
    """Graph replays back to back, both directions busy, ranks late in turn, every byte checked."""
    rank, world = group
    plan = plan_of(world, 2048, 8, slots=4, store_path=path)
    nbytes = plan.a2a_region_bytes(1, 1, 128)
    shape = (1, plan.rows[rank], 8, 128)
    calls = 10
    with SymmetricWorkspace(nbytes=nbytes, timeout_ms=10_000) as workspace:
        lease = workspace.channel("a2a", nbytes, counter_bytes=0)
        counter = torch.zeros((), dtype=torch.int32, device="cuda")
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        sources = [plan.rows[r] for r in range(world) for _ in range(1)]
        origin = torch.repeat_interleave(
            torch.arange(world, device="cuda"), torch.tensor(sources, device="cuda")
        )

        def step() -> None:
            counter.add_(1)
            value = (counter % 97 + 100 * rank).to(torch.bfloat16)
            x = torch.empty(shape, device="cuda", dtype=torch.bfloat16).copy_(value)
            (heads,) = ulysses_a2a(lease, plan, [x])
            expected = (counter % 97 + 100 * origin).to(torch.bfloat16)
            wrong.add_((heads != expected[None, :, None, None]).sum())

        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(calls):
                step()
        for replay in range(300):
            if replay % 50 == rank * 25:
                torch.cuda._sleep(3_000_000)
            graph.replay()
        workspace.check(synchronize=True)
        assert int(wrong) == 0 and int(counter) >= 300 * calls


def test_identical_calls_are_bitwise_equal(group) -> None:
    """5,000 calls while a copy engine loads the link."""
    rank, world = group
    plan = plan_of(world, 1025, 24)
    nbytes = plan.a2a_region_bytes(3, 1, 128)
    link = BusyLink()
    with SymmetricWorkspace(nbytes=nbytes, timeout_ms=10_000) as workspace:
        lease = workspace.channel("a2a", nbytes, counter_bytes=0)
        inputs = [mine(t, plan.rows, rank) for t in whole(1025, (24, 24))]
        first = [out.clone() for out in ulysses_a2a(lease, plan, inputs)]
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(5000):
            link.keep_busy()
            for out, wanted in zip(ulysses_a2a(lease, plan, inputs), first, strict=True):
                wrong += (out.view(torch.int16) != wanted.view(torch.int16)).sum()
            del out
        assert int(wrong) == 0 and link.copies > 100
        workspace.check(synchronize=True)
    torch.cuda.synchronize()


def test_two_streams_on_one_channel(group) -> None:
    """Calls from two streams follow each other; random host sleeps on each rank."""
    rank, world = group
    plan = plan_of(world, 515, 8)
    nbytes = plan.a2a_region_bytes(1, 1, 128)
    q = whole(515, (8, 8))[0]
    wanted = reference.to_heads(plan, q)[rank]
    streams = [torch.cuda.Stream() for _ in range(2)]
    sleeps = torch.rand(200, generator=torch.Generator().manual_seed(rank)) * 2e-3
    torch.cuda.synchronize()
    with SymmetricWorkspace(nbytes=nbytes, timeout_ms=10_000) as workspace:
        lease = workspace.channel("a2a", nbytes, counter_bytes=0)
        wrong = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in streams]
        for call in range(200):
            with torch.cuda.stream(streams[call % 2]):
                (out,) = ulysses_a2a(lease, plan, [mine(q, plan.rows, rank)])
                wrong[call % 2] += (out != wanted).sum()
                del out
            time.sleep(float(sleeps[call]))
        workspace.check(synchronize=True)
        assert sum(map(int, wrong)) == 0


def test_other_rows_are_told(group) -> None:
    rank, world = group
    module = UlyssesAttention(4, 128)
    module.prepare(2000)
    q, k, v = (t[:, : 500 + 25 * rank] for t in whole(1000, (4, 4)))
    with pytest.raises((WorkspaceError, PeerError)):
        module(q, k, v)
        module.check(synchronize=True)
    rows = even_split(515, world)
    q, k, v = whole(515, (4, 4))
    out = module(*(mine(t, rows, rank) for t in (q, k, v)), rows=515)
    expected, _ = reference.attention(q, k, v)
    torch.testing.assert_close(out.float(), mine(expected, rows, rank), **CLOSE)
    del out
    module.close()


@pytest.mark.parametrize(
    ("rows", "heads", "head_dim", "causal"),
    [
        (1025, (24, 24), 128, False),
        (515, (28, 7), 128, True),
        (1000, (6, 2), 64, False),
        (300, (8, 8), 72, False),
    ],
)
@pytest.mark.parametrize("impl", ["auto", "torch"])
def test_attention(group, rows, heads, head_dim, causal, impl) -> None:
    rank, world = group
    shares = even_split(rows, world)
    module = UlyssesAttention(heads[0], head_dim, kv_heads=heads[1], causal=causal, impl=impl)
    lengths = torch.tensor([rows - 37], device="cuda")
    for seed, segments in ((0, None), (1, segments_from_lengths(lengths))):
        q, k, v = whole(rows, heads, head_dim, seed)
        out = module(*(mine(t, shares, rank) for t in (q, k, v)), rows=rows, key_segments=segments)
        expected, _ = reference.attention(q, k, v, segments, causal=causal)
        torch.testing.assert_close(out.float(), mine(expected, shares, rank), **CLOSE)
        del out
    module.check(synchronize=True)
    if impl == "torch":
        assert module.path == "torch"
    elif head_dim == 72:
        assert module.path == "serial" and "head_dim 72" in str(module.fallback_reason)
    else:
        assert module.path in ("fused", "serial") and module.fallback_reason is None
    module.close()


def test_graph_and_compile(group) -> None:
    rank, world = group
    shares = even_split(515, world)
    module = UlyssesAttention(8, 128, slots=4)
    q, k, v = (mine(t, shares, rank).contiguous() for t in whole(515, (8, 8)))
    module.prepare(515)
    eager = module(q, k, v, rows=515).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = module(q, k, v, rows=515)
        doubled = out * 2
        del out
    for _ in range(100):
        doubled.zero_()
        graph.replay()
        assert torch.equal(doubled, eager * 2)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    with torch.inference_mode():
        assert torch.equal(compiled(q, k, v, rows=515), eager)
    module.check(synchronize=True)
    module.close()


def test_first_call_in_a_capture_is_refused(group) -> None:
    rank, world = group
    shares = even_split(64, world)
    module = UlyssesAttention(4, 128)
    q, k, v = (mine(t, shares, rank).contiguous() for t in whole(64, (4, 4)))
    graph = torch.cuda.CUDAGraph()
    refused = pytest.raises(WorkspaceError, match="once eagerly before capturing")
    with refused, torch.cuda.graph(graph):
        module(q, k, v, rows=64)
    out = module(q, k, v, rows=64)
    expected, _ = reference.attention(*whole(64, (4, 4)))
    torch.testing.assert_close(out.float(), mine(expected, shares, rank), **CLOSE)
    del out
    module.close()
