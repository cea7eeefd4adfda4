"""The burst operators between GPUs.

    torchrun --nproc-per-node 2 -m pytest tests/dist/test_burst.py

Every rank runs the same tests.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist

from xstage_ext import SymmetricWorkspace, _measure, validate
from xstage_ext._session import CONTROL_BYTES, Session, open_session
from xstage_ext.burst import BurstBench, Point, burst_plan
from xstage_ext.errors import XStageError


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mine = not dist.is_initialized()
    if mine:
        dist.init_process_group("gloo")
    with open_session() as opened:
        opened.bench.calibrate_clock()
        _measure.wake_link(opened.bench)
        opened.barrier()
        yield opened
    if mine:
        dist.barrier()
        dist.destroy_process_group()


@contextlib.contextmanager
def meeting(session: Session) -> Iterator[None]:
    """All ranks meet behind the block, also when it fails on one of them."""
    try:
        yield
    finally:
        session.barrier()


@pytest.mark.parametrize("mechanism", ["st", "bulk", "tma"])
@pytest.mark.parametrize("nbytes", [2048, 24576, 65536])
def test_bytes_reach_the_peer_in_both_directions(
    session: Session, mechanism: str, nbytes: int
) -> None:
    point = Point(mechanism, 64, nbytes, bursts=2, slots=2, seed=5 + session.rank, join=True)
    session.landing(session.rank, (session.rank - 1) % session.world).zero_()
    session.barrier()
    session.bench.run(point)
    session.barrier()
    source = (session.rank - 1) % session.world
    plan = burst_plan(point, source, session.world, 1980.0)
    landed = session.landing(session.rank, source)[: plan.producers * plan.producer_stride]
    words = landed.view(torch.int32).view(plan.producers, 2, nbytes // 16, 4).cpu()
    position = torch.arange(nbytes // 16, dtype=torch.int32) % 4096
    assert torch.all(words[..., 0] == 5 + source)
    assert torch.all(words[..., 1] == torch.arange(plan.producers)[:, None, None])
    assert torch.all(words[..., 2] == position)
    session.barrier()


def test_several_destinations_get_their_producers(session: Session) -> None:
    """Producers alternate between the ranks of the mask, also this rank itself."""
    everyone = tuple(range(session.world))
    for source in range(session.world):
        session.landing(session.rank, source).zero_()
    session.barrier()
    point = Point("bulk", 32, 4096, bursts=1, slots=1, destinations=everyone, seed=9)
    session.bench.run(point)
    session.barrier()
    for source in range(session.world):
        words = session.landing(session.rank, source)[: 32 * 4096].view(torch.int32)
        written = (words.view(32, -1)[:, 0] == 9).cpu()
        mine = torch.arange(32) % session.world == session.rank
        assert torch.equal(written, mine)
    session.barrier()


def test_rate_is_steady_and_skew_of_the_host_does_not_count(session: Session) -> None:
    """Five runs agree within 5%; a rank whose host is 1 ms late changes nothing."""
    point = Point("bulk", session.bench.num_sms, 65536)
    rates = [_measure.train_everywhere(session, point)["R_GBps"] for _ in range(5)]
    assert np.std(rates) / np.mean(rates) < 0.05
    late = _measure.window_for(dataclasses.replace(point, join=True))
    session.bench.run(dataclasses.replace(late, join=False, window_us=50.0))
    session.barrier()
    if not session.leads:
        time.sleep(0.001)
    skewed = _measure.train_row(session.bench.run(late), "both")["R_GBps"]
    session.barrier()
    assert skewed == pytest.approx(float(np.mean(rates)), rel=0.05)


def test_the_law_holds_on_one_train(session: Session) -> None:
    """T = V/R - G within 5%, with R from the same link; parameters are not from a file."""
    with meeting(session):
        if session.leads:
            point = Point("bulk", session.bench.num_sms, 49152)
            spaced = dataclasses.replace(point, gap_us=7.0)
            gap = validate.BenchGap(*_measure.gap_overhead(session.bench)).mean(7.0)
            # In turns: now and then a train runs 5% slower than those around it.
            rates, seen = zip(
                *(
                    (
                        _measure.train(session.bench, point)["R_GBps"],
                        _measure.train(session.bench, spaced)["mean"],
                    )
                    for _ in range(9)
                ),
                strict=True,
            )
            expected = point.volume / float(np.median(rates)) / 1e3 - gap
            assert np.median(seen) == pytest.approx(expected, rel=0.05)


def test_copies_of_a_peer_are_visible_only_behind_a_fence(session: Session) -> None:
    """wait_group 0 alone returns like wait_group.read; the fence behind it waits for the link."""
    with meeting(session):
        if session.leads:
            point = Point("bulk", session.bench.num_sms, 65536, fence=True)
            row = _measure.isolated(session.bench, point)
            drain = point.volume / 400e3
            assert row["visible_slowest"] > drain > 0.9 * row["mean"]


def test_a_missing_rank_ends_the_wait(session: Session) -> None:
    """One rank starts a joint run alone: it gives up at its deadline and says so."""
    nbytes = 8 << 20
    with SymmetricWorkspace(nbytes=nbytes, timeout_ms=500) as workspace:
        lease = workspace.channel("lonely", nbytes, counter_bytes=CONTROL_BYTES)
        bench = BurstBench(lease.words, workspace.rank, workspace.world, session.device)
        with meeting(session):
            if workspace.rank == 0:
                begin = time.monotonic()
                with pytest.raises((RuntimeError, XStageError)):
                    bench.run(Point("st", 8, 1024, bursts=2, join=True))
                    workspace.check(synchronize=True)
                assert time.monotonic() - begin < 10.0
