"""The burst operators on one GPU: bytes, stamps, refusals, shadow, main loop, and their SASS."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.gpu import sanitizer
from xstage_ext import SymmetricWorkspace, _env
from xstage_ext._session import CONTROL_BYTES
from xstage_ext.burst import BurstBench, BurstLoopPlan, BurstPlan, Point, burst_plan
from xstage_ext.planner import wire
from xstage_ext.workspace import region_bytes

REGION = 192 << 20


@dataclasses.dataclass(frozen=True)
class Alone:
    """A bench in a world of one: everything lands in this rank's own memory."""

    bench: BurstBench
    landing: torch.Tensor
    words: list[int]


@dataclasses.dataclass(frozen=True)
class Virtual:
    """A bench that plays one rank of a virtual world, and where every rank's bytes land.

    `landing[r]` holds one area of `area` bytes per source rank.
    """

    bench: BurstBench
    landing: list[torch.Tensor]
    area: int


@pytest.fixture(scope="module")
def alone() -> Iterator[Alone]:
    with SymmetricWorkspace(nbytes=REGION, device="cuda", timeout_ms=5_000) as workspace:
        lease = workspace.channel("burst", REGION, counter_bytes=CONTROL_BYTES)
        bench = BurstBench(lease.words, 0, 1, torch.device("cuda"))
        bench.calibrate_clock()
        yield Alone(bench, lease.region()[CONTROL_BYTES:], lease.words())


def expected_bytes(
    plan: BurstPlan, slots_used: int, producers: Iterable[int]
) -> tuple[np.ndarray, np.ndarray]:
    """(word index of every 16-byte piece, its four words) in the landing area."""
    rows, pieces = plan.bytes // plan.chunk_bytes, plan.chunk_bytes // 16
    k, s, r, p = np.ix_(
        np.array(list(producers), np.int64),
        np.arange(slots_used),
        np.arange(rows),
        np.arange(pieces),
    )
    at = (k * plan.producer_stride + s * plan.slot_stride + r * plan.row_stride + p * 16).astype(
        np.int64
    )
    position = np.broadcast_to((r * pieces + p) % 4096, at.shape)
    words = np.stack(
        [
            np.full(at.shape, plan.seed),
            np.broadcast_to(k, at.shape),
            position,
            position ^ 0x5BD1E995,
        ],
        axis=-1,
    )
    return at // 4, words


@pytest.mark.parametrize("mechanism", ["st", "bulk", "tma"])
@pytest.mark.parametrize(
    ("nbytes", "row"), [(1024, None), (8192, None), (24576, None), (98304, None), (32768, 512)]
)
def test_every_byte_lands_and_no_other(
    alone: Alone, mechanism: str, nbytes: int, row: int | None
) -> None:
    stride = None if row is None else 2048
    point = Point(
        mechanism, 16, nbytes, bursts=3, slots=2, seed=77, row_bytes=row, row_stride=stride
    )
    alone.landing.zero_()
    alone.bench.run(point)
    plan = burst_plan(point, 0, 1, 1980.0)
    at, words = expected_bytes(plan, 2, range(plan.producers))
    reach = plan.producers * plan.producer_stride
    seen = alone.landing[:reach].view(torch.int32).cpu().numpy()
    for i in range(4):
        assert np.array_equal(seen[at + i], words[..., i].astype(np.int32))
    inside = np.zeros(len(seen), bool)
    inside[(at[..., None] + np.arange(4)).ravel()] = True
    assert not seen[~inside].any()
    assert int(torch.count_nonzero(alone.landing[reach:])) == 0


@contextlib.contextmanager
def virtual_rank(
    rank: int, world: int, area: int = 256 << 10, timeout_ms: int = 5_000
) -> Iterator[Virtual]:
    """A bench that plays one rank of a virtual world; `area` bytes land from each source."""
    nbytes = CONTROL_BYTES + world * area
    with SymmetricWorkspace(
        nbytes=region_bytes([nbytes]),
        device="cuda",
        backend="virtual",
        world=world,
        timeout_ms=timeout_ms,
    ) as workspace:
        lease = workspace.channel("burst", nbytes, counter_bytes=CONTROL_BYTES)
        bench = BurstBench(lambda: lease.words(rank=rank), rank, world, torch.device("cuda"))
        yield Virtual(bench, [lease.region(r)[CONTROL_BYTES:] for r in range(world)], area)


