"""megamoe when a rank does not come: no old data, a diagnosis, and right bits afterwards."""

from __future__ import annotations

import time

import pytest
import torch

from tests.gpu.megamoe_small import PLANS
from tests.gpu.test_megamoe import SHORT_RING, Case, Session, Tensors, make, same_bits
from tests.gpu.test_megamoe_push import shuffled
from xstage_ext.errors import PeerError, PeerTimeout

CASE = Case((70, 33), 192, 128, 4, 2)
PUSHES = [fields for fields in PLANS if fields.get("dispatch") == 1]
LONG = Case((300, 260), 192, 128, 4, 2)  # several blocks of every expert
STAGED = Case((2500, 2500), 2112, 64, 4, 2)  # tokens that peers read in three segments


def call_of_rank_0(session: Session, t: Tensors) -> torch.Tensor:
    """The operator of rank 0 alone; nobody plays rank 1."""
    y: torch.Tensor = torch.ops.xstage.megamoe(
        t.x[0],
        t.topk_idx[0],
        t.topk_weights[0],
        t.w13.chunk(2)[0],
        t.w2.chunk(2)[0],
        session.plan.words(),
        session.lease.words(rank=0),
    )
    return y


def announce_rows_of_rank_1(session: Session) -> None:
    """What rank 1 tells rank 0 at the start of a second call like the first; no tokens follow."""
    signals = session.region("kDispatchSignals", 0).view(torch.int64)
    signals[1] += 1 << 24  # the epoch stands above a digest
    for name in ("kCounts", "kRoutes"):
        banks = session.region(name, 0).view(torch.int32).view(2, 2, -1)  # [bank][source]
        banks[0, 1] = banks[1, 1]


@pytest.mark.parametrize("fields", PLANS)
@pytest.mark.parametrize("num_sms", [2, 64])
def test_an_absent_rank_is_named_and_leaves_nan(fields: dict[str, int], num_sms: int) -> None:
    tensors = make(CASE)
    with Session(CASE.plan(num_sms=num_sms, **fields), timeout_ms=300) as session:
        first = session(tensors)
        session.workspace.check(synchronize=True)
        y = call_of_rank_0(session, tensors)
        torch.cuda.synchronize()
        assert bool(y.isnan().all()), "a call that gave up must not hand out old data"
        with pytest.raises(PeerTimeout, match="rank 0 of 2 waited 30.* for rank 1"):
            session.workspace.check()
        for _ in range(3):  # the next call resets first
            assert same_bits(session(tensors), first)
        session.workspace.check(synchronize=True)


@pytest.mark.parametrize(
    ("case", "fields"),
    [(CASE, fields) for fields in PUSHES]
    + [(LONG, {"dispatch": 1, **SHORT_RING}), (STAGED, {"dispatch": 0})],
)
@pytest.mark.parametrize("num_sms", [2, 64])
def test_a_rank_that_sends_no_tokens_is_named_and_leaves_nan(
    case: Case, fields: dict[str, int], num_sms: int
) -> None:
    """Its rows are announced, so tiles wait for them too, and warps for the slots that these tiles
    free; the wait for a token knows for whom."""
    tensors = make(case)
    with Session(case.plan(num_sms=num_sms, **fields), timeout_ms=300) as session:
        first = session(tensors)
        session.workspace.check(synchronize=True)
        announce_rows_of_rank_1(session)
        y = call_of_rank_0(session, tensors)
        torch.cuda.synchronize()
        assert bool(y.isnan().all()), "tokens of the first call must not pass for those of this one"
        # CTAs without a tile wait for the rank's end.
        where = "dispatch rows" if case == CASE else "(dispatch rows|combine arrival)"
        named = f"rank 0 of 2 waited 3.* for rank 1 in {where} .*: expected 2, saw 1"
        with pytest.raises(PeerTimeout, match=named):
            session.workspace.check()
        for _ in range(3):
            assert same_bits(session(tensors), first)
        session.workspace.check(synchronize=True)


@pytest.mark.parametrize("fields", PUSHES)
def test_tokens_from_before_a_reset_do_not_count(fields: dict[str, int]) -> None:
    """Calls are numbered anew, so places that kept the old numbers would pass for filled ones."""
    tensors = make(CASE)
    other = shuffled(tensors, CASE.tokens)
    with Session(CASE.plan(**fields), timeout_ms=300) as session:
        wanted = session(other)
        for _ in range(4):
            session(tensors)
        call_of_rank_0(session, tensors)
        torch.cuda.synchronize()
        with pytest.raises(PeerTimeout):
            session.workspace.check()
        assert all(bool(session.region("kTokenHere", rank).any()) for rank in range(2))
        session.workspace.reset()
        assert not any(bool(session.region("kTokenHere", rank).any()) for rank in range(2))
        session.spoil()
        for _ in range(4):
            assert same_bits(session(other), wanted)
        session.workspace.check(synchronize=True)


@pytest.mark.parametrize(
    ("fields", "announced"), [(f, False) for f in PLANS] + [(f, True) for f in PUSHES]
)
def test_a_rank_that_refuses_ends_the_wait_at_once(fields: dict[str, int], announced: bool) -> None:
    tensors = make(CASE)
    with Session(CASE.plan(num_sms=2, **fields), timeout_ms=20_000) as session:
        session(tensors)
        if announced:
            announce_rows_of_rank_1(session)
        side = torch.cuda.Stream()  # making a stream may wait for running kernels
        torch.cuda.synchronize()
        started = time.monotonic()
        y = call_of_rank_0(session, tensors)
        with torch.cuda.stream(side):
            words = session.lease.words(rank=1)
            torch.ops.xstage.workspace_announce(session.lease.region(1), 1, words)
        torch.cuda.synchronize()
        assert time.monotonic() - started < 5
        assert bool(y.isnan().all())
        with pytest.raises(PeerError, match="rank 1 refused a call on its host"):
            session.workspace.check()
