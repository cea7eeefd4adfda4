"""The All-to-All on one GPU: virtual worlds in one cooperative launch, against plain indexing."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.gpu import sanitizer
from xstage_ext.errors import PeerTimeout, WorkspaceError
from xstage_ext.planner.attention import STORE_PATHS, AttentionPlan, even_split, row_pad_for
from xstage_ext.ulysses import ulysses_a2a_virtual
from xstage_ext.workspace import SymmetricWorkspace, region_bytes

PATHS = [STORE_PATHS.index(name) for name in ("bulk", "vector")]


def plan_of(world: int, rows: int, heads: int, kv_group: int = 1, **more: int) -> AttentionPlan:
    return AttentionPlan(
        even_split(rows, world),
        even_split(rows, world),
        even_split(heads, world),
        kv_group,
        **more,
    )


def bounds(shares: tuple[int, ...]) -> list[int]:
    return [sum(shares[:rank]) for rank in range(len(shares) + 1)]


def cut(plan: AttentionPlan, tensors: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Sequence shards, rank after rank, as views of whole tensors."""
    edges = bounds(plan.rows)
    return [
        tensor[:, edges[rank] : edges[rank + 1]] for rank in range(plan.world) for tensor in tensors
    ]


def expected_heads(plan: AttentionPlan, tensor: torch.Tensor, query: bool) -> list[torch.Tensor]:
    edges = bounds(plan.heads)
    out = []
    for rank in range(plan.world):
        first, count = (edges[rank], plan.heads[rank]) if query else plan.key_heads(rank)
        out.append(tensor[:, :, first : first + count])
    return out


def whole(batch: int, rows: int, heads: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(batch, rows, heads, head_dim, device="cuda", dtype=dtype)


def open_virtual(plan: AttentionPlan, nbytes: int) -> SymmetricWorkspace:
    return SymmetricWorkspace(
        nbytes=region_bytes([nbytes]), device="cuda", backend="virtual", world=plan.world
    )


@pytest.mark.parametrize("path", PATHS, ids=lambda path: STORE_PATHS[path])
@pytest.mark.parametrize(
    ("world", "rows", "heads", "kv_group", "batch", "head_dim"),
    [
        (1, 130, 4, 1, 1, 128),
        (2, 1025, 24, 1, 2, 128),
        (2, 257, 28, 4, 1, 128),
        (3, 300, 7, 7, 1, 64),
        (4, 8423, 6, 1, 1, 128),
        (4, 515, 32, 16, 3, 64),
        (8, 1000, 38, 1, 2, 64),
        (8, 5, 3, 1, 1, 72),
    ],
)
def test_there_and_back(
    path: int, world: int, rows: int, heads: int, kv_group: int, batch: int, head_dim: int
) -> None:
    plan = plan_of(world, rows, heads, kv_group, store_path=path)
    q = whole(batch, rows, heads, head_dim, torch.bfloat16)
    k, v = (whole(batch, rows, heads // kv_group, head_dim, torch.bfloat16) for _ in range(2))
    with open_virtual(plan, plan.a2a_region_bytes(3, batch, head_dim)) as workspace:
        lease = workspace.channel("a2a", workspace.nbytes, counter_bytes=0)
        for _ in range(5):
            outs = ulysses_a2a_virtual(lease, plan, cut(plan, (q, k, v)))
            for offset, (tensor, query) in enumerate(((q, True), (k, False), (v, False))):
                wanted = expected_heads(plan, tensor, query)
                assert all(map(torch.equal, outs[offset::3], wanted))
            back = ulysses_a2a_virtual(lease, plan.to_sequence(), expected_heads(plan, q, True))
            assert all(map(torch.equal, back, cut(plan, (q,))))
            del outs, back
        workspace.check(synchronize=True)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: STORE_PATHS[path])
def test_more_blocks_than_the_gpu_holds(path: int) -> None:
    """What blocks of a rank wait for comes from one that is there: the first."""
    plan = plan_of(1, 5000, 8, store_path=path, num_sms=1000)
    q = whole(1, 5000, 8, 128, torch.bfloat16)
    with open_virtual(plan, plan.a2a_region_bytes(1, 1, 128)) as workspace:
        lease = workspace.channel("a2a", workspace.nbytes, counter_bytes=0)
        for _ in range(3):
            outs = ulysses_a2a_virtual(lease, plan, cut(plan, (q,)))
            assert torch.equal(outs[0], q)
            del outs
        workspace.check(synchronize=True)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: STORE_PATHS[path])
def test_rows_with_space_between_them(path: int) -> None:
    plan = plan_of(2, 1025, 24, store_path=path)
    back = plan.to_sequence(row_pad=row_pad_for(24 * 128 * 2))
    q = whole(2, 1025, 24, 128, torch.bfloat16)
    with open_virtual(back, back.a2a_region_bytes(1, 2, 128)) as workspace:
        lease = workspace.channel("a2a", workspace.nbytes, counter_bytes=0)
        for rank in range(2):
            lease.region(rank).fill_(0xFF)
        outs = ulysses_a2a_virtual(lease, back, expected_heads(plan, q, True))
        assert outs[0].stride() == (513 * 3136, 3136, 128, 1)
        assert all(map(torch.equal, outs, cut(plan, (q,))))
        gaps = outs[0].as_strided((512, 64), (3136, 1), outs[0].storage_offset() + 3072)
        assert bool((gaps.view(torch.int16) == -1).all())  # nobody writes there
        del outs, gaps
        workspace.check(synchronize=True)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: STORE_PATHS[path])