def landed_right(virtual: Virtual, point: Point) -> bool:
    """Whether every rank holds what its producers sent in this rank's area, and nothing else.

    Clears the areas for the next point.
    """
    bench = virtual.bench
    plan = burst_plan(point, bench.rank, bench.world, 1980.0)
    ranks = [r for r in range(bench.world) if plan.destinations >> r & 1]
    right = True
    for r, landing in enumerate(virtual.landing):
        wanted = np.zeros(landing.numel() // 4, np.int32)
        if r in ranks:
            mine = range(ranks.index(r), plan.producers, len(ranks))
            at, words = expected_bytes(plan, min(point.bursts, point.slots), mine)
            for i in range(4):
                wanted[bench.rank * virtual.area // 4 + at + i] = words[..., i].astype(np.int32)
        right &= np.array_equal(landing.view(torch.int32).cpu().numpy(), wanted)
        landing.zero_()
    return right


@pytest.mark.parametrize("mechanism", ["st", "bulk", "tma"])
@pytest.mark.parametrize(
    ("world", "rank", "destinations"),
    [(2, 0, None), (3, 1, (0, 2)), (4, 3, (0, 1, 3)), (8, 5, tuple(range(8))), (8, 7, None)],
)
def test_producers_alternate_between_the_destinations_of_a_virtual_world(
    mechanism: str, world: int, rank: int, destinations: tuple[int, ...] | None
) -> None:
    with virtual_rank(rank, world) as virtual:
        point = Point(mechanism, 19, 4096, bursts=3, destinations=destinations, seed=3 + rank)
        trace = virtual.bench.run(point)
        assert np.all(trace.bursts == 3)
        assert landed_right(virtual, point)


@pytest.mark.parametrize("mechanism", ["st", "bulk", "tma", "pull"])
@pytest.mark.parametrize("fence", [False, True])
@pytest.mark.parametrize("late_wait", [False, True])
def test_stamps_are_in_order(alone: Alone, mechanism: str, fence: bool, late_wait: bool) -> None:
    point = Point(
        mechanism, 32, 16384, gap_us=3.0, bursts=40, fence=fence, late_wait=late_wait, local=True
    )
    trace = alone.bench.run(point)
    assert np.all(trace.bursts == 40)
    assert np.all(trace.begin < trace.issued)
    assert np.all(trace.issued <= trace.free)
    assert np.all(trace.free <= trace.done)
    gaps = trace.begin[:, 1:] - trace.done[:, :-1]
    assert gaps.min() > 2.99
    assert np.median(gaps) < 3.6
    assert len(set(trace.sm.tolist())) == 32, "one block per SM"


def test_a_fence_takes_longer_than_the_issue(alone: Alone) -> None:
    for mechanism in ("st", "bulk", "tma"):
        trace = alone.bench.run(Point(mechanism, 8, 4096, gap_us=5.0, bursts=40, fence=True))
        assert np.median(trace.t_done - trace.t_iss) > 0.2


def test_timetable_holds_and_starts_together(alone: Alone) -> None:
    point = Point("st", 64, 2048, gap_us=10.0, bursts=50, sync="timetable")
    # The first run wakes the GPU: while its clock rises, starts read from SM clocks drift apart.
    alone.bench.run(point)
    trace = alone.bench.run(point)
    assert np.diff(trace.begin, axis=1) == pytest.approx(10.0, abs=0.1)
    assert np.ptp(trace.begin, axis=0).max() < 1.0


def test_barrier_keeps_producers_in_step(alone: Alone) -> None:
    trace = alone.bench.run(Point("bulk", 64, 8192, gap_us=4.0, bursts=50, sync="barrier"))
    assert np.ptp(trace.begin, axis=0).max() < 4.0
    assert np.all(trace.begin[:, 1:].min(axis=0) >= trace.free[:, :-1].max(axis=0))


def test_random_gaps_are_those_asked_for(alone: Alone) -> None:
    gaps = np.random.default_rng(1).uniform(2.0, 9.0, size=(8, 16))
    trace = alone.bench.run(Point("st", 8, 1024, gaps_us=gaps, bursts=33))
    seen = trace.begin[:, 1:] - trace.done[:, :-1]
    wanted = np.take(gaps, np.arange(32) % 16, axis=1)
    assert seen == pytest.approx(wanted, abs=0.3)


def test_a_window_ends_every_producer_at_the_same_time(alone: Alone) -> None:
    point = Point("bulk", 32, 32768, gap_us=1.0, window_us=300.0, bursts=20)
    trace = alone.bench.run(point)
    assert trace.begin.shape[1] == 20
    assert trace.bursts.min() > 100, "bursts beyond those recorded are counted"


def test_a_rank_that_sends_nothing(alone: Alone) -> None:
    alone.bench.idle()


def refuse(alone: Alone, match: str, gaps: torch.Tensor | None = None, **changes: Any) -> None:
    point = Point("st", 4, 4096, bursts=4)
    plan = dataclasses.replace(burst_plan(point, 0, 1, 1980.0), **changes)
    if gaps is None:
        gaps = torch.zeros(1, 1, dtype=torch.int32, device="cuda")
    with pytest.raises(RuntimeError, match=match):
        torch.ops.xstage.burst_run(gaps, wire.pack("burst", plan), alone.words)


def test_refusals_name_the_values(alone: Alone) -> None:
    refuse(alone, r"producers: expected at most one per SM \(132\), got 500", producers=500)
    refuse(alone, "destinations: expected ranks below 1, got mask 2", destinations=2)
    refuse(alone, "chunk_bytes: expected a power of two that divides 4096, got 384",
           chunk_bytes=384, row_stride=384)  # fmt: skip
    refuse(alone, "row_stride: .* of at least chunk_bytes 4096, got 2048", row_stride=2048)
    refuse(alone, "reaches .* enlarge the lease", producer_stride=1 << 30)
    refuse(alone, "window_cycles: a barrier needs the same number", sync=1, window_cycles=10)
    refuse(alone, "tma: expected rows of 128, 256 or 512 bytes", mechanism=2)
    refuse(alone, "gap_cycles: expected", torch.zeros(1, 1025, dtype=torch.int32, device="cuda"))
    refuse(alone, "gap_cycles: expected int32, got int64",
           torch.zeros(1, 1, dtype=torch.int64, device="cuda"))  # fmt: skip


@pytest.mark.parametrize("probe", ["load", "atomic", "bulk_load", "tma_load"])
def test_shadow_of_local_bursts(alone: Alone, probe: str) -> None:
    delays = (0.5, 4.0, 12.0)
    quiet = alone.bench.shadow(Point("st", 0, 4096), delays, probe, period_us=40.0, repeats=8)
    assert quiet.control.shape == (3, alone.bench.num_sms, 8)
    base = np.median(quiet.control)
    assert 0.05 < base < 1.5
    some = alone.bench.shadow(
        Point("bulk", 16, 32768, local=True), delays, probe, period_us=40.0, repeats=8
    )
    assert some.latency.shape == (3, 16, 8)
    issued = some.times[:, :16, :, 2] - some.times[:, :16, :, 0]
    assert np.median(issued, axis=(1, 2)) == pytest.approx(np.array(delays), abs=0.3)
    assert np.median(some.latency[2]) == pytest.approx(base, rel=0.5)


LOOP = BurstLoopPlan(
    blocks=16, tiles=3, steps=8, repeats=2, store=0, tile_bytes=32768, slice_bytes=4096,
    slice_cycles=500, chunk_bytes=16384, row_stride=16384, block_stride=65536, stagger_cycles=0,
    destinations=1, join=0,
)  # fmt: skip


@pytest.mark.parametrize("store", [1, 2, 3])
@pytest.mark.parametrize("rows", [False, True])
def test_main_loop_computes_and_sends_its_tiles(alone: Alone, store: int, rows: bool) -> None:
    plan = dataclasses.replace(LOOP, store=store)
    if rows:
        plan = dataclasses.replace(plan, chunk_bytes=512, row_stride=4096, block_stride=1 << 18)
    a = torch.randint(-2, 3, (128, 64), device="cuda").to(torch.bfloat16)
    b = torch.randint(-2, 3, (128 * 40, 64), device="cuda").to(torch.bfloat16)
    alone.landing.zero_()
    trace = alone.bench.loop(plan, a, b)
    torch.cuda.synchronize()
    assert np.all(np.diff(trace.times[:, :, 0], axis=1) > 0)
    area = alone.landing[: plan.blocks * plan.block_stride].view(plan.blocks, plan.block_stride)
    tile_rows = plan.tile_bytes // plan.chunk_bytes
    sent = area[:, : tile_rows * plan.row_stride].view(plan.blocks, tile_rows, plan.row_stride)
    tiles = sent[:, :, : plan.chunk_bytes].reshape(plan.blocks, 128, 16, 16)
    row = torch.arange(128, device="cuda")[:, None]
    piece = torch.arange(16, device="cuda")[None, :] ^ (row & 7)
    for block in range(plan.blocks):
        first = block * 7 + (plan.tiles - 1) * plan.steps  # the last tile stays in place
        index = (torch.arange(plan.steps, device="cuda") + first) % 40
        total = b.view(40, 128, 64)[index].float().sum(0)
        want = (a.float() @ total.T * plan.repeats).to(torch.bfloat16)
        got = tiles[block][row, piece].reshape(128, 256).view(torch.bfloat16)
        assert torch.equal(got, want), f"block {block}"


def test_loop_refuses_what_it_cannot_read(alone: Alone) -> None:
    a = torch.zeros(128, 64, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="b: expected a multiple of 128 rows, got 100"):
        alone.bench.loop(LOOP, a, a[:100])
    with pytest.raises(RuntimeError, match="a: expected bfloat16, got float32"):
        alone.bench.loop(LOOP, a.float(), a)


def test_clocks_stand_around_the_stores_in_sass(repository: pathlib.Path) -> None:
    sys.path.insert(0, str(repository / "tools"))
    import burst_sass

    folder = _env.get("XSTAGE_LIB_DIR") or str(repository / "xstage_ext")
    assert burst_sass.faults(burst_sass.listing(f"{folder}/_cuda_sm90.abi3.so")) == []


@pytest.mark.parametrize("tool", sanitizer.TOOLS)
def test_sanitizer_finds_nothing(tool: str, level: int) -> None:
    sanitizer.expect_nothing_found(tool, "burst_small", level)
