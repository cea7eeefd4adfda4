"""The planner's choices for megamoe: possible, explained, small, the same on every rank."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xstage_ext import machine
from xstage_ext.errors import PlanError
from xstage_ext.planner import choose as planner
from xstage_ext.planner import dispatch, ranking
from xstage_ext.planner.choose import Instance, candidates, choose, floors
from xstage_ext.planner.problem import MoEProblem
from xstage_ext.planner.ranking import FAMILIES, Ranking

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROFILE = machine.load("h200x2")
LARGE = MoEProblem(
    world=8, num_experts=128, topk=4, hidden=4096, intermediate=1536, max_tokens=8192
)


@st.composite
def problems(draw: st.DrawFn) -> MoEProblem:
    world = draw(st.integers(1, 8))
    most = draw(st.integers(1, 3000))
    experts = world * draw(st.integers(1, 16))
    return MoEProblem(
        world=world,
        num_experts=experts,
        topk=draw(st.integers(1, min(8, experts))),
        hidden=64 * draw(st.integers(1, 32)),
        intermediate=64 * draw(st.integers(1, 32)),
        max_tokens=most,
        tokens=draw(st.none() | st.integers(0, most)),
        remote_share=draw(st.none() | st.floats(0, 1)),
    )


@given(problems())
@settings(max_examples=25, deadline=None)
def test_every_problem_has_a_possible_plan(problem: MoEProblem) -> None:
    decision = choose(problem, PROFILE)
    assert decision.bytes == decision.plan.bytes()
    assert decision.action in ("wave", "interleaved")
    assert decision.plan.world == problem.world and decision.reason
    family, ratio = decision.expected[0]
    assert ratio == 1.0 <= min(ratio for _, ratio in decision.expected)
    assert FAMILIES[family]["schedule"] == decision.plan.schedule
    assert FAMILIES[family]["store"] == decision.plan.store


@given(problems())
@settings(max_examples=15, deadline=None)
def test_every_family_has_a_possible_plan_that_finishes(problem: MoEProblem) -> None:
    for plan in candidates(problem, PROFILE):
        assert plan.bytes() > 0
        assert planner.predicted_us(problem, plan, PROFILE) > 0


def test_a_decision_takes_less_than_a_millisecond(fastest_tenth) -> None:
    """None from the cache; again, from there, a tenth of that."""
    asked = [dataclasses.replace(LARGE, tokens=tokens) for tokens in range(4000, 4101)]
    planner._cached.cache_clear()
    tenths = [fastest_tenth(lambda problem: choose(problem, PROFILE), asked) for _ in range(2)]
    assert tenths[0] < 1e-3 and tenths[1] < 1e-4
    found = planner._cached.cache_info()
    assert (found.misses, found.hits) == (len(asked), len(asked))


def test_the_ranking_follows_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interleaving is chosen where weights say so, by features inside the fitted range only, and by
    no smaller share of the link than counts."""
    flat = dict.fromkeys(FAMILIES, [0.0] * 6)
    rule = Ranking(
        flat | {"wave st 64": [0.0, 0.1, 0, 0, 0, 0], "inter paced 48": [-0.01, 0, 0, 0, 0, 0]},
        [(-1.0, 1.0)] * 3,
        "made up",
        {"wave st 128": 1.0, "inter paced 48": 1.5},
    )
    monkeypatch.setattr(ranking, "fitted", lambda: rule)
    bound_by_link = dataclasses.replace(LARGE, intermediate=64, max_tokens=4100)
    bound_by_arithmetic = dataclasses.replace(LARGE, intermediate=32768, max_tokens=4100)
    assert choose(bound_by_link, PROFILE).expected[0][0] == "inter paced 48"
    decision = choose(bound_by_arithmetic, PROFILE)
    assert decision.expected[0][0] == "wave st 64"
    least = 0.1 * math.log(ranking.LEAST_LINK)
    assert dict(decision.expected)["inter paced 48"] == pytest.approx(math.exp(-0.01 - least))
    assert "wave with st stores takes 4.0% less than the best interleaved" in decision.reason
    alone = dataclasses.replace(LARGE, world=1, num_experts=16, max_tokens=4100)
    assert dict(choose(alone, PROFILE).expected) == rule.at_home
    assert choose(alone, PROFILE).family == "wave st 128"