def test_any_strides(path: int) -> None:
    plan = plan_of(2, 130, 8, store_path=path)
    batch, head_dim = 2, 64
    packed = whole(batch, 130, 3 * 8, head_dim, torch.float16)
    storage = torch.randn(batch * 130 * 8 * head_dim + 1, device="cuda", dtype=torch.float16)
    inputs = {
        "sliced": packed.unflatten(2, (3, 8)).unbind(2)[1],
        "transposed": whole(batch, 8, 130, head_dim, torch.float16).transpose(1, 2),
        "every second row": whole(batch, 260, 8, head_dim, torch.float16)[:, ::2],
        "expanded": whole(batch, 130, 1, head_dim, torch.float16).expand(-1, -1, 8, -1),
        "odd base": storage[1:].view(batch, 130, 8, head_dim),
        "last stride 2": whole(batch, 130, 8, 2 * head_dim, torch.float16)[..., ::2],
        "odd head size": whole(batch, 130, 8, 33, torch.float16),
    }
    with open_virtual(plan, plan.a2a_region_bytes(1, batch, head_dim)) as workspace:
        lease = workspace.channel("a2a", workspace.nbytes, counter_bytes=0)
        for name, tensor in inputs.items():
            outs = ulysses_a2a_virtual(lease, plan, cut(plan, (tensor,)))
            wanted = expected_heads(plan, tensor, True)
            assert all(map(torch.equal, outs, wanted)), name
            del outs
        workspace.check(synchronize=True)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: STORE_PATHS[path])
def test_graph_replays_with_new_values(path: int) -> None:
    plan = plan_of(4, 515, 12, slots=4, store_path=path)
    q = whole(1, 515, 12, 128, torch.bfloat16)
    with open_virtual(plan, plan.a2a_region_bytes(1, 1, 128)) as workspace:
        lease = workspace.channel("a2a", workspace.nbytes, counter_bytes=0)
        ulysses_a2a_virtual(lease, plan, cut(plan, (q,)))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            heads = ulysses_a2a_virtual(lease, plan, cut(plan, (q,)))
            doubled = [tensor * 2 for tensor in heads]
            back = ulysses_a2a_virtual(lease, plan.to_sequence(), doubled)
        for _ in range(100):
            q.normal_()
            graph.replay()
            assert torch.equal(torch.cat(back, 1), q * 2)
        workspace.check(synchronize=True)
        eager = ulysses_a2a_virtual(lease, plan, cut(plan, (q,)))
        assert torch.equal(torch.cat(eager, 2), q)
        del eager, heads, back


