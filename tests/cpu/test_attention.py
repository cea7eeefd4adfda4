"""Attention ops on the CPU against the fp32 reference: alone, and fused over virtual worlds."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from xstage_ext import SymmetricWorkspace
from xstage_ext import reference_attention as reference
from xstage_ext.errors import WorkspaceError
from xstage_ext.key_segments import segments_from_lengths, segments_from_mask
from xstage_ext.planner.attention import AttentionPlan, even_split
from xstage_ext.ulysses import ulysses_a2a_virtual

ops = torch.ops.xstage
TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float16: {"rtol": 1e-3, "atol": 1e-3},
    torch.bfloat16: {"rtol": 8e-3, "atol": 8e-3},
}
Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def operands(
    rows: tuple[int, int],
    heads: tuple[int, int],
    head_dim: int = 64,
    batch: int = 1,
    dtype: torch.dtype = torch.bfloat16,
) -> Triple:
    q = torch.randn(batch, rows[0], heads[0], head_dim, dtype=dtype)
    k, v = torch.randn(2, batch, rows[1], heads[1], head_dim, dtype=dtype)
    return q, k, v


def plan_of(rows: tuple[int, int], world: int, heads: int, group: int = 1, **more: int):
    return AttentionPlan(
        even_split(rows[0], world),
        even_split(rows[1], world),
        even_split(heads, world),
        group,
        **more,
    )


def fused(
    plan: AttentionPlan,
    inputs: Triple,
    segments: torch.Tensor | None = None,
    scale: float | None = None,
    causal: bool = False,
    op: str = "fa3",
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Sequence shards to sequence shards over a virtual world; results are copies."""
    batch, head_dim, element = inputs[0].shape[0], inputs[0].shape[3], inputs[0].element_size()
    sizes = (
        plan.a2a_region_bytes(3, batch, head_dim, element),
        plan.region_bytes(batch, head_dim, element),
    )
    with SymmetricWorkspace(
        nbytes=sum(sizes) + 2048, device="cpu", backend="virtual", world=plan.world, timeout_ms=2000
    ) as workspace:
        first, second = (workspace.channel(n, s) for n, s in zip("io", sizes, strict=True))
        for lease in (first, second):
            for rank in range(plan.world):
                lease.region(rank).fill_(255)  # NaN wherever nobody writes
        shards = zip(
            reference.shards(inputs[0], plan.rows),
            *(reference.shards(tensor, plan.kv_rows) for tensor in inputs[1:]),
            strict=True,
        )
        received = ulysses_a2a_virtual(first, plan, [t for shard in shards for t in shard])
        outs, lses = getattr(ops, f"{op}_a2a_virtual")(
            received[0::3],
            received[1::3],
            received[2::3],
            segments,
            scale,
            causal,
            True,
            plan.words(),
            second.virtual_words(),
        )
        workspace.check()
        results = [out.clone() for out in outs], [lse.clone() for lse in lses]
        del received, outs, lses
    return results


def assert_fused(plan: AttentionPlan, inputs: Triple, **meaning) -> None:
    outs, lses = fused(plan, inputs, **meaning)
    named = {"key_segments": meaning.get("segments")}
    named |= {key: meaning[key] for key in ("scale", "causal") if key in meaning}
    expected, expected_lse = reference.attention(*inputs, kv_group=plan.kv_group, **named)
    assert [out.shape[1] for out in outs] == list(plan.rows)
    tolerance = TOLERANCE[inputs[0].dtype]
    torch.testing.assert_close(torch.cat(outs, 1).float(), expected, **tolerance)
    torch.testing.assert_close(torch.cat(lses, 1), expected_lse, rtol=1e-4, atol=1e-4)


# --- attention alone ----------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["fa3", "fa4"])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("rows", "heads", "head_dim", "batch"),
    [
        ((100, 100), (4, 4), 128, 1),
        ((65, 130), (6, 2), 64, 2),
        ((130, 65), (4, 1), 72, 3),
        ((1, 257), (3, 3), 40, 1),
    ],
)
def test_alone(op, dtype, causal, rows, heads, head_dim, batch) -> None:
    q, k, v = operands(rows, heads, head_dim, batch, dtype)
    out, lse = getattr(ops, op)(q, k, v, None, None, causal, True)
    expected, expected_lse = reference.attention(q, k, v, causal=causal)
    torch.testing.assert_close(out.float(), expected, **TOLERANCE[dtype])
    torch.testing.assert_close(lse, expected_lse, rtol=1e-4, atol=1e-4)


