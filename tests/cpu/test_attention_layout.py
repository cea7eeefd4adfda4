"""The layout that kernels and the CPU share: every output row stored once, by the right rank, in an
order that keeps own tiles last; slots never overlap; key heads cover what query heads read."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xstage_ext import machine
from xstage_ext.errors import PlanError
from xstage_ext.planner import attention_choice
from xstage_ext.planner.attention import TILE_ORDERS, AttentionPlan, even_split
from xstage_ext.planner.attention_choice import AttentionProblem, decide
from xstage_ext.shapes_attention import MODELS, shape

ops = torch.ops.xstage


@st.composite
def plans(draw: st.DrawFn) -> AttentionPlan:
    """Any shards, also empty ones; any heads in whole groups."""
    world = draw(st.integers(1, 8))
    shares = st.lists(st.integers(0, 70), min_size=world, max_size=world)
    rows, kv_rows, heads = (tuple(draw(shares)) for _ in range(3))
    divisors = [g for g in range(1, 71) if sum(heads) % g == 0]
    return AttentionPlan(rows, kv_rows, heads, draw(st.sampled_from(divisors)))


def tiles(plan: AttentionPlan, rank: int, batch: int, block_m: int) -> list[list[int]]:
    return ops.attention_tiles(plan.words(), rank, batch, block_m).tolist()


@settings(max_examples=60, deadline=None)
@given(plans(), st.integers(1, 3), st.integers(1, 80), st.integers(0, 2))
def test_every_row_of_every_head_once(plan, batch, block_m, order) -> None:
    plan = dataclasses.replace(plan, tile_order=order)
    first = [sum(plan.rows[:rank]) for rank in range(plan.world)]
    for rank in range(plan.world):
        seen = torch.zeros(batch, plan.heads[rank], sum(plan.rows), dtype=torch.int32)
        for b, head, owner, owner_row, row, count in tiles(plan, rank, batch, block_m):
            assert 1 <= count <= block_m
            assert row == first[owner] + owner_row
            assert owner_row >= 0 and owner_row + count <= plan.rows[owner]  # never over a border
            seen[b, head, row : row + count] += 1
        assert bool((seen == 1).all())


@settings(max_examples=60, deadline=None)
@given(plans(), st.integers(1, 3), st.integers(1, 80))
def test_own_tiles_last_and_destinations_rotate(plan, batch, block_m) -> None:
    for rank in range(plan.world):
        owners = [tile[2] for tile in tiles(plan, rank, batch, block_m)]
        own = owners.count(rank)
        assert all(owner == rank for owner in owners[len(owners) - own :])
        distance = [(owner - rank - 1) % plan.world for owner in owners[: len(owners) - own]]
        groups = batch * plan.heads[rank]
        per_group = len(distance) // groups if groups else 0
        for start in range(0, len(distance), max(1, per_group)):
            one = distance[start : start + per_group]
            assert one == sorted(one)


def test_longest_first_falls_in_work() -> None:
    plan = AttentionPlan((100, 33, 0, 200), (333, 0, 0, 0), (2, 1, 1, 0), tile_order=2)
    assert TILE_ORDERS[2] == "longest_first"
    for rank in range(3):
        rows = [tile[4] for tile in tiles(plan, rank, 2, 64)]
        assert rows == sorted(rows, reverse=True)


@settings(max_examples=60, deadline=None)
@given(plans(), st.integers(0, 2), st.integers(1, 40))
def test_every_tile_is_dealt_once(plan: AttentionPlan, order: int, blocks: int) -> None:
    plan = dataclasses.replace(plan, tile_order=order)
    for rank in range(plan.world):
        count = len(tiles(plan, rank, 2, 16))
        dealt = ops.attention_deal(plan.words(), rank, 2, 16, blocks).flatten()
        assert dealt[dealt >= 0].sort().values.tolist() == list(range(count))


@pytest.mark.parametrize("rows", [4096, 8192, 16384, 20480])
@pytest.mark.parametrize("heads", [8, 12, 16, 24])
def test_causal_work_is_dealt_evenly(rows: int, heads: int) -> None:
    """Longest first, over 132 blocks: the one with the most has at most 3% more than the mean."""
    plan = AttentionPlan((rows,), (rows,), (heads,), tile_order=2)
    first_row = torch.tensor(tiles(plan, 0, 1, 128))[:, 4]
    work = torch.cat([(first_row + 128).float(), torch.zeros(1)])  # keys; the last for no tile
    each = work[ops.attention_deal(plan.words(), 0, 1, 128, 132).long()].sum(0)
    assert float(each.max()) <= 1.03 * float(each.mean())


@settings(max_examples=60, deadline=None)
@given(plans())
def test_key_heads_cover_what_query_heads_read(plan: AttentionPlan) -> None:
    total = sum(plan.heads) // plan.kv_group
    for rank in range(plan.world):
        first, count = plan.key_heads(rank)
        assert [first, count] == ops.attention_key_heads(plan.words(), rank)
        begin = sum(plan.heads[:rank])
        read = {head // plan.kv_group for head in range(begin, begin + plan.heads[rank])}
        assert read == set(range(first, first + count))
        assert all(head < total for head in read)
        phase = plan.head_phase(rank)
        local = {(i + phase) // plan.kv_group for i in range(plan.heads[rank])}
        assert local == set(range(count))


@settings(max_examples=60, deadline=None)
@given(plans(), st.integers(1, 3), st.sampled_from([8, 64, 128]), st.integers(1, 16))
def test_regions_hold_every_slot(plan, batch, head_dim, slots) -> None:
    plan = dataclasses.replace(plan, slots=slots)
    outputs = plan.region_bytes(batch, head_dim)
    largest = batch * max(plan.rows) * sum(plan.heads) * head_dim * 2
    assert outputs % (1024 * slots) == 0 and outputs // slots >= largest
    assert outputs // slots < largest + 1024
    inputs = plan.a2a_region_bytes(3, batch, head_dim)
    for rank in range(plan.world):
        _, key_heads = plan.key_heads(rank)
        row = sum(plan.rows) * plan.heads[rank] + 2 * sum(plan.kv_rows) * key_heads
        assert inputs // slots >= batch * row * head_dim * 2


def test_even_split() -> None:
    assert even_split(38, 8) == (5, 5, 5, 5, 5, 5, 4, 4)
    assert even_split(1025, 2) == (513, 512)
    assert even_split(3, 4) == (1, 1, 1, 0)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"rows": (-1, 2)}, "rows_0: expected an integer from 0"),
        ({"slots": 17}, "slots: expected an integer from 1 to 16"),
        ({"slots": 0}, "slots: expected an integer from 1 to 16"),
        ({"kv_group": 0}, "kv_group: expected an integer from 1"),
        ({"tile_order": 3}, "tile_order: expected an integer from 0 to 2"),
    ],
)
def test_plans_out_of_range_are_named(fields, text) -> None:
    with pytest.raises(PlanError, match=text):
        dataclasses.replace(AttentionPlan((1, 2), (1, 2), (1, 1)), **fields).words()


def test_plans_of_different_lengths_are_named() -> None:
    with pytest.raises(PlanError, match="got 2, 1 and 2"):
        AttentionPlan((1, 2), (1,), (1, 1))


# --- planner --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_every_model_has_a_plan(name: str, world: int) -> None:
    problem = shape(name).problem(world)
    decision = decide(problem)
    assert decision.plan.words()
    assert sum(decision.plan.rows) == shape(name).total_rows
    assert sum(decision.plan.heads) == shape(name).heads
    predicted = decision.predicted_us
    assert 0 < predicted["attention"] <= min(predicted["fused"], predicted["serial"])
    better = "piggyback" if predicted["fused"] <= predicted["serial"] else "serial"
    assert decision.action == better and decision.reason
    if world == 1:
        assert decision.plan.slice_bytes == 0


def test_long_video_is_fused_and_longer_costs_more() -> None:
    times = []
    for rows in (4096, 16384, 65536):
        problem = AttentionProblem(40, 40, 128, even_split(rows, 8))
        decision = decide(problem)
        times.append(decision.predicted_us["fused"])
        assert decision.predicted_us["fused"] < 1.2 * decision.predicted_us["attention"] + 30
    assert times == sorted(times)
    assert decide(AttentionProblem(40, 40, 128, even_split(75600, 8))).action == "piggyback"


@pytest.mark.parametrize(
    ("heads", "head_dim", "rows", "paced"),
    [
        (24, 128, 4096, True),
        (24, 128, 8192, True),
        (24, 128, 16384, False),
        (10, 128, 75600, False),
        (6, 128, 4608, False),
        (38, 64, 4429, True),
    ],
)
def test_slices_where_they_were_faster(heads: int, head_dim: int, rows: int, paced: bool) -> None:
    """Not behind the only tile of an SM, nor where a whole tile's shadow is little beside it."""
    plan = decide(AttentionProblem(heads, heads, head_dim, even_split(rows, 2))).plan
    assert (plan.slice_bytes != 0) == paced