def test_shipped_weights_cover_every_family() -> None:
    shipped = ranking.fitted()
    assert shipped.weights.keys() == FAMILIES.keys() == shipped.at_home.keys()
    times = list(shipped.at_home.values())
    assert times == sorted(times) and times[0] == 1.0
    assert all(len(weights) == 6 for weights in shipped.weights.values())
    assert all(low < high for low, high in shipped.ranges)


@given(problems())
@settings(max_examples=100, deadline=None)
def test_even_counts_hold_all_rows(problem: MoEProblem) -> None:
    counts = problem.even_counts()
    assert counts.shape == (problem.world, problem.experts_per_rank)
    assert int(counts.sum()) == problem.rows and int(counts.min()) >= 0
    if problem.world > 1:
        assert abs(int(counts[0].sum()) - problem.rows * (1 - problem.remote)) <= 1


def test_memory_of_the_large_layer() -> None:
    """8192 tokens, hidden 4096, intermediate 1536, top-4, 128 experts on 8 ranks."""
    for plan in candidates(LARGE, PROFILE):
        assert plan.bytes() <= 1.2e9
    assert choose(LARGE, PROFILE).bytes <= 1.2e9


def test_less_memory_on_request() -> None:
    usual, small = choose(LARGE, PROFILE), choose(LARGE, PROFILE, ring_bytes=50_000_000)
    # Staged tokens and returned rows are 336 MB, whatever the rings.
    assert 336_000_000 < small.bytes < 410_000_000 < usual.bytes < 480_000_000


def test_unknown_layouts_of_weights_are_refused() -> None:
    with pytest.raises(PlanError, match="weight_layout: expected one of gate_up, .*, got foo"):
        dataclasses.replace(LARGE, weight_layout="foo")


def test_overrides_are_taken() -> None:
    given = {"schedule": 0, "store": 0, "num_sms": 64, "x_ring_blocks": 40}
    plan = choose(LARGE, PROFILE, **given).plan
    assert {name: getattr(plan, name) for name in given} == given
    plan = choose(LARGE, PROFILE, lead_blocks=100, schedule=1).plan
    assert plan.lead_blocks == 100 and plan.h_ring_blocks >= 100 + 2 * plan.group_blocks
    with pytest.raises(PlanError, match="h_ring_blocks: expected at least"):
        choose(LARGE, PROFILE, lead_blocks=100, schedule=1, h_ring_blocks=20)
    with pytest.raises(PlanError, match="speed: not a field of MegaMoePlan"):
        choose(LARGE, PROFILE, speed=3)
    with pytest.raises(PlanError, match="dispatch: expected an integer from 0 to 1 .*, got 2"):
        choose(LARGE, PROFILE, dispatch=2)
    with pytest.raises(PlanError, match="num_sms: expected an integer from 1 to .*, got 0"):
        choose(LARGE, PROFILE, num_sms=0)
    with pytest.raises(PlanError, match="block_q: not a field of MegaMoePlan"):
        next(candidates(LARGE, PROFILE, overrides={"block_q": 3}))


def test_same_problem_same_plan() -> None:
    again = dataclasses.replace(LARGE)
    assert choose(again, PROFILE) is choose(LARGE, PROFILE)


def test_floors_name_what_binds() -> None:
    def binding(**change: int) -> str:
        return floors(dataclasses.replace(LARGE, **change), PROFILE).binding

    assert binding() == "arithmetic"
    assert binding(intermediate=256) == "the link"
    assert binding(tokens=16) == "reading the weights"
    decision = choose(LARGE, PROFILE)
    assert planner.predicted_us(LARGE, decision.plan, PROFILE) > decision.floors.us
    assert "arithmetic sets the floor" in decision.reason


def test_reasons_say_how_far_measurements_reach() -> None:
    toy = MoEProblem(world=2, num_experts=8, topk=2, hidden=64, intermediate=64, max_tokens=16)
    reason = choose(toy, PROFILE).reason
    assert "by measurements of other layers (none like it was measured)" in reason
    assert "floor (0.02 us)" in reason
    assert "by measurements of like layers" in choose(LARGE, PROFILE).reason


