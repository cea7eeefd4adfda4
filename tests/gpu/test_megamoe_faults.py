"""megamoe when a rank does not come: no old data, a diagnosis, and right bits afterwards."""

from __future__ import annotations

import time

import pytest
import torch

from tests.gpu.megamoe_small import PLANS
from tests.gpu.test_megamoe import Case, Session, Tensors, make, same_bits
from xstage_ext.errors import PeerError, PeerTimeout

CASE = Case((70, 33), 192, 128, 4, 2)


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


@pytest.mark.parametrize("fields", PLANS)
def test_a_rank_that_refuses_ends_the_wait_at_once(fields: dict[str, int]) -> None:
    tensors = make(CASE)
    with Session(CASE.plan(num_sms=2, **fields), timeout_ms=20_000) as session:
        session(tensors)
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
