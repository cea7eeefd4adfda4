"""megamoe between GPUs: `torchrun --nproc-per-node 2 -m pytest tests/dist/test_megamoe.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch

from tests.dist.world import gpu_world
from xstage_ext import MegaMoE
from xstage_ext._megamoe_setup import given_fields
from xstage_ext.reference import moe_reference, moe_unfused
from xstage_ext.testing import make_routing

HIDDEN, INNER, TOPK = 512, 320, 4


@pytest.fixture(scope="module")
def ranks() -> Iterator[tuple[int, int]]:
    """(rank, world) of an NCCL WORLD, one GPU per rank."""
    with gpu_world("nccl", bind=True) as facts:
        yield facts


class Problem:
    """Tensors of one rank, drawn alike on all ranks."""

    def __init__(self, rank: int, world: int, tokens: list[int], experts: int) -> None:
        generator = torch.Generator("cuda").manual_seed(5)
        most = max(tokens)

        def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
            values = torch.randn(*shape, generator=generator, device="cuda") * scale
            return values.bfloat16()

        routing = make_routing(world, most, experts, TOPK, law="zipf", seed=3)
        x = normal(world, most, HIDDEN)
        self.all_w13 = normal(experts, 2 * INNER, HIDDEN, scale=HIDDEN**-0.5)
        self.all_w2 = normal(experts, HIDDEN, INNER, scale=INNER**-0.5)
        mine = slice(0, tokens[rank])
        self.x = x[rank, mine].contiguous()
        self.ids = torch.from_numpy(routing.topk_idx[rank, mine]).cuda()
        self.weights = torch.from_numpy(routing.topk_weights[rank, mine]).cuda()
        local = slice(rank * experts // world, (rank + 1) * experts // world)
        self.w13, self.w2 = self.all_w13[local].contiguous(), self.all_w2[local].contiguous()
        self.experts, self.most = experts, most

    def layer(self, token_sets: int = 1, **plan: int) -> MegaMoE:
        """A prepared layer with these weights."""
        layer = MegaMoE(
            num_experts=self.experts,
            topk=TOPK,
            hidden=HIDDEN,
            intermediate=INNER,
            max_tokens=self.most,
            impl="native",
            plan=plan,
        )
        # No argument of the layer: more than one set only stands for the owners of more ranks.
        layer.problem = dataclasses.replace(layer.problem, token_sets=token_sets)
        layer._choose(given_fields(plan, layer.device))
        layer.w13.data.copy_(self.w13)
        layer.w2.data.copy_(self.w2)
        layer.prepare()
        return layer

    def reference(self) -> torch.Tensor:
        """fp32, all experts at hand."""
        return moe_reference(self.x, self.ids, self.weights, self.all_w13, self.all_w2)


def error(result: torch.Tensor, wanted: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of the reference."""
    return float(
        (result.double() - wanted.double()).norm() / wanted.double().norm().clamp_min(1e-9)
    )


PLANS = [
    {"schedule": schedule, "store": store, "slice_rows": 1, "dispatch": dispatch}
    for schedule in (0, 1)
    for store in (0, 1, 2)
    for dispatch in (0, 1)
] + [
    {"schedule": 0, "store": 2, "dispatch": 1, "num_sms": 4},
    {"schedule": 1, "store": 0, "dispatch": 1, "token_sets": 3},
]


@pytest.mark.parametrize("uneven", [False, True])
def test_every_plan_gives_the_same_right_bits(ranks: tuple[int, int], uneven: bool) -> None:
    rank, world = ranks
    tokens = [300 * (r % 2) + 1 if uneven else 257 for r in range(world)]
    problem = Problem(rank, world, tokens, 8 * world)
    wanted = problem.reference()
    first: torch.Tensor | None = None
    for plan in PLANS:
        layer = problem.layer(**plan)
        for _ in range(3):
            result = layer(problem.x, problem.ids, problem.weights).clone()
            layer.check(synchronize=True)
            first = result if first is None else first
            assert torch.equal(first, result), plan
        layer.close()
    assert first is not None
    assert error(first, wanted) < 6e-3
    unfused = moe_unfused(problem.x, problem.ids, problem.weights, problem.w13, problem.w2)
    assert error(first, wanted) <= 1.01 * error(unfused, wanted)


@pytest.mark.parametrize("dispatch", [0, 1])
def test_many_calls_beside_a_busy_link(ranks: tuple[int, int], level: int, dispatch: int) -> None:
    """Bitwise equal while a copy engine loads the link and ranks take turns in being late."""
    rank, world = ranks
    problem = Problem(rank, world, [200] * world, 4 * world)
    layer = problem.layer(dispatch=dispatch)
    first = layer(problem.x, problem.ids, problem.weights).clone()
    source = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    # One process sees its peer's device only where the launcher shows it.
    other = (torch.cuda.current_device() + 1) % torch.cuda.device_count()
    target = torch.empty_like(source, device=f"cuda:{other}")
    side = torch.cuda.Stream()
    for call in range((200, 1000, 5000)[level - 1]):
        if call % 20 == 0:
            with torch.cuda.stream(side):
                target.copy_(source, non_blocking=True)
        if call % 7 == rank:
            torch.cuda._sleep(200_000)
        result = layer(problem.x, problem.ids, problem.weights)
        if call % 50 == 0:
            assert torch.equal(first, result)
    layer.check(synchronize=True)
    assert torch.equal(first, result)
    layer.close()


@pytest.mark.parametrize("token_sets", [1, 3])
def test_a_place_never_gives_a_token_of_an_earlier_call(
    ranks: tuple[int, int], level: int, token_sets: int
) -> None:
    """Other tokens in every call, many and few in turn, while ranks take turns in being late."""
    rank, world = ranks
    problem = Problem(rank, world, [257] * world, 4 * world)
    pulling, pushing = problem.layer(dispatch=0), problem.layer(token_sets, dispatch=1)
    for call in range((60, 600, 3000)[level - 1]):
        # Each rank draws its own: nobody else needs to know them.
        order = torch.randperm(257, device="cuda")[: (257, 3, 100, 0, 64)[(call + rank) % 5]]
        tokens = problem.x[order], problem.ids[order], problem.weights[order]
        wanted = pulling(*tokens)
        if call % 3 == rank % 3:
            torch.cuda._sleep(200_000)
        assert torch.equal(pushing(*tokens), wanted), call
    for layer in (pulling, pushing):
        layer.check(synchronize=True)
        layer.close()


@pytest.mark.parametrize("dispatch", [0, 1])
def test_graph_replay(ranks: tuple[int, int], dispatch: int) -> None:
    """With other tokens every time."""
    rank, world = ranks
    problem = Problem(rank, world, [100 + r for r in range(world)], 4 * world)
    layer = problem.layer(dispatch=dispatch)
    inputs = [problem.x, problem.x.flip(0), problem.x.roll(1, 1)]
    eager = [layer(x, problem.ids, problem.weights).clone() for x in inputs]
    x = problem.x.clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = layer(x, problem.ids, problem.weights)
    for call in range(21):
        x.copy_(inputs[call % 3])
        result.zero_()
        graph.replay()
        if call % 5 == 0:
            assert torch.equal(eager[call % 3], result), call
    layer.check(synchronize=True)
    assert torch.equal(eager[2], result)
    layer.close()