def test_tile_follows_rows_per_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = Instance(64, 256, 1), Instance(128, 256, 2)
    monkeypatch.setattr(planner, "instances", lambda: compiled)
    # Rows per expert: 4, 64, 128, 2048.
    for tokens, block_m in [(16, 64), (256, 64), (512, 128), (8192, 128)]:
        plans = list(candidates(dataclasses.replace(LARGE, tokens=tokens), PROFILE))
        assert {plan.block_m for plan in plans} == {block_m}


LINK = MoEProblem(
    world=2,
    num_experts=64,
    topk=8,
    hidden=2048,
    intermediate=768,
    max_tokens=8192,
    remote_share=7 / 8,
)
"""The link takes longer than arithmetic."""


def test_tokens_are_pushed_where_the_link_is_what_counts() -> None:
    assert choose(LINK, PROFILE).plan.dispatch == 1
    at_home = dataclasses.replace(LINK, remote_share=0.1)
    deep = dataclasses.replace(LINK, intermediate=2048)
    alone = dataclasses.replace(LINK, world=1, num_experts=32, remote_share=None)
    for other in (at_home, deep, alone, LARGE):
        assert choose(other, PROFILE).plan.dispatch == 0, other
    assert choose(LINK, PROFILE, dispatch=0).plan.dispatch == 0
    # As among eight ranks: many rows, or a link that is what counts by far.
    eight = dataclasses.replace(LINK, token_sets=7)
    assert choose(eight, PROFILE).plan.dispatch == 1
    assert choose(dataclasses.replace(eight, max_tokens=1024), PROFILE).plan.dispatch == 1
    # Every choice of a token on a rank of its own: nothing is saved.
    spread = dataclasses.replace(LINK, world=8, num_experts=8, remote_share=None)
    assert spread.sent_tokens == pytest.approx(7.0)
    assert choose(spread, PROFILE).plan.dispatch == 0
    # Few rows, where a first token's longer way counts: only if what is sent serves many rows.
    few = dataclasses.replace(LINK, max_tokens=1024, remote_share=0.5)
    assert choose(few, PROFILE).plan.dispatch == 1
    assert choose(dataclasses.replace(few, token_sets=7), PROFILE).plan.dispatch == 0


def test_who_moves_tokens_is_decided_for_the_sms_at_work() -> None:
    """Fewer of them have more rows each, and take longer for arithmetic."""
    some = dataclasses.replace(LINK, max_tokens=2048, remote_share=0.6, token_sets=7)
    told = {sms: choose(some, PROFILE, num_sms=sms).dispatch for sms in (132, 112, 96)}
    assert some.rows < 64 * 2 * 132 and some.rows >= 64 * 2 * 112
    assert told == {132: "pull", 112: "push", 96: "pull"}
    assert choose(some, PROFILE).dispatch == "pull"
    fields = ranking.DEFAULTS | FAMILIES["wave st 64"] | {"idle_sms": 20}
    plan = planner.family_plan(some, PROFILE, fields)
    assert (plan.num_sms, plan.dispatch) == (112, 1)
    assert planner.family_plan(some, PROFILE, fields, given={"dispatch": 0}).dispatch == 0


def test_the_rule_counts_the_kernels_warps() -> None:
    text = (ROOT / "csrc/megamoe/plan.h").read_text()
    assert re.findall(r"\bkDispatchWarps = (\d+);", text) == [str(dispatch.WARPS)]