def test_a_decision_takes_less_than_a_millisecond(fastest_tenth) -> None:
    """None from the cache; again, from there, a tenth of that."""
    profile = machine.load("h200x2")
    asked = [AttentionProblem(40, 40, 128, even_split(rows, 8)) for rows in range(8000, 8101)]
    attention_choice._decided.cache_clear()
    tenths = [fastest_tenth(lambda problem: decide(problem, profile), asked) for _ in range(2)]
    assert tenths[0] < 1e-3 and tenths[1] < 1e-4
    found = attention_choice._decided.cache_info()
    assert (found.misses, found.hits) == (len(asked), len(asked))


def test_a_cached_decision_is_the_callers_own() -> None:
    problem = AttentionProblem(40, 40, 128, [4096, 4096])  # type: ignore[arg-type]  # also a list
    first = decide(problem)
    first.predicted_us["fused"] = -1.0
    assert decide(problem).predicted_us["fused"] > 0.0
    slower = machine.load("h100")
    assert decide(problem, slower).predicted_us != decide(problem).predicted_us
    assert decide(problem, None, slots=3).plan.slots == 3 and decide(problem).plan.slots == 2


def test_one_rank_has_no_exchange_to_compare_with() -> None:
    decision = decide(AttentionProblem(40, 40, 128, (8192,)))
    assert set(decision.predicted_us.values()) == {decision.predicted_us["attention"]}
    assert decision.reason.endswith("one rank keeps its output, so there is no All-to-All")


