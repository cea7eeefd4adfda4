"""The simulator: exact accounting, the law where it must hold exactly, and sane orders."""

from __future__ import annotations

import dataclasses
import pathlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xstage_ext import machine, simulate
from xstage_ext.errors import PlanError
from xstage_ext.model import BurstGap
from xstage_ext.planner.megamoe import MegaMoePlan
from xstage_ext.testing import make_routing

LAW = simulate.Assumptions(
    power_exponent=0.0, copies_us=0.0, pull_rate=1.0, local_share=0.0, pull_share=0.5
)
"""The law alone: a fixed clock, copies that cost nothing, pulls as fast as the link."""
PROFILE = machine.load(pathlib.Path(__file__).parent / "data" / "h200x2_probe.json")


def plan_of(**fields):
    base = {"world": 2, "num_experts": 8, "topk": 4, "hidden": 1024, "intermediate": 512}
    return MegaMoePlan(**(base | {"max_tokens": 4096} | fields))


def run(plan, counts=None, **options):
    if counts is None:
        routing = make_routing(
            plan.world, plan.max_tokens, plan.num_experts, plan.topk, remote_share=0.875, seed=3
        )
        counts = routing.counts(plan.num_experts)[:, : plan.experts_per_rank]
    return simulate.simulate_megamoe(plan, counts, PROFILE, **options)


@st.composite
def cases(draw):
    world = draw(st.sampled_from([1, 2, 3, 8]))
    local = draw(st.integers(1, 5))
    group, lead, wave = draw(st.integers(1, 9)), draw(st.integers(0, 20)), draw(st.integers(1, 40))
    schedule = draw(st.sampled_from([0, 1]))
    least = wave if schedule == 0 else lead + 2 * group
    plan = MegaMoePlan(
        world=world,
        num_experts=world * local,
        topk=1,
        hidden=64 * draw(st.integers(1, 12)),
        intermediate=64 * draw(st.integers(1, 12)),
        max_tokens=6000 * local,
        cluster_size=draw(st.sampled_from([1, 2])),
        num_sms=2 * draw(st.integers(1, 66)),
        schedule=schedule,
        group_blocks=group,
        lead_blocks=lead,
        wave_blocks=wave,
        mix=draw(st.sampled_from([0, 1])),
        x_ring_blocks=group + draw(st.integers(0, 9)),
        h_ring_blocks=least + draw(st.integers(0, 9)),
        store=draw(st.sampled_from([0, 1, 2])),
        slice_rows=draw(st.sampled_from([1, 8, 128])),
        dispatch=draw(st.sampled_from([0, 1])),
        token_sets=draw(st.integers(1, local)),
    )
    counts = draw(
        st.lists(
            st.lists(
                st.sampled_from([0, 0, 1, 127, 128, 129, 900]), min_size=local, max_size=local
            ),
            min_size=world,
            max_size=world,
        )
    )
    return plan, np.array(counts), draw(st.integers(0, world - 1)), draw(st.booleans())


