"""What the processes of `launch` do with a mixture-of-experts layer."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from xstage_ext import MegaMoE, SymmetricWorkspace, reference
from xstage_ext.errors import PeerError
from xstage_ext.planner.megamoe import MegaMoePlan
from xstage_ext.workspace import region_bytes

from .scenarios import Place, report, reported

SHAPE = {"num_experts": 12, "topk": 3, "hidden": 192, "intermediate": 128, "max_tokens": 150}
ROUNDED = {"rtol": 2e-2, "atol": 2e-2}


def grouped(body: Callable[..., None]) -> Callable[..., None]:
    """Inside a gloo group that is left in good order, whatever happens."""

    @functools.wraps(body)
    def inside(place: Place, **arguments: Any) -> None:
        place.join("gloo")
        try:
            body(place, **arguments)
        finally:
            dist.destroy_process_group()

    return inside


def weights() -> tuple[torch.Tensor, torch.Tensor]:
    """w13 and w2 of all experts, the same in every process."""
    generator = torch.Generator().manual_seed(7)
    experts, hidden, inter = SHAPE["num_experts"], SHAPE["hidden"], SHAPE["intermediate"]
    w13 = torch.randn(experts, 2 * inter, hidden, generator=generator) / hidden**0.5
    w2 = torch.randn(experts, hidden, inter, generator=generator) / inter**0.5
    return w13.bfloat16(), w2.bfloat16()


def tokens(rank: int, call: int, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, topk_idx with some -1, topk_weights with NaN where the id is -1."""
    generator = torch.Generator().manual_seed(1000 * call + rank)
    x = torch.randn(count, SHAPE["hidden"], generator=generator).bfloat16()
    scores, ids = torch.rand(count, SHAPE["num_experts"], generator=generator).topk(SHAPE["topk"])
    skipped = torch.rand(ids.shape, generator=generator) < 0.2
    return x, ids.masked_fill(skipped, -1), scores.masked_fill(skipped, float("nan"))


def layer(place: Place, **options: Any) -> MegaMoE:
    """This rank's part of the layer, weights loaded, not prepared."""
    moe = MegaMoE(**SHAPE, device=place.device, **options)
    local = moe.problem.experts_per_rank
    rank = dist.get_rank(moe.group)
    mine = slice(rank * local, (rank + 1) * local)
    w13, w2 = weights()
    moe.w13.data.copy_(w13[mine])
    moe.w2.data.copy_(w2[mine])
    return moe


def assert_right(moe: MegaMoE, x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor) -> None:
    y = moe(x, ids, scores)
    expected = reference.moe_reference(x, ids, scores, *weights(), rounded=True)
    torch.testing.assert_close(y.float(), expected, **ROUNDED)