def test_given_fields_are_named_and_counted() -> None:
    """What is given decides what is predicted, and the reason does not claim it as its own."""
    problem = AttentionProblem(24, 24, 128, (2048, 2048))
    free = decide(problem)
    assert free.plan.slice_bytes and "given" not in free.reason
    few = decide(problem, None, num_sms=66)
    assert few.predicted_us["attention"] > 1.5 * free.predicted_us["attention"]
    assert few.reason.endswith("; given: num_sms")
    whole = decide(problem, None, slice_bytes=0, slice_steps=0)
    assert whole.reason.endswith("; whole tiles; given: slice_bytes, slice_steps")
    fence = decide(problem, None, completion=1)
    assert fence.predicted_us["fused"] == free.predicted_us["coupled"]
    assert "until it is visible" in fence.reason


def test_given_fields_win() -> None:
    problem = AttentionProblem(8, 8, 128, (4096, 4096))
    plan = decide(problem, None, slice_bytes=2048, slice_steps=7, tile_order=1, slots=5).plan
    assert (plan.slice_bytes, plan.slice_steps, plan.tile_order, plan.slots) == (2048, 7, 1, 5)


def test_proxy_has_the_heads_of_one_rank_among_eight() -> None:
    problem = shape("wan2.2-720p").problem(2, proxy_world=8)
    assert problem.heads == 10 and problem.query_shares == (5, 5)
    assert sum(problem.rows) == 75600


@pytest.mark.parametrize(
    ("heads", "head_dim", "rows", "causal", "measured_us"),
    [
        (12, 128, 4096, False, 148.6),
        (12, 128, 16384, False, 2315.1),
        (12, 128, 16384, True, 1182.8),
        (5, 128, 75600, False, 20730.2),
        (12, 64, 8192, False, 375.3),
        (12, 64, 32768, True, 3005.6),
        (6, 64, 17776, False, 985.6),
    ],
)
def test_attention_alone_as_measured_on_h200(heads, head_dim, rows, causal, measured_us) -> None:
    problem = AttentionProblem(heads, heads, head_dim, (rows,), causal=causal)
    predicted = decide(problem, machine.load("h200x2")).predicted_us["attention"]
    assert abs(predicted / measured_us - 1) < 0.1


def test_unknown_model_lists_the_names() -> None:
    with pytest.raises(KeyError, match="wan2.2-720p"):
        shape("wan3")
