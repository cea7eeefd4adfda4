"""Attention whose output goes to its owners, in virtual worlds of 1 to 8 ranks on one GPU.

The yardstick is `fa3` on the same heads: a row's arithmetic does not depend on tiling, so results
agree bit for bit, wherever borders fall.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from xstage_ext.channel import ChannelLease
from xstage_ext.planner.attention import AttentionPlan, even_split
from xstage_ext.reference_attention import to_heads
from xstage_ext.workspace import SymmetricWorkspace, region_bytes

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@contextmanager
def lease_for(plan: AttentionPlan, batch: int, head_dim: int) -> Iterator[ChannelLease]:
    nbytes = plan.region_bytes(batch, head_dim)
    with SymmetricWorkspace(
        nbytes=region_bytes([nbytes]),
        device="cuda",
        backend="virtual",
        world=plan.world,
        timeout_ms=10_000,
    ) as workspace:
        yield workspace.channel("out", nbytes, counter_bytes=0)
        workspace.check(synchronize=True)


def whole(plan: AttentionPlan, batch: int, head_dim: int, dtype: torch.dtype) -> Tensors:
    heads = sum(plan.heads)
    shapes = [
        (sum(plan.rows), heads),
        (sum(plan.kv_rows), heads // plan.kv_group),
        (sum(plan.kv_rows), heads // plan.kv_group),
    ]
    q, k, v = (
        torch.randn(batch, rows, count, head_dim, device="cuda", dtype=dtype)
        for rows, count in shapes
    )
    return q, k, v


def call(
    lease: ChannelLease,
    plan: AttentionPlan,
    tensors: Tensors,
    causal: bool = False,
    segments: torch.Tensor | None = None,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    q, k, v = tensors
    outs, lses = torch.ops.xstage.fa3_a2a_virtual(
        to_heads(plan, q),
        to_heads(plan, k, query=False),
        to_heads(plan, v, query=False),
        segments,
        None,
        causal,
        True,
        plan.words(),
        lease.virtual_words(),
    )
    return outs, lses


def expected(
    plan: AttentionPlan,
    tensors: Tensors,
    causal: bool = False,
    segments: torch.Tensor | None = None,
) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
    """Shards of every rank's rows and the log-sum-exp of every rank's heads, by `fa3`."""
    q, k, v = tensors
    out, lse = torch.ops.xstage.fa3(q, k, v, segments, None, causal, True)
    return out.split(list(plan.rows), 1), lse.split(list(plan.heads), 1)


def agree(got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> bool:
    return len(got) == len(wanted) and all(map(torch.equal, got, wanted))


CASES = [
    AttentionPlan((300,), (300,), (4,)),
    AttentionPlan((513, 512), (513, 512), (2, 2)),
    AttentionPlan((100, 1), (77, 300), (3, 1)),
    AttentionPlan((0, 200), (100, 100), (2, 2)),
    AttentionPlan((200, 300), (250, 250), (0, 3)),
    AttentionPlan((129, 63, 64), (100, 100, 57), (1, 2, 2)),
    AttentionPlan(even_split(4429, 4), even_split(4429, 4), even_split(6, 4)),
    AttentionPlan(even_split(1000, 8), even_split(1000, 8), even_split(14, 8)),
    AttentionPlan((128, 128), (128, 128), (14, 14), kv_group=7),
    AttentionPlan(even_split(515, 8), even_split(515, 8), even_split(16, 8), kv_group=8),
    AttentionPlan((7,) * 8, (7,) * 8, even_split(9, 8)),
]


def name(plan: AttentionPlan) -> str:
    return f"w{plan.world}-q{sum(plan.rows)}-h{sum(plan.heads)}-g{plan.kv_group}-{plan.rows[0]}"


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("plan", CASES, ids=name)
def test_every_row_reaches_its_owner(plan: AttentionPlan, head_dim: int, causal: bool) -> None:
    tensors = whole(plan, 2, head_dim, torch.bfloat16)
    wanted, wanted_lse = expected(plan, tensors, causal)
    with lease_for(plan, 2, head_dim) as lease:
        for rank in range(plan.world):
            lease.region(rank).fill_(0xFF)
        for _ in range(3):
            outs, lses = call(lease, plan, tensors, causal)
            assert agree(outs, wanted)
            assert agree(lses, wanted_lse)
            del outs, lses


@pytest.mark.parametrize(
    "changes",
    [
        {"slice_bytes": 2048, "slice_steps": 1},
        {"slice_bytes": 4096, "slice_steps": 2, "num_sms": 3},
        {"slice_bytes": 16384, "slice_steps": 50, "num_sms": 2},
        {"completion": 1},
        {"tile_order": 1},
        {"tile_order": 2, "num_sms": 5},
    ],
    ids=str,
)
def test_plans_agree_bit_for_bit(changes: dict[str, int]) -> None:
    base = AttentionPlan((700, 513, 11), (400, 400, 424), (3, 2, 2))
    tensors = whole(base, 1, 128, torch.float16)
    for causal in (False, True):
        wanted, _ = expected(base, tensors, causal)
        plan = dataclasses.replace(base, **changes)
        with lease_for(plan, 1, 128) as lease:
            for rank in range(plan.world):
                lease.region(rank).fill_(0xFF)
            outs, _ = call(lease, plan, tensors, causal)
            assert agree(outs, wanted)
            del outs


def test_segments_differ_between_batch_entries() -> None:
    plan = AttentionPlan((300, 212), (256, 256), (2, 2))
    tensors = whole(plan, 2, 128, torch.bfloat16)
    segments = torch.tensor([[[0, 100], [200, 400]], [[5, 512], [0, 0]]], dtype=torch.int32)
    segments = segments.to("cuda")
    for tensor in tensors[1:]:
        tensor[0, 100:200] = torch.nan
        tensor[0, 400:] = torch.nan
        tensor[1, :5] = torch.nan
    wanted, _ = expected(plan, tensors, segments=segments)
    with lease_for(plan, 2, 128) as lease:
        outs, _ = call(lease, plan, tensors, segments=segments)
        assert agree(outs, wanted)
        del outs


def test_identical_calls_agree_bit_for_bit(level: int) -> None:
    plan = AttentionPlan(even_split(1111, 4), even_split(1111, 4), (3, 3, 3, 3), slots=3)
    tensors = whole(plan, 1, 128, torch.bfloat16)
    wanted, _ = expected(plan, tensors)
    differing = torch.zeros((), device="cuda", dtype=torch.int64)
    with lease_for(plan, 1, 128) as lease:
        for _ in range(500 if level == 1 else 5000):
            outs, lses = call(lease, plan, tensors)
            for out, want in zip(outs, wanted, strict=True):
                differing += (out != want).any()
            del outs, lses, out
    assert int(differing) == 0


def test_graph_replays_with_new_values() -> None:
    plan = AttentionPlan((260, 255), (260, 255), (3, 3), slots=4)
    tensors = whole(plan, 1, 128, torch.bfloat16)
    with lease_for(plan, 1, 128) as lease:
        outs, lses = call(lease, plan, tensors)
        del outs, lses
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            first, _ = call(lease, plan, tensors)
            joined = torch.cat(first, 1) * 2
            del first
            second, _ = call(lease, plan, tensors)
        for _ in range(50):
            tensors[0].normal_()
            graph.replay()
            wanted = torch.cat(list(expected(plan, tensors)[0]), 1)
            assert torch.equal(joined, wanted * 2)
            assert torch.equal(torch.cat(second, 1), wanted)
        del second
        outs, lses = call(lease, plan, tensors)
        assert agree(outs, expected(plan, tensors)[0])
        del outs, lses
