"""The address table of megamoe: regions never overlap, and the whole stays small."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xstage_ext._binary import wire_fields
from xstage_ext._megamoe_setup import counter_bytes
from xstage_ext.planner.megamoe import MegaMoePlan

PLAN = MegaMoePlan(
    world=8, num_experts=128, topk=4, hidden=4096, intermediate=1536, max_tokens=8192
)


@st.composite
def plans(draw: st.DrawFn) -> MegaMoePlan:
    world = draw(st.integers(1, 8))
    group, lead, wave = draw(st.integers(1, 9)), draw(st.integers(0, 9)), draw(st.integers(1, 9))
    experts = draw(st.integers(1, 128))
    return MegaMoePlan(
        world=world,
        num_experts=world * experts,
        topk=draw(st.integers(1, 16)),
        hidden=64 * draw(st.integers(1, 64)),
        intermediate=64 * draw(st.integers(1, 64)),
        max_tokens=draw(st.integers(1, 9000)),
        block_m=draw(st.sampled_from((16, 64, 128))),
        schedule=draw(st.sampled_from((0, 1))),
        group_blocks=group,
        lead_blocks=lead,
        wave_blocks=wave,
        x_ring_blocks=draw(st.integers(9, 99)),
        h_ring_blocks=draw(st.integers(27, 99)),
        dispatch=draw(st.sampled_from((0, 1))),
        token_sets=draw(st.integers(1, experts)),
    )


def regions(plan: MegaMoePlan) -> tuple[dict[str, tuple[int, int]], int]:
    """(offset, bytes) by name, and the total."""
    table = {}
    for line in torch.ops.xstage.megamoe_layout(plan.words()).splitlines():
        name, offset, nbytes, _ = line.split(" ", 3)
        table[name] = (int(offset), int(nbytes))
    return table, table.pop("total")[1]


def assert_disjoint(spans: list[tuple[int, int]], end: int, align: int) -> None:
    position = 0
    for offset, nbytes in sorted(spans):
        assert offset % align == 0
        assert offset >= position
        position = offset + nbytes
    assert position <= end


@given(plans())
@settings(max_examples=300, deadline=None)
def test_regions_never_overlap(plan: MegaMoePlan) -> None:
    table, total = regions(plan)
    counters = {name: span for name, span in table.items() if name.startswith("counter.")}
    spans = [span for name, span in table.items() if name not in counters]
    assert_disjoint(spans, total, 1024)
    assert_disjoint(list(counters.values()), table["kCounters"][1] // 2, 128)
    assert total == plan.bytes()


@given(plans())
@settings(max_examples=100, deadline=None)
def test_regions_hold_the_worst_case(plan: MegaMoePlan) -> None:
    """Whatever the routing, rows and blocks find room: all ranks send everything to one rank."""
    table, _ = regions(plan)
    rows = plan.world * plan.max_tokens * plan.topk
    assert table["kRoutes"][1] == 2 * 4 * rows
    experts = plan.experts_per_rank
    # Most blocks arise when every expert but one holds a single row of its last block.
    ones = min(experts - 1, rows - 1)
    worst = ones + -(-(rows - ones) // plan.block_m)
    assert table["counter.kArrived"][1] >= 4 * worst
    assert table["kOrigins"][1] >= 4 * worst * plan.block_m


def test_memory_by_formula() -> None:
    """8192 tokens, hidden 4096, intermediate 1536, top-4, 128 experts on 8 ranks: under 1.2 GB."""
    table, total = regions(PLAN)
    tokens, wide = 8192, 2 * 4096
    assert table["kTokens"][1] == tokens * wide
    assert table["kCombine"][1] == 4 * tokens * wide
    assert table["kXRing"][1] == PLAN.x_ring_blocks * 128 * wide
    assert table["kHRing"][1] == PLAN.h_ring_blocks * 128 * 2 * 1536
    small = total - sum(table[name][1] for name in ("kTokens", "kCombine", "kXRing", "kHRing"))
    assert small < 8 << 20
    assert total <= 1.2e9
    # A pool for the worst routing would need max_blocks of each ring.
    worst_blocks = 8 * tokens * 4 // 128 + 16
    assert worst_blocks * 128 * (wide + 2 * 1536) > 2.5e9


@pytest.mark.parametrize("world", [1, 2, 8])
@pytest.mark.parametrize("token_sets", [1, 5, 16])
def test_what_a_push_needs_is_there_only_where_tokens_are_pushed(
    world: int, token_sets: int
) -> None:
    pull = dataclasses.replace(PLAN, world=world, num_experts=16 * world, token_sets=token_sets)
    push = dataclasses.replace(pull, dispatch=1)
    (pulled, _), (pushed, _) = regions(pull), regions(push)
    assert pull.bytes() == dataclasses.replace(pull, token_sets=1).bytes()
    tokens, wide = PLAN.max_tokens, 2 * PLAN.hidden
    places = (world - 1) * token_sets * tokens
    wanted = {
        "kTokens": (tokens * wide, places * wide),
        "kTokenHere": (0, 8 * places),
        "kSendRoutes": (0, 4 * world * tokens * PLAN.topk),
    }
    found = {name: (pulled[name][1], pushed[name][1]) for name in pulled}
    assert {name: sizes for name, sizes in found.items() if name in wanted} == wanted
    assert all(one == other for name, (one, other) in found.items() if name not in wanted)
    more = sum(after - before for before, after in wanted.values())
    assert push.bytes() - pull.bytes() == more


@pytest.mark.parametrize("dispatch", [0, 1])
def test_a_reset_zeroes_every_word_that_calls_count_on(dispatch: int) -> None:
    plan = dataclasses.replace(PLAN, dispatch=dispatch, token_sets=3)
    table, _ = regions(plan)
    for name in ("kDispatchSignals", "kStaged", "kTokenHere", "kCounters"):
        assert sum(table[name]) <= counter_bytes(plan), name


def test_the_number_of_a_place_fits_into_32_bits() -> None:
    """The kernel keeps it in an int32."""
    most = {name: high for name, _, high, _ in wire_fields("megamoe")}
    largest = {name: most[name] for name in ("world", "max_tokens", "token_sets")}
    plan = dataclasses.replace(PLAN, num_experts=1024, dispatch=1, **largest)
    places = regions(plan)[0]["kTokenHere"][1] // 8
    assert places == (plan.world - 1) * plan.token_sets * plan.max_tokens
    assert places <= 1 << 31


def test_rings_from_the_schedule() -> None:
    for change, text in [
        ({"h_ring_blocks": 31}, "h_ring_blocks: expected at least 32"),
        ({"schedule": 0, "wave_blocks": 65}, "h_ring_blocks: expected at least 65"),
        ({"x_ring_blocks": 7}, "x_ring_blocks: expected at least 8"),
    ]:
        with pytest.raises(RuntimeError, match=text):
            dataclasses.replace(PLAN, **change).bytes()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num_experts": 9}, "num_experts: expected a multiple of world .8., got 9"),
        ({"hidden": 100}, "hidden: expected a multiple of 64, got 100"),
        ({"intermediate": 65}, "intermediate: expected a multiple of 64, got 65"),
        ({"num_sms": 131}, "num_sms: expected a multiple of 2"),
        ({"world": 4, "num_experts": 1024}, "expected at most 128 per rank, got 256"),
        ({"max_tokens": 1 << 20, "topk": 16, "world": 8}, None),
        ({"block_m": 24}, "block_m: expected a multiple of 16, got 24"),
        ({"token_sets": 16, "dispatch": 1}, None),
        ({"token_sets": 17}, "token_sets: expected at most 16 .experts per rank., got 17"),
        ({"token_sets": 17, "dispatch": 1}, "token_sets: expected at most 16 .*, got 17"),
    ],
)
def test_plans_that_do_not_fit_are_refused_by_name(
    change: dict[str, int], text: str | None
) -> None:
    plan = dataclasses.replace(PLAN, **change)
    if text is None:
        assert plan.bytes() > 1 << 30
        return
    with pytest.raises(RuntimeError, match=text):
        plan.bytes()