def test_families_are_ranked_as_the_plan_moves_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the link's time of what is given, or follows from it; without either by the rule."""
    some = dataclasses.replace(LINK, max_tokens=2048, remote_share=0.6, token_sets=7)
    link = {name: ranking.features(some, PROFILE, name)[0] for name in ("pull", "push")}
    assert link["push"] < link["pull"] - 0.05
    between = sum(link.values()) / 2
    weights = {"inter paced 48": [between, 0, 0, 0, 0, 0], "wave st 64": [0.0, 1, 0, 0, 0, 0]}
    ends = [(-9.0, between), (-9.0, 9.0), (-9.0, 9.0)]
    rule = Ranking(dict.fromkeys(FAMILIES, [9.0] + [0.0] * 5) | weights, ends, "made up")
    monkeypatch.setattr(ranking, "fitted", lambda: rule)
    planner._cached.cache_clear()
    assert ranking.covers(some, PROFILE, "push") and not ranking.covers(some, PROFILE, "pull")
    ends[0] = (-9.0, 9.0)
    gain = 1.0 - math.exp(link["push"] - between)
    for fields, family, moved in (
        ({}, "inter paced 48", "pull"),
        ({"dispatch": 0}, "inter paced 48", "pull"),
        ({"dispatch": 1}, "wave st 64", "push"),
        ({"num_sms": 112}, "wave st 64", "push"),
        ({"num_sms": 112, "dispatch": 0}, "inter paced 48", "pull"),
    ):
        decision = choose(some, PROFILE, **fields)
        assert (decision.family, decision.dispatch) == (family, moved), fields
        assert dict(decision.expected) == ranking.relative_times(some, PROFILE, moved)
        # Who moves tokens otherwise than the rule says was not measured so.
        assert decision.covered == (fields in ({}, {"dispatch": 0}))
        assert ("by measurements of" in decision.reason) == decision.covered
    pushed = dataclasses.replace(some, max_tokens=8192)
    assert link["push"] == pytest.approx(ranking.features(pushed, PROFILE, "push")[0])
    decision = choose(pushed, PROFILE, dispatch=1)
    assert decision.covered and f"takes {gain:.1%} less than the best inter" in decision.reason
    planner._cached.cache_clear()


def test_bytes_by_hand() -> None:
    """Of 8192 tokens of 4 KiB: results of 7 choices each, and tokens."""
    token = 8192 * 4096.0
    assert LINK.egress_bytes("pull") == pytest.approx(14 * token)
    # All of eight different experts at home, where 8 of 64 are: one way of 64 over 8.
    assert LINK.sent_tokens == pytest.approx(1.0 - 1.0 / math.comb(64, 8))
    assert LINK.egress_bytes("push") == pytest.approx((7 + LINK.sent_tokens) * token)
    # Eight ranks, or two of which one stands for seven, whose tokens may choose an expert twice.
    eight = dataclasses.replace(LINK, world=8, num_experts=256, remote_share=None)
    missed = math.comb(224, 8) / math.comb(256, 8)
    assert eight.sent_tokens == pytest.approx(7 * (1 - missed))
    sets = dataclasses.replace(LINK, token_sets=7)
    assert sets.sent_tokens == pytest.approx(7 * (1 - (7 / 8) ** 8))
    least = floors(sets, PROFILE).egress_us / floors(LINK, PROFILE).egress_us
    assert least == pytest.approx((7 + sets.sent_tokens) / (7 + LINK.sent_tokens))
    assert dataclasses.replace(LINK, remote_share=1.0).sent_tokens == 1.0
    assert dataclasses.replace(LINK, remote_share=0.0).sent_tokens == 0.0


def test_a_decision_says_who_moves_tokens() -> None:
    pushed = choose(dataclasses.replace(LINK, token_sets=7), PROFILE)
    assert pushed.dispatch == "push"
    assert "tokens are pushed, 4.6 instead of 7.0 times each over the link" in pushed.reason
    pulled = choose(LINK, PROFILE, dispatch=0)
    assert pulled.dispatch == "pull" and "; rows are pulled; given: dispatch" in pulled.reason
    alone = choose(dataclasses.replace(LINK, world=1, remote_share=None), PROFILE, dispatch=1)
    assert "pushed" not in alone.reason and "pulled" not in alone.reason


def test_sets_of_tokens_are_those_of_the_problem() -> None:
    assert choose(LINK, PROFILE).plan.token_sets == 1
    assert choose(dataclasses.replace(LINK, token_sets=7), PROFILE).plan.token_sets == 7
    with pytest.raises(PlanError, match="token_sets: says what the layer is"):
        choose(LINK, PROFILE, token_sets=7)
    with pytest.raises(PlanError, match="token_sets: expected 1 to 32 .experts per rank., got 33"):
        dataclasses.replace(LINK, token_sets=33)