def test_reference_equals_torch() -> None:
    q, k, v = operands((70, 70), (4, 4), dtype=torch.float32)
    for causal in (False, True):
        torchs = torch.nn.functional.scaled_dot_product_attention(
            *(t.transpose(1, 2) for t in (q, k, v)), is_causal=causal
        )
        ours, _ = reference.attention(q, k, v, causal=causal)
        torch.testing.assert_close(ours, torchs.transpose(1, 2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [(0, 9), (9, 0), (0, 0)])
def test_nothing_to_do(rows: tuple[int, int]) -> None:
    q, k, v = operands(rows, (2, 2))
    out, lse = ops.fa3(q, k, v, None, None, False, True)
    assert out.shape == q.shape and bool((out == 0).all()) and bool(torch.isneginf(lse).all())


def test_lse_is_optional() -> None:
    assert ops.fa3(*operands((9, 9), (2, 2)))[1].shape == (0,)


def strided_inputs() -> dict[str, Triple]:
    q, k, v = operands((66, 66), (4, 4), batch=2)
    packed = torch.randn(2, 66, 3, 4, 64).bfloat16()
    storage = torch.randn(2 * 66 * 4 * 64 + 1).bfloat16()
    return {
        "qkv.unbind(2)": packed.unbind(2),
        "transposed": tuple(torch.randn(3, 2, 4, 66, 64).bfloat16().transpose(2, 3)),
        "every second key": (q, *torch.randn(2, 2, 132, 4, 64).bfloat16()[:, :, ::2]),
        "expanded v": (q, k, v[:, :1].expand(-1, 66, -1, -1)),
        "odd base": (q, k, storage[1:].view(2, 66, 4, 64)),
        "last stride 2": (torch.randn(2, 66, 4, 128).bfloat16()[..., ::2], k, v),
    }


@pytest.mark.parametrize("name", sorted(strided_inputs()))
def test_strides_change_no_bit(name: str) -> None:
    inputs = strided_inputs()[name]
    assert any(not tensor.is_contiguous() or tensor.storage_offset() for tensor in inputs)
    copies = tuple(tensor.contiguous() for tensor in inputs)
    assert torch.equal(ops.fa3(*inputs)[0], ops.fa3(*copies)[0])
    plan = plan_of((66, 66), 3, 4)
    for ours, theirs in zip(fused(plan, inputs)[0], fused(plan, copies)[0], strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"k": (1, 9, 3, 64)}, "key heads that divides 4 query heads, got 3"),
        ({"v": (1, 8, 4, 64)}, r"v: expected shape \[1, 9, 4, 64\], got \[1, 8, 4, 64\]"),
        ({"k": (2, 9, 4, 64)}, r"k: expected shape \[1, \*, \*, 64\]"),
        ({"q": (9, 4, 64)}, r"q: expected shape \[\*, \*, \*, \*\], got \[9, 4, 64\]"),
    ],
)
def test_shapes_are_refused_by_name(change: dict[str, tuple[int, ...]], text: str) -> None:
    shapes = {name: (1, 9, 4, 64) for name in "qkv"} | change
    tensors = [torch.zeros(shapes[name], dtype=torch.bfloat16) for name in "qkv"]
    with pytest.raises(RuntimeError, match=text):
        ops.fa3(*tensors)


def test_dtypes_are_refused_by_name() -> None:
    q, k, v = operands((9, 9), (2, 2))
    with pytest.raises(RuntimeError, match="v: expected bfloat16, got float16"):
        ops.fa3(q, k, v.half())
    with pytest.raises(RuntimeError, match="q: expected bfloat16, float16 or float32, got float64"):
        ops.fa3(q.double(), k.double(), v.double())
    with pytest.raises(RuntimeError, match="key_segments: expected int32, got int64"):
        ops.fa3(q, k, v, torch.zeros(1, 1, 2, dtype=torch.int64))


# --- fused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_worlds(world: int, causal: bool) -> None:
    assert_fused(plan_of((205, 205), world, 8), operands((205, 205), (8, 8)), causal=causal)