@grouped
def calls(place: Place, counts: list[int], impl: str, plan: dict[str, int]) -> None:
    """Several calls with other token counts on every rank, against the reference."""
    moe = layer(place, impl=impl, count_load=True, plan=plan)
    moe.prepare()
    received = 0
    for call, count in enumerate(counts):
        # Ranks bring other numbers of tokens; the first and last call of some rank are empty.
        own = (count + 37 * place.rank) % (SHAPE["max_tokens"] + 1)
        assert_right(moe, *tokens(place.rank, call, own))
        for rank in range(place.world):
            theirs = (count + 37 * rank) % (SHAPE["max_tokens"] + 1)
            ids = tokens(rank, call, theirs)[1]
            local = SHAPE["num_experts"] // place.world
            received += int(((ids >= 0) & (ids // local == place.rank)).sum())
    assert moe.expert_load is not None
    assert int(moe.expert_load.sum()) == received
    report(impl=moe.impl, reason=moe.fallback_reason, bytes=moe.bytes())
    moe.close()


@grouped
def both_impls(place: Place) -> None:
    """Native and fallback results lie within rounding of each other."""
    native, fallback = layer(place, impl="native"), layer(place, impl="fallback")
    x, ids, scores = tokens(place.rank, 0, 100)
    torch.testing.assert_close(native(x, ids, scores), fallback(x, ids, scores), **ROUNDED)
    report(reason=fallback.fallback_reason)


@grouped
def one_rank_falls_back(place: Place) -> None:
    """XSTAGE_IMPL=fallback on rank 1 only: all ranks fall back, and say who wanted it."""
    if place.rank == 1:
        os.environ["XSTAGE_IMPL"] = "fallback"
    moe = layer(place)
    moe.prepare()
    assert_right(moe, *tokens(place.rank, 0, 20))
    report(impl=moe.impl, reason=moe.fallback_reason)


@grouped
def too_many_tokens(place: Place, impl: str) -> None:
    """Rank 0 brings one token too many: both raise, none hangs, the next call is right."""
    moe = layer(place, impl=impl)
    moe.prepare()
    count = SHAPE["max_tokens"]
    assert_right(moe, *tokens(place.rank, 0, count))
    x, ids, scores = tokens(place.rank, 1, count + (1 if place.rank == 0 else 0))
    try:
        moe(x, ids, scores)
        report(error=None)
    except PeerError as error:
        report(error="PeerError", text=str(error))
    except RuntimeError as error:
        report(error="RuntimeError", text=str(error))
    assert_right(moe, *tokens(place.rank, 2, count))
    report(recovered=True)


@grouped
def refused(place: Place, impl: str) -> None:
    """Rank 0 is given what no layer takes, twice; rank 1 hears of it, and later calls are right."""
    moe = layer(place, impl=impl)
    moe.prepare()
    x, ids, scores = tokens(place.rank, 0, 40)
    heard = []
    for wrong in ((x.float(), ids, scores), (x, ids, scores, 41)):
        started = time.monotonic()
        try:
            moe(*(wrong if place.rank == 0 else (x, ids, scores)))
        except (PeerError, TypeError, ValueError) as error:
            heard.append(f"{type(error).__name__}: {error}")
        assert time.monotonic() - started < 5
    assert_right(moe, x, ids, scores)
    report(heard=heard)


@grouped
def bad_table(place: Place) -> None:
    """Rank 1 is told to read a table of plans that is not there."""
    if place.rank == 1:
        os.environ["XSTAGE_PLANS"] = "/nowhere.json"
    moe = layer(place)
    reported(moe.prepare)


@grouped
def dead_peer(place: Place) -> None:
    """Rank 1 dies inside a call of rank 0."""
    moe = layer(place)
    with SymmetricWorkspace(None, moe.bytes() + 4096, device="cpu", timeout_ms=1500) as workspace:
        moe.prepare(workspace)
        if place.rank == 1:
            os.kill(os.getpid(), 9)
        reported(lambda: moe(*tokens(0, 0, 10)))


@grouped
def disagree(place: Place, **by_field: list[Any]) -> None:
    """Ranks make the layer with other arguments; prepare names the field."""
    options = {name: values[place.rank] for name, values in by_field.items()}
    shape = {**SHAPE, **{k: v for k, v in options.items() if k in SHAPE}}
    rest = {k: v for k, v in options.items() if k not in SHAPE}
    moe = MegaMoE(**shape, device="cpu", **rest)
    workspace = SymmetricWorkspace(None, 1 << 26, device="cpu")
    reported(lambda: moe.prepare(workspace))


@grouped
def shared_layers(place: Place, count: int) -> None:
    """Many layers of one plan share one lease: the memory of one."""
    first = layer(place)
    first.prepare()
    others = [layer(place, name=f"layer {i}") for i in range(1, count)]
    for other in others:
        other.prepare(share=first)
    for call, moe in enumerate([first, *others, first]):
        assert_right(moe, *tokens(place.rank, call, 40))
    plan = first.plan
    assert isinstance(plan, MegaMoePlan)
    assert first._lease is not None
    report(bytes=first._lease.workspace.nbytes, one=plan.bytes())


@grouped
def two_channels(place: Place) -> None:
    """Two layers of different plans in one workspace, called in turns."""
    one, two = layer(place), layer(place, name="two", plan={"schedule": 1, "num_sms": 6})
    nbytes = region_bytes([one.bytes(), two.bytes()])
    with SymmetricWorkspace(None, nbytes, device=place.device) as workspace:
        one.prepare(workspace)
        two.prepare(workspace)
        for call in range(4):
            given = tokens(place.rank, call, 90)
            assert torch.equal(one(*given), two(*given))
            assert_right(one, *given)
        one.close()
        two.close()


@grouped
def subgroups(place: Place, groups: list[list[int]]) -> None:
    """Groups of ranks side by side, each with a layer of its own; then the whole world."""
    made = [dist.new_group(ranks, backend="gloo") for ranks in groups]
    for ranks, group in zip(groups, made, strict=True):
        if place.rank in ranks:
            moe = layer(place, group=group)
            for call in range(3):
                assert_right(moe, *tokens(place.rank, call, 50 + place.rank))
            moe.close()
    dist.barrier()
    assert_right(layer(place), *tokens(place.rank, 9, 70))


@grouped
def other_order(place: Place, shared: bool) -> None:
    """Two layers of one name and plan, called in another order by rank 1."""
    first, second = layer(place), layer(place)
    nbytes = region_bytes([first.bytes(), second.bytes()])
    with SymmetricWorkspace(None, nbytes, device=place.device, timeout_ms=1500) as workspace:
        first.prepare(workspace)
        second.prepare(*(() if shared else (workspace,)), share=first if shared else None)
        order = [first, second] if place.rank == 0 else [second, first]
        given = tokens(place.rank, 0, 20)
        reported(lambda: [moe(*given) for moe in order])
