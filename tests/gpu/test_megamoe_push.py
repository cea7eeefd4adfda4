"""megamoe's push on one GPU: the pull's bits, tokens sent once, places used again and again."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.test_megamoe import (
    CASES,
    DEVICE,
    Case,
    Session,
    Tensors,
    make,
    references,
    relative_error,
    same_bits,
)
from tests.virtual_moe import pushed_tokens

MORE = [
    Case((70, 0, 129), 2112, 64, 9, 3),  # rows longer than the 4 KiB that a warp moves at a time
    Case((40, 33), 8256, 64, 6, 2),  # and than the 16 KiB that it moves between announcements
    Case((50, 200, 7, 0, 128, 129, 64, 1), 64, 64, 32, 6),
    Case((150, 70), 128, 64, 140, 8),  # many choices, of many experts
]


def untidy(case: Case) -> Tensors:
    """Choices that are skipped, and two of one expert in a token."""
    tensors = make(case)
    for ids in tensors.topk_idx:
        twice = torch.rand(len(ids), device=DEVICE) < 0.2
        ids[twice, -1] = ids[twice, 0]
    return tensors


def shuffled(t: Tensors, counts: tuple[int, ...]) -> Tensors:
    """So many tokens of every rank, in another order: every place gets another one."""
    order = [torch.randperm(len(x), device=DEVICE)[:n] for x, n in zip(t.x, counts, strict=True)]
    x, ids, weights = (
        [one[picked] for one, picked in zip(many, order, strict=True)]
        for many in (t.x, t.topk_idx, t.topk_weights)
    )
    return Tensors(x, ids, weights, t.w13, t.w2)


@pytest.mark.parametrize("case", CASES + MORE, ids=lambda case: f"world{case.world}-h{case.hidden}")
def test_a_push_gives_the_bits_of_a_pull(case: Case) -> None:
    tensors = untidy(case)
    with Session(case.plan()) as session:
        wanted = session(tensors)
        session.workspace.check(synchronize=True)
    assert relative_error(wanted, references(tensors)) < 6e-3
    experts = case.experts // case.world
    for sets in sorted({1, 2, 3, experts} & set(range(1, experts + 1))):
        for fields in ({}, {"num_sms": 2}):
            with Session(case.plan(dispatch=1, token_sets=sets, **fields)) as session:
                for _ in range(3):
                    assert same_bits(session(tensors), wanted), (sets, fields)
                    session.spoil()
                session.workspace.check(synchronize=True)


@pytest.mark.parametrize("token_sets", [1, 3, 4])
def test_a_token_comes_once_for_each_set_of_an_owners_experts(token_sets: int) -> None:
    """To its place, which is told; and nothing comes for a set that it did not choose."""
    case = Case((120, 7, 60), 192, 128, 12, 3)
    tensors = untidy(case)
    plan = case.plan(dispatch=1, token_sets=token_sets)
    with Session(plan) as session:
        session(tensors)
        session.workspace.check(synchronize=True)
        for owner, wanted in enumerate(pushed_tokens(plan, tensors.x, tensors.topk_idx)):
            came = session.region("kTokens", owner).view(torch.int16)
            assert torch.equal(came, wanted.flatten())
            told = session.region("kTokenHere", owner).view(torch.int64)
            assert torch.equal(told, (wanted != -1).any(-1).flatten().long())


@pytest.mark.parametrize("token_sets", [1, 2])
@pytest.mark.parametrize("num_sms", [2, 32])
def test_a_place_never_gives_a_token_of_an_earlier_call(
    token_sets: int, num_sms: int, level: int
) -> None:
    """Large and small calls in turn, with other tokens; before every second, memory is spoiled."""
    case = Case((200, 120, 60, 3), 256, 192, 8, 4)
    tensors = untidy(case)
    push = case.plan(dispatch=1, token_sets=token_sets, num_sms=num_sms)
    with Session(case.plan()) as pulling, Session(push) as pushing:
        for call in range((30, 300, 1500)[level - 1]):
            counts = [n // (1, 50, 2, 999)[(call + r) % 4] for r, n in enumerate(case.tokens)]
            given = shuffled(tensors, tuple(counts))
            if call % 2:
                pushing.spoil()
            assert same_bits(pushing(given), pulling(given)), (call, counts)
        for session in (pulling, pushing):
            session.workspace.check(synchronize=True)


def test_graph_replays_with_other_tokens_and_routes() -> None:
    case = Case((120, 60), 256, 192, 8, 4)
    tensors = untidy(case)
    with Session(case.plan()) as pulling, Session(case.plan(dispatch=1)) as pushing:
        pushing(tensors)  # warm up
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = pushing(tensors)
        for _ in range(10):
            other = shuffled(tensors, case.tokens)
            for name in ("x", "topk_idx", "topk_weights"):
                for ours, theirs in zip(getattr(tensors, name), getattr(other, name), strict=True):
                    ours.copy_(theirs)
            graph.replay()
            pushing.workspace.check(synchronize=True)
            assert same_bits(results, pulling(other))
        pulling.workspace.check(synchronize=True)
