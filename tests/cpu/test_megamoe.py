"""The megamoe op on the CPU against the fp32 reference: worlds, plans, routing, errors."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.virtual_moe import Layer, batch, plan_of, pushed_tokens, regions
from xstage_ext import reference
from xstage_ext.errors import RoutingError
from xstage_ext.planner.megamoe import MegaMoePlan

COUNTS = (0, 1, 7, 63, 64, 65, 127, 128, 129, 255, 257)


@pytest.fixture
def layers() -> Iterator[list[Layer]]:
    made: list[Layer] = []
    yield made
    for layer in made:
        layer.workspace.close()


# --- worlds and plans ---------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("schedule", [0, 1])
def test_equal_to_reference(layers: list[Layer], world: int, schedule: int) -> None:
    layers.append(layer := Layer.make(plan_of(world, schedule=schedule)))
    for call in range(3):  # both banks, then the first again
        counts = [(73 * (rank + 1) * (call + 1)) % 200 for rank in range(world)]
        layer.check(*batch(layer.plan, counts, seed=call))


@pytest.mark.parametrize("world", [1, 3])
def test_bitwise_equal_for_every_plan(layers: list[Layer], world: int) -> None:
    tokens = batch(plan_of(world), [200, 0, 131][:world])
    results = []
    for change in [
        {"schedule": 0},
        {"schedule": 0, "wave_blocks": 40, "h_ring_blocks": 40, "cluster_size": 1},
        {"schedule": 1},
        {"schedule": 1, "mix": 0, "lead_blocks": 9, "h_ring_blocks": 20, "x_ring_blocks": 9},
        {"schedule": 1, "block_m": 128, "block_n": 128, "num_sms": 132},
        {"schedule": 1, "block_m": 16, "block_n": 32, "group_blocks": 1, "num_sms": 1,
         "cluster_size": 1},
        {"schedule": 0, "store": 0, "slice_rows": 9},
    ]:  # fmt: skip
        layers.append(layer := Layer.make(plan_of(world, **change)))
        results.append(layer(*tokens))
        results.append(layer(*tokens))  # the other bank
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@st.composite
def problems(draw: st.DrawFn) -> tuple[MegaMoePlan, list[int], int]:
    world = draw(st.sampled_from((1, 2, 3, 4, 8)))
    group, lead, wave = draw(st.integers(1, 4)), draw(st.integers(0, 6)), draw(st.integers(1, 9))
    schedule = draw(st.sampled_from((0, 1)))
    cluster = draw(st.sampled_from((1, 2)))
    plan = MegaMoePlan(
        world=world,
        num_experts=world * draw(st.integers(1, 6)),
        topk=1,
        hidden=64 * draw(st.integers(1, 3)),
        intermediate=64 * draw(st.integers(1, 2)),
        max_tokens=200,
        block_m=draw(st.sampled_from((16, 64, 128))),
        block_n=draw(st.sampled_from((64, 256))),
        cluster_size=cluster,
        num_sms=cluster * draw(st.integers(1, 9)),
        schedule=schedule,
        group_blocks=group,
        lead_blocks=lead,
        wave_blocks=wave,
        mix=draw(st.sampled_from((0, 1))),
        x_ring_blocks=group,
        h_ring_blocks=wave if schedule == 0 else lead + 2 * group,
        weight_layout=draw(st.sampled_from((0, 1, 2))),
        dispatch=draw(st.sampled_from((0, 1))),
    )
    plan = dataclasses.replace(plan, token_sets=draw(st.integers(1, plan.experts_per_rank)))
    plan = dataclasses.replace(plan, topk=draw(st.integers(1, min(4, plan.num_experts))))
    counts = draw(st.lists(st.integers(0, 140), min_size=world, max_size=world))
    return plan, counts, draw(st.integers(0, 1 << 30))


@given(problems())
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_problem(problem: tuple[MegaMoePlan, list[int], int]) -> None:
    plan, counts, seed = problem
    layer = Layer.make(plan, seed)
    with layer.workspace:
        layer.check(*batch(plan, counts, seed))
        layer.check(*batch(plan, counts[::-1], seed + 1))


# --- routing ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", COUNTS)
@pytest.mark.parametrize("block_m", [64, 128])
def test_every_count_per_expert(layers: list[Layer], rows: int, block_m: int) -> None:
    """One expert gets exactly so many rows, its neighbours none or one."""
    plan = plan_of(2, topk=1, block_m=block_m)
    layers.append(layer := Layer.make(plan))
    x, ids, scores = batch(plan, [rows // 2 + 1, rows - rows // 2])
    for rank in range(2):
        ids[rank].fill_(5)
    ids[0][0] = 2  # one row for another expert
    scores = [score + 0.5 for score in scores]
    ys = layer.check(x, ids, scores)
    assert all(bool((y.float().abs().sum(1) > 0).all()) for y in ys)  # no row was left out


@pytest.mark.parametrize("to", ["one expert", "one rank", "nobody", "one token", "a twice"])
def test_adversarial_routing(layers: list[Layer], to: str) -> None:
    plan = plan_of(3)
    layers.append(layer := Layer.make(plan))
    x, ids, scores = batch(plan, [300, 1, 90])
    for rank in range(3):
        if to == "one expert":
            ids[rank] = torch.full_like(ids[rank], -1)
            ids[rank][:, 0] = 7
        elif to == "one rank":
            ids[rank] = ids[rank] % 4 + 8
        elif to == "nobody":
            ids[rank] = torch.full_like(ids[rank], -1)
        elif to == "one token":
            ids[rank] = torch.full_like(ids[rank], -1)
            ids[rank][0, 1] = 11 if rank == 1 else -1
        else:  # the same expert in both slots of a token
            ids[rank][:, 1] = ids[rank][:, 0]
    ys = layer.check(x, ids, scores)
    if to == "nobody":
        assert all(torch.equal(y, torch.zeros_like(y)) for y in ys)


@pytest.mark.parametrize("counts", [[0, 128], [0, 0], [128, 0], [300, 300]])
def test_empty_ranks(layers: list[Layer], counts: list[int]) -> None:
    layers.append(layer := Layer.make(plan_of(2)))
    for call in range(4):
        layer.check(*batch(layer.plan, counts if call % 2 == 0 else counts[::-1], call))


def test_skipped_slots_cost_nothing_and_hide_their_weights(layers: list[Layer]) -> None:
    plan = plan_of(2, topk=3)
    layers.append(layer := Layer.make(plan))
    x, ids, scores = batch(plan, [100, 64])
    skipped = [torch.rand(i.shape) < 0.3 for i in ids]
    skipped[0][5] = True  # a token without any expert
    skipped[1][:] = True  # a rank without any
    ids = [i.masked_fill(s, -1) for i, s in zip(ids, skipped, strict=True)]
    scores = [v.masked_fill(s, float("nan")) for v, s in zip(scores, skipped, strict=True)]
    ys = layer.check(x, ids, scores)
    assert torch.equal(ys[0][5], torch.zeros_like(ys[0][5]))
    assert torch.equal(ys[1], torch.zeros_like(ys[1]))
    assert all(bool(y.isfinite().all()) for y in ys)


@pytest.mark.parametrize("bad", [8, 9, 2**31 - 1, -2, -(2**31)])
def test_ids_out_of_range_are_masked_and_raised(layers: list[Layer], bad: int) -> None:
    plan = plan_of(2)
    layers.append(layer := Layer.make(plan))
    x, ids, scores = batch(plan, [10, 10])
    good = layer(x, [i.index_fill(0, torch.tensor([3]), -1) for i in ids], scores)
    ids = [i.index_fill(0, torch.tensor([3]), bad).int() for i in ids]
    words = layer.lease.virtual_words()
    ys = torch.ops.xstage.megamoe_virtual(
        x, ids, scores, layer.ranks(layer.w13), layer.ranks(layer.w2), plan.words(), words
    )
    assert all(torch.equal(a, b) for a, b in zip(ys, good, strict=True))
    with pytest.raises(RoutingError, match=f"got {bad}"):
        layer.workspace.check()


# --- pushed tokens ------------------------------------------------------------------------------


def untidy(plan: MegaMoePlan, counts: list[int], seed: int) -> tuple[list[torch.Tensor], ...]:
    """Tokens with choices that are skipped, and with two of the same expert."""
    x, ids, scores = batch(plan, counts, seed)
    generator = torch.Generator().manual_seed(seed)
    for own in ids:
        own[torch.rand(own.shape, generator=generator) < 0.2] = -1
        twice = torch.rand(len(own), generator=generator) < 0.2
        own[twice, -1] = own[twice, 0]
    return x, ids, scores


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_pushed_tokens_give_the_bits_of_pulled_ones(layers: list[Layer], world: int) -> None:
    """Call after call, so that places are used again, by other, more and fewer tokens."""
    pushes = [{"dispatch": 1, "token_sets": sets} for sets in (1, 2, 3, 4)]  # of 4 experts
    layers.extend(Layer.make(plan_of(world, topk=3, **change)) for change in ({}, *pushes))
    for call, most in enumerate((60, 3, 70, 0, 20, 1)):
        counts = [(most * (rank + 2)) % 71 if (rank + call) % 3 else most for rank in range(world)]
        tokens = untidy(layers[0].plan, counts, call)
        pulled = layers[0].check(*tokens)
        for layer in layers[1:]:
            if call % 2:  # what calls before have sent does not count
                for rank in range(world):
                    layer.lease.region(rank)[regions(layer.plan)["kTokens"]].fill_(0xFF)
            same = map(torch.equal, pulled, layer(*tokens))
            assert all(same), layer.plan


@pytest.mark.parametrize("token_sets", [1, 3, 4])
def test_a_token_comes_once_for_each_set_of_an_owners_experts(
    layers: list[Layer], token_sets: int
) -> None:
    """To its place, whatever else it chose; and nothing comes for a set that it did not choose."""
    plan = plan_of(3, topk=3, dispatch=1, token_sets=token_sets)
    layers.append(layer := Layer.make(plan))
    x, ids, scores = untidy(plan, [120, 7, 60], seed=5)
    places = [layer.lease.region(rank)[regions(plan)["kTokens"]] for rank in range(3)]
    for memory in places:
        memory.fill_(0xFF)
    layer(x, ids, scores)
    for memory, wanted in zip(places, pushed_tokens(plan, x, ids), strict=True):
        assert torch.equal(memory.view(torch.int16), wanted.flatten())


# --- numerics -----------------------------------------------------------------------------------


@pytest.mark.parametrize("clamp", [None, 0.5, 1e-3])
@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_clamp_and_scaling(layers: list[Layer], clamp: float | None, scale: float) -> None:
    layers.append(layer := Layer.make(plan_of(2)))
    options = {"routed_scaling_factor": scale} | ({} if clamp is None else {"clamp": clamp})
    layer.check(*batch(layer.plan, [60, 70]), **options)


@pytest.mark.parametrize("dispatch", [0, 1])
def test_memory_that_holds_nan_does_not_matter(layers: list[Layer], dispatch: int) -> None:
    plan = plan_of(2, dispatch=dispatch)
    tokens = batch(plan, [130, 77])
    layers.append(clean := Layer.make(plan))
    layers.append(dirty := Layer.make(plan))
    start = regions(plan)["kCounts"].start
    for rank in range(2):
        dirty.lease.region(rank)[start:].fill_(0xFF)  # as bf16: NaN
    for _ in range(3):
        for a, b in zip(clean(*tokens), dirty(*tokens), strict=True):
            assert torch.equal(a, b)


def test_nan_in_a_token_stays_in_its_row(layers: list[Layer]) -> None:
    layers.append(layer := Layer.make(plan_of(2)))
    x, ids, scores = batch(layer.plan, [130, 77])
    good = layer(x, ids, scores)
    x[0][17] = float("nan")
    bad = layer(x, ids, scores)
    assert bool(bad[0][17].isnan().all())
    bad[0][17] = good[0][17]
    assert all(torch.equal(a, b) for a, b in zip(good, bad, strict=True))


def test_no_worse_than_the_unfused_pipeline(layers: list[Layer]) -> None:
    """Error against fp32: at most that of the same layer in torch, plus rounding noise."""
    plan = plan_of(1, num_experts=8, topk=4, hidden=512, intermediate=256, block_n=256)
    layers.append(layer := Layer.make(plan))
    x, ids, scores = batch(plan, [256])
    exact = reference.moe_reference(x[0], ids[0], scores[0], layer.w13, layer.w2)
    unfused = reference.moe_unfused(x[0], ids[0], scores[0], layer.w13, layer.w2)
    ours = layer(x, ids, scores)[0]
    assert (ours - exact).norm() <= 1.02 * (unfused - exact).norm()