@pytest.mark.parametrize(
    ("world", "rows", "heads", "batch"),
    [
        (2, (1025, 1025), (2, 2), 1),
        (4, (130, 130), (6, 6), 1),
        (8, (70, 70), (38, 38), 1),
        (2, (90, 90), (28, 7), 1),
        (4, (50, 50), (32, 2), 2),
        (2, (60, 60), (32, 8), 3),
        (8, (33, 33), (3, 1), 1),
        (3, (40, 171), (6, 3), 2),
        (4, (171, 40), (6, 2), 1),
        (8, (5, 9), (8, 8), 1),
    ],
)
@pytest.mark.parametrize("causal", [False, True])
def test_uneven_and_grouped(world, rows, heads, batch, causal) -> None:
    plan = plan_of(rows, world, heads[0], heads[0] // heads[1])
    assert_fused(plan, operands(rows, heads, batch=batch), causal=causal)


def test_long_odd_sequence(level: int) -> None:
    rows = 8423 if level > 1 else 2107
    q, k, v = operands((rows, rows), (4, 4), 32)
    plan = plan_of((rows, rows), 4, 4)
    outs, _ = fused(plan, (q, k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(t.float().transpose(1, 2) for t in (q, k, v))
    ).transpose(1, 2)
    assert sum(out.shape[1] for out in outs) == rows
    torch.testing.assert_close(torch.cat(outs, 1).float(), expected, **TOLERANCE[q.dtype])


@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize("block_m", [0, 16, 100])
def test_order_and_block_change_no_bit(order: int, block_m: int) -> None:
    inputs = operands((77, 77), (5, 5), batch=2)
    plan = plan_of((77, 77), 3, 5)
    other = dataclasses.replace(plan, tile_order=order, block_m=block_m)
    wanted, got = fused(plan, inputs, causal=True), fused(other, inputs, causal=True)
    alone, _ = ops.fa3(*inputs, None, None, True)
    assert all(map(torch.equal, wanted[0] + wanted[1], got[0] + got[1]))
    assert torch.equal(torch.cat(got[0], 1), alone)


def test_given_shares() -> None:
    plan = AttentionPlan((0, 60, 1), (31, 0, 30), (1, 0, 5), 2)
    assert_fused(plan, operands((61, 61), (6, 3), dtype=torch.float32), causal=True, scale=0.3)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("op", ["fa3", "fa4"])
def test_nan_in_hidden_keys_is_harmless(op: str, causal: bool) -> None:
    q, k, v = operands((130, 257), (4, 2), batch=3)
    mask = torch.rand(3, 257) < 0.9
    mask[0, 64:200] = False
    mask[1] = torch.arange(257) < 31
    mask[2] = False
    segments = segments_from_mask(mask)
    clean = fused(plan_of((130, 257), 2, 4, 2), (q, k, v), segments, causal=causal, op=op)
    hidden = ~mask[:, :, None, None]
    k, v = k.masked_fill(hidden, torch.nan), v.masked_fill(hidden, torch.nan)
    dirty = fused(plan_of((130, 257), 2, 4, 2), (q, k, v), segments, causal=causal, op=op)
    assert all(map(torch.equal, clean[0] + clean[1], dirty[0] + dirty[1]))
    expected, _ = reference.attention(q, k, v, segments, causal=causal)
    torch.testing.assert_close(torch.cat(dirty[0], 1).float(), expected, **TOLERANCE[q.dtype])
    assert bool((torch.cat(dirty[0], 1)[2] == 0).all())


def test_nan_in_a_query_stays_in_its_row() -> None:
    q, k, v = operands((65, 65), (2, 2))
    q[0, 7, 1] = torch.nan
    out = ops.fa3(q, k, v)[0]
    assert bool(out[0, 7, 1].isnan().all())
    assert int(out.isnan().sum()) == q.shape[3]


def test_segments() -> None:
    lengths = segments_from_lengths(torch.tensor([3, 0]))
    assert lengths.tolist() == [[[0, 3]], [[0, 0]]] and lengths.dtype == torch.int32
    mask = torch.tensor([[True, False, True, True], [False, True, False, False]])
    segments = segments_from_mask(mask)
    assert segments.tolist() == [[[0, 1], [2, 4]], [[1, 2], [0, 0]]]
    assert torch.equal(reference.key_is_valid(segments, 4), mask)
    with pytest.raises(TypeError, match="additive"):
        segments_from_mask(torch.zeros(1, 4))
    with pytest.raises(NotImplementedError, match="at most 64 runs"):
        segments_from_mask(torch.arange(200)[None] % 2 == 0)


# --- refusals of the fused op ---------------------------------------------------------------------


@pytest.fixture
def pair():
    plan = plan_of((20, 20), 2, 4)
    nbytes = plan.region_bytes(1, 64)
    with SymmetricWorkspace(
        nbytes=nbytes, device="cpu", backend="virtual", world=2, timeout_ms=2000
    ) as workspace:
        yield plan, workspace.channel("o", nbytes)


def call(plan: AttentionPlan, lease, heads: int = 2, rows: int = 20, batch: int = 1):
    q, k, v = ([torch.zeros(batch, rows, heads, 64).bfloat16()] * 2 for _ in range(3))
    return ops.fa3_a2a_virtual(
        q, k, v, None, None, False, False, plan.words(), lease.virtual_words()
    )[0]


def test_wrong_shapes_name_the_plan(pair) -> None:
    plan, lease = pair
    with pytest.raises(RuntimeError, match="q: expected 20 rows and 2 heads on rank 0 by the plan"):
        call(plan, lease, heads=3)
    with pytest.raises(RuntimeError, match="but a slot has"):
        call(plan, lease, batch=2)
    with pytest.raises(RuntimeError, match="plan: made for 3 ranks, but the workspace has 2"):
        call(plan_of((20, 20), 3, 4), lease)
    assert len(call(plan, lease)) == 2


def test_held_slots_are_refused_with_numbers(pair) -> None:
    plan, lease = pair
    kept = [call(plan, lease) for _ in range(2)]
    with pytest.raises(RuntimeError, match="2 of 2 slots hold live results"):
        call(plan, lease)
    kept.clear()
    assert len(call(plan, lease)) == 2


def test_closed_workspace_is_refused(pair) -> None:
    plan, lease = pair
    lease.workspace.close()
    with pytest.raises(WorkspaceError, match="closed"):
        call(plan, lease)


# --- what torch.compile sees ----------------------------------------------------------------------


def one_rank(tensors: int, plan: AttentionPlan):
    workspace = SymmetricWorkspace(nbytes=1 << 22, device="cpu", timeout_ms=2000)
    size = max(plan.region_bytes(1, 64), plan.a2a_region_bytes(tensors, 1, 64))
    return workspace, workspace.channel("c", size)


@pytest.mark.parametrize("op", ["fa3", "fa4"])
def test_opcheck(op: str) -> None:
    q, k, v = operands((20, 20), (4, 2))
    segments = segments_from_lengths(torch.tensor([11]))
    torch.library.opcheck(getattr(ops, op), (q, k, v))
    torch.library.opcheck(getattr(ops, op), (q, k, v, segments, 0.1, True, True))
    plan = plan_of((20, 20), 1, 4, 2, slots=16)
    workspace, lease = one_rank(3, plan)
    with workspace:
        torch.library.opcheck(
            getattr(ops, f"{op}_a2a"),
            (q, k, v, segments, None, True, True, plan.words(), lease.words()),
        )


def test_opcheck_of_the_exchange() -> None:
    q, k, v = operands((20, 20), (4, 2))
    plan = plan_of((20, 20), 1, 4, 2, slots=16)
    workspace, lease = one_rank(3, plan)
    with workspace:
        torch.library.opcheck(ops.ulysses_a2a, ([q, k, v], plan.words(), lease.words()))


def test_fakes_know_every_rank() -> None:
    plan = plan_of((205, 103), 4, 6, 3)
    inputs = operands((205, 103), (6, 2))
    with SymmetricWorkspace(
        nbytes=1 << 24, device="cpu", backend="virtual", world=4, timeout_ms=2000
    ) as workspace:
        lease = workspace.channel("c", 1 << 23)
        shards = [
            reference.shards(t, plan.rows if i == 0 else plan.kv_rows) for i, t in enumerate(inputs)
        ]
        flat = [shard[rank] for rank in range(4) for shard in shards]
        words = (plan.words(), lease.virtual_words())
        own_words = [lease.words(0, rank) for rank in range(4)]
        real = [tuple(t.shape) for t in ops.ulysses_a2a_virtual(flat, *words)]
        with torch._subclasses.FakeTensorMode() as mode:
            fakes = [mode.from_tensor(t) for t in flat]
            assert [tuple(t.shape) for t in ops.ulysses_a2a_virtual(fakes, *words)] == real
            for rank in range(4):
                one = ops.ulysses_a2a(fakes[3 * rank : 3 * rank + 3], words[0], own_words[rank])
                assert [tuple(t.shape) for t in one] == real[3 * rank : 3 * rank + 3]