@given(cases(), st.sampled_from(sorted(simulate.COUPLINGS)))
@settings(max_examples=120, deadline=None)
def test_every_schedule_finishes_and_every_byte_is_counted(case, coupling):
    plan, counts, rank, tickets = case
    assume = simulate.Assumptions(tickets=tickets)
    result = simulate.simulate_megamoe(
        plan, counts, PROFILE, rank=rank, coupling=coupling, assume=assume, trace=True
    )
    remote = counts.sum() - counts[rank].sum()
    # With one choice per token every remote row is a token of its own, pushed or pulled.
    assert result.pull_bytes == pytest.approx(2 * plan.hidden * remote)
    columns = plan.linear2_tiles * plan.block_n
    assert result.store_bytes == pytest.approx(2 * columns * remote)
    np.testing.assert_allclose(
        result.link.sum(0) * result.bin_us * 1e3,
        [result.store_bytes, result.pull_bytes],
        rtol=1e-6,
        atol=1.0,
    )
    blocks = int((-(-counts.sum(0) // plan.block_m)).sum())
    index = torch.ops.xstage.megamoe_tiles(plan.words(), counts.sum(0).tolist())[:, 0]
    assert len(result.tiles) == len(index.unique())
    tiles = result.tiles
    assert (tiles[:, 5] >= tiles[:, 4]).all()
    assert (tiles[:, 6] >= tiles[:, 5]).all()
    assert (tiles[:, 7] >= tiles[:, 6]).all()
    assert result.tiles_us >= (tiles[:, 7].max() if blocks else 0.0)
    assert result.drained_us >= result.pulled_us
    for worker in np.unique(tiles[:, 0]):
        mine = tiles[tiles[:, 0] == worker]
        assert (mine[1:, 4] >= mine[:-1, 7] - 1e-9).all()


def test_linear2_starts_after_its_linear1_has_ended():
    result = run(plan_of(cluster_size=1), trace=True)
    phase, block = result.tiles[:, 1], result.tiles[:, 2]
    for b in np.unique(block):
        ends = result.tiles[(phase == 1) & (block == b), 6]
        begins = result.tiles[(phase == 2) & (block == b), 5]
        assert begins.min() >= ends.max() - 1e-9


@pytest.mark.parametrize("store", [0, 1, 2])
def test_order_of_the_couplings(store):
    plan = plan_of(schedule=0, wave_blocks=64, store=store, hidden=2048)
    law, fence, free = (
        run(plan, coupling=name, assume=LAW).tiles_us for name in ("law", "completion", "unbounded")
    )
    assert free <= law + 1e-6
    if store != 2:
        assert law < fence


def lockstep(num_sms):
    """All SMs compute equal tiles in step, every row of a tile goes to the other rank."""
    plan = plan_of(
        hidden=256 * num_sms,
        intermediate=128 * num_sms,
        num_experts=2,
        topk=1,
        num_sms=num_sms,
        cluster_size=1,
        schedule=0,
        wave_blocks=8,
        x_ring_blocks=8,
        h_ring_blocks=8,
        store=0,
        group_blocks=1,
    )
    counts = np.array([[0], [8 * 128]])
    return plan, counts


@pytest.mark.parametrize("num_sms", [1, 4, 16, 132])
@pytest.mark.parametrize("rate", [1.0, 0.1])
def test_lockstep_bursts_follow_the_law(num_sms, rate):
    """Where K producers burst together the simulator is the law: T = max(T0, V/R - G, (V-Q)/R)."""
    mechanism = PROFILE.mechanism("st")
    scaled = machine.ProducerCurve(
        mechanism.R_GBps.producers, tuple(rate * v for v in mechanism.R_GBps.values)
    )
    mechanism = dataclasses.replace(mechanism, R_GBps=scaled, R_both_GBps=None)
    profile = dataclasses.replace(
        PROFILE,
        mechanisms=PROFILE.mechanisms | {"st": mechanism},
        rates=dataclasses.replace(PROFILE.rates, pull_GBps=1e6, hbm_GBps=1e7, flag_us=0.0),
    )
    plan, counts = lockstep(num_sms)
    assume = simulate.Assumptions(
        prefetch_stages=10**6,
        pull_share=1.0,
        jitter=0.0,
        sustained=1.0,
        power_exponent=0.0,
        sharing_penalty=0.0,
    )
    result = simulate.simulate_megamoe(plan, counts, profile, assume=assume, trace=True)
    second = result.tiles[result.tiles[:, 1] == 2]
    mine = second[second[:, 0] == 0]
    assert len(mine) == 8
    issue = mine[:, 7] - mine[:, 6]
    main, _ = simulate.tile_us(profile, plan, plan.intermediate)
    gap = main + assume.epilogue2_us
    law = BurstGap.of(mechanism, num_sms, 128 * 256 * 2)
    expected = law.transient(np.full(8, gap)).T_iss_us
    np.testing.assert_allclose(issue, expected, rtol=1e-6)
    assert issue[-1] == pytest.approx(float(law.steady(gap)), rel=1e-6)


def test_one_rank_alone_never_stalls():
    result = run(plan_of(world=1, num_experts=4))
    assert (result.store_bytes, result.pull_bytes, result.stall_us) == (0.0, 0.0, 0.0)


def test_interleaving_pays_when_waves_are_bound_by_the_drain():
    shape = {"hidden": 2048, "intermediate": 768, "max_tokens": 8192, "num_experts": 32}
    wave = run(plan_of(schedule=0, store=0, **shape), assume=LAW)
    mixed = run(plan_of(schedule=1, store=0, **shape), assume=LAW)
    paced = run(plan_of(schedule=1, store=2, **shape), assume=LAW)
    assert wave.stall_us > 1.5 * mixed.stall_us
    assert wave.total_us > 1.03 * mixed.total_us
    assert paced.total_us <= 1.01 * mixed.total_us


@pytest.mark.parametrize("max_tokens", [4096, 16384])
@pytest.mark.parametrize("sets", [1, 2, 4])
def test_a_pushed_token_crosses_once_per_set(sets, max_tokens):
    """Of 4,096 tokens with 4 choices of 8 experts: how many want a set, whatever memory holds."""
    plan = plan_of(dispatch=1, token_sets=sets, max_tokens=max_tokens, num_sms=132)
    counts = np.full((2, 4), 4096 * 4 // 8)
    pushed = run(plan, counts, num_tokens=4096)
    wanted = sets * 4096 * (1.0 - (1.0 - 1.0 / (2 * sets)) ** 4)
    assert pushed.pull_bytes == pytest.approx(2 * plan.hidden * wanted)
    pulled = run(dataclasses.replace(plan, dispatch=0), counts, num_tokens=4096)
    assert pulled.pull_bytes == pytest.approx(2 * plan.hidden * 4 * 2048)
    assert pushed.store_bytes == pulled.store_bytes


def test_nothing_to_do_costs_only_the_frame():
    plan = plan_of()
    result = run(plan, np.zeros((2, 4), dtype=int), num_tokens=0)
    assume = simulate.Assumptions()
    assert result.tiles_us == assume.setup_us + assume.exchange_us
    assert result.total_us < assume.setup_us + assume.exchange_us + 20.0


def test_refuses_by_name():
    with pytest.raises(RuntimeError, match="counts: expected rows by source and local expert"):
        run(plan_of(), np.zeros((2, 3), dtype=int))
    with pytest.raises(RuntimeError, match="rank: expected 0 to 1, got 5"):
        run(plan_of(), rank=5)
    with pytest.raises(RuntimeError, match="machine: expected shape"):
        torch.ops.xstage.megamoe_simulate(
            plan_of().words(), [0] * 8, 0, torch.zeros(3).double(), torch.zeros(133).double(), False
        )


def test_idle_tensor_cores_raise_the_clock():
    """The same arithmetic runs faster where the link makes the tensor cores wait."""
    assume = simulate.Assumptions(power_exponent=0.3)
    fixed = dataclasses.replace(assume, power_exponent=0.0)
    bound = plan_of(hidden=4096, intermediate=512, max_tokens=8192)
    free = plan_of(world=1, num_experts=4, hidden=4096, intermediate=4096, max_tokens=8192)
    gains = [
        run(plan, assume=fixed).mean("math_us") / run(plan, assume=assume).mean("math_us")
        for plan in (bound, free)
    ]
    assert assume.most_rate / assume.sustained + 1e-6 >= gains[0] > gains[1] >= 1.0


def test_half_empty_tiles_and_rows_of_ones_own():
    """A tile of at most half its rows multiplies for less; local rows cost dispatch warps time."""
    assume = dataclasses.replace(LAW, half_share=0.5)
    plan = plan_of(num_experts=16, intermediate=2048)
    counts = np.zeros((2, 8), dtype=int)
    times = []
    for rows in (64, 128):
        counts[1] = rows
        times.append(run(plan, counts, assume=assume).mean("math_us"))
    assert times[0] == pytest.approx(0.5 * times[1])
    counts[:] = 0
    counts[0] = 2048
    slow, fast = (
        run(plan, counts, assume=dataclasses.replace(LAW, local_share=share))
        for share in (1.0, 0.0)
    )
    assert slow.pulled_us > fast.pulled_us
    assert slow.pull_bytes == fast.pull_bytes == 0.0


def test_few_readers_of_a_weight_tile_slow_the_main_loop():
    def factor(**fields):
        return simulate.sharing_slowdown(plan_of(**fields), 16.0, 0.17)

    assert factor(group_blocks=4, mix=0) == pytest.approx(1.17)
    assert factor(group_blocks=8, mix=1) == pytest.approx(1.17)
    assert factor(group_blocks=16, mix=0) < 1.01
    assert factor(group_blocks=1, mix=1) == 1.25
    assert simulate.sharing_slowdown(plan_of(group_blocks=8, mix=0), 1.0, 0.17) == 1.25


@pytest.mark.parametrize("rate", [0.0, 1e308])
def test_numbers_without_a_simulation_are_an_error_of_the_package(rate):
    rates = dataclasses.replace(PROFILE.rates, hbm_GBps=rate)
    broken = dataclasses.replace(PROFILE, rates=rates)
    plan = plan_of(max_tokens=64)
    with pytest.raises(PlanError, match=r"^xstage.megamoe_simulate: .*$"):
        simulate.simulate_megamoe(plan, np.full((2, 4), 32), broken)