def test_a_held_slot_is_refused_and_the_next_call_works() -> None:
    plan = plan_of(2, 64, 4)
    q = whole(1, 64, 4, 64, torch.bfloat16)
    with open_virtual(plan, plan.a2a_region_bytes(1, 1, 64)) as workspace:
        lease = workspace.channel("a2a", workspace.nbytes, counter_bytes=0)
        kept = [
            torch.ops.xstage.ulysses_a2a_virtual(
                cut(plan, (q,)), plan.words(), lease.virtual_words()
            )
            for _ in range(2)
        ]
        with pytest.raises(RuntimeError, match="output slots"):
            torch.ops.xstage.ulysses_a2a_virtual(
                cut(plan, (q,)), plan.words(), lease.virtual_words()
            )
        del kept


@pytest.mark.parametrize("path", PATHS, ids=lambda path: STORE_PATHS[path])
def test_an_absent_rank_is_named_and_a_reset_recovers(path: int) -> None:
    plan = plan_of(2, 700, 4, store_path=path)
    q = whole(1, 700, 4, 64, torch.bfloat16)
    nbytes = plan.a2a_region_bytes(1, 1, 64)
    with SymmetricWorkspace(
        nbytes=region_bytes([nbytes]), device="cuda", backend="virtual", world=2, timeout_ms=300
    ) as workspace:
        lease = workspace.channel("a2a", workspace.nbytes, counter_bytes=0)
        for _ in range(2):
            outs = ulysses_a2a_virtual(lease, plan, cut(plan, (q,)))  # after a fault: resets first
            assert torch.equal(torch.cat(outs, 2), q)
            del outs
            words = [plan.words(), lease.words(rank=0)]
            (alone,) = torch.ops.xstage.ulysses_a2a(cut(plan, (q,))[:1], *words)
            torch.cuda.synchronize()
            assert bool(alone.isnan().all()), "a call that gave up must not hand out old data"
            with pytest.raises(PeerTimeout, match="waited 30.* for rank 1 .*expected 2, saw 1"):
                workspace.check()
            del alone


def test_calls_that_differ_are_found_in_the_signal() -> None:
    plan = plan_of(2, 700, 4)
    q = whole(1, 700, 4, 64, torch.bfloat16)
    with open_virtual(plan, plan.a2a_region_bytes(1, 1, 64)) as workspace:
        lease = workspace.channel("a2a", workspace.nbytes, counter_bytes=0)
        words = lease.words(digest=1, rank=0) + lease.words(digest=2, rank=1)
        outs = torch.ops.xstage.ulysses_a2a_virtual(cut(plan, (q,)), plan.words(), words)
        torch.cuda.synchronize()
        assert all(bool(out.isnan().all()) for out in outs)
        with pytest.raises(WorkspaceError, match="made different calls in all-to-all arrival"):
            workspace.check()
        del outs


def test_side_stream_and_other_shapes_share_a_ring() -> None:
    large = plan_of(2, 1025, 8)
    small = dataclasses.replace(large, rows=(3, 7), kv_rows=(3, 7))
    q = whole(1, 1025, 8, 128, torch.bfloat16)
    stream = torch.cuda.Stream()
    with open_virtual(large, large.a2a_region_bytes(1, 1, 128)) as workspace:
        lease = workspace.channel("a2a", workspace.nbytes, counter_bytes=0)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(10):
                torch.cuda._sleep(20_000)
                big = ulysses_a2a_virtual(lease, large, cut(large, (q,)))
                little = ulysses_a2a_virtual(lease, small, cut(small, (q[:, :10],)))
                assert torch.equal(torch.cat(big, 2), q)
                assert torch.equal(torch.cat(little, 2), q[:, :10])
                del big, little
        workspace.check(synchronize=True)


@pytest.mark.parametrize("tool", sanitizer.TOOLS)
def test_sanitizer_finds_nothing(tool: str, level: int) -> None:
    sanitizer.expect_nothing_found(tool, "a2a_small", level)
