"""The order of megamoe tiles, proved by walking it: csrc/megamoe/schedule.h itself, not a copy."""

from __future__ import annotations

import collections
import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xstage_ext.planner.megamoe import MegaMoePlan

COUNTS = (0, 1, 7, 63, 64, 65, 127, 128, 129, 255, 257)
LINEAR1, LINEAR2 = 1, 2
WEIGHTS, TOKENS, SPLIT = 1, 2, 3


@dataclasses.dataclass(frozen=True)
class Tile:
    """A row of torch.ops.xstage.megamoe_tiles."""

    index: int
    cta: int
    phase: int
    share: int
    expert: int
    block: int
    row: int
    rows: int
    n: int


def tiles_of(plan: MegaMoePlan, counts: list[int]) -> list[Tile]:
    table = torch.ops.xstage.megamoe_tiles(plan.words(), counts).tolist()
    return [Tile(*row) for row in table]


@st.composite
def cases(draw: st.DrawFn) -> tuple[MegaMoePlan, list[int]]:
    experts = draw(st.integers(1, 9))
    counts = draw(
        st.lists(st.sampled_from(COUNTS) | st.integers(0, 1500), min_size=experts, max_size=experts)
    )
    cluster = draw(st.sampled_from((1, 2)))
    group = draw(st.integers(1, 9))
    lead = draw(st.integers(0, 20))
    wave = draw(st.integers(1, 30))
    schedule = draw(st.sampled_from((0, 1)))
    least = wave if schedule == 0 else lead + 2 * group
    plan = MegaMoePlan(
        world=1,
        num_experts=experts,
        topk=1,
        hidden=64 * draw(st.integers(1, 20)),
        intermediate=64 * draw(st.integers(1, 20)),
        max_tokens=max(1, sum(counts)),
        block_m=draw(st.sampled_from((64, 128))),
        block_n=draw(st.sampled_from((128, 256))),
        cluster_size=cluster,
        num_sms=cluster * draw(st.integers(1, 70)),
        schedule=schedule,
        group_blocks=group,
        lead_blocks=lead,
        wave_blocks=wave,
        mix=draw(st.sampled_from((0, 1))),
        x_ring_blocks=group + draw(st.integers(0, 5)),
        h_ring_blocks=least + draw(st.integers(0, 5)),
    )
    return plan, counts


def blocks_of(plan: MegaMoePlan, counts: list[int]) -> list[tuple[int, int, int]]:
    """(expert, first row, rows) of every m-block, in order."""
    result = []
    for expert, count in enumerate(counts):
        for row in range(0, count, plan.block_m):
            result.append((expert, row, min(plan.block_m, count - row)))
    return result


@given(cases())
@settings(max_examples=300, deadline=None)
def test_every_tile_exactly_once(case: tuple[MegaMoePlan, list[int]]) -> None:
    plan, counts = case
    seen = collections.Counter()
    blocks = blocks_of(plan, counts)
    for tile in tiles_of(plan, counts):
        if tile.phase == 0:
            continue
        assert (tile.expert, tile.row, tile.rows) == blocks[tile.block]
        seen[tile.phase, tile.block, tile.n] += 1
    expected = {
        (phase, block, n)
        for phase, columns in ((LINEAR1, plan.linear1_tiles), (LINEAR2, plan.linear2_tiles))
        for block in range(len(blocks))
        for n in range(columns)
    }
    assert set(seen) == expected
    assert all(times == 1 for times in seen.values())


@given(cases())
@settings(max_examples=200, deadline=None)
def test_ctas_of_a_cluster_share_what_the_tile_says(case: tuple[MegaMoePlan, list[int]]) -> None:
    plan, counts = case
    pairs = collections.defaultdict(list)
    for tile in tiles_of(plan, counts):
        pairs[tile.index].append(tile)
    for pair in pairs.values():
        assert [tile.cta for tile in pair] == list(range(plan.cluster_size))
        if plan.cluster_size == 1:
            assert pair[0].phase != 0 and pair[0].share == 0
            continue
        a, b = pair
        assert a.share == b.share and a.phase != 0 and a.expert == b.expert
        if a.share == WEIGHTS:
            assert (b.phase, b.n, b.block) == (a.phase, a.n, a.block + 1)
            assert 2 * b.rows > plan.block_m
        elif a.share == SPLIT:
            assert (b.phase, b.n, b.block) == (a.phase, a.n, a.block + 1)
            assert a.rows == plan.block_m and 2 * b.rows <= plan.block_m
        elif a.share == TOKENS:
            assert (b.phase, b.n, b.block) == (a.phase, a.n + 1, a.block)
        else:
            assert b.phase == 0
    odd = sum(-(-count // plan.block_m) for count in counts)
    alone = sum(1 for pair in pairs.values() if len(pair) == 2 and pair[1].phase == 0)
    assert alone <= 2 * odd  # at most one lonely CTA per linear and group


@given(cases())
@settings(max_examples=300, deadline=None)
def test_every_wait_points_strictly_backwards(case: tuple[MegaMoePlan, list[int]]) -> None:
    """Linear-2 after its whole Linear-1; ring slots reused only after their last reader."""
    plan, counts = case
    last: dict[tuple[int, int], int] = {}
    for tile in tiles_of(plan, counts):
        if tile.phase:
            key = (tile.phase, tile.block)
            last[key] = max(last.get(key, -1), tile.index)
    for tile in tiles_of(plan, counts):
        if tile.phase == LINEAR2:
            assert last[LINEAR1, tile.block] < tile.index
        if tile.phase == LINEAR1:
            # Its h ring slot was read by Linear-2 of an earlier block; its rows take an x ring slot
            # that Linear-1 of an earlier block has left.
            if tile.block >= plan.h_ring_blocks:
                assert last[LINEAR2, tile.block - plan.h_ring_blocks] < tile.index
            if tile.block >= plan.x_ring_blocks:
                assert last[LINEAR1, tile.block - plan.x_ring_blocks] < tile.index


@given(cases())
@settings(max_examples=100, deadline=None)
def test_deal_gives_every_tile_to_one_worker_that_walks_forwards(
    case: tuple[MegaMoePlan, list[int]],
) -> None:
    plan, counts = case
    num = len({tile.index for tile in tiles_of(plan, counts)})
    deal = torch.ops.xstage.megamoe_deal(plan.words(), counts).numpy()
    assert sorted(deal[:, 1].tolist()) == list(range(num))
    for worker in range(plan.num_sms // plan.cluster_size):
        mine = deal[deal[:, 0] == worker, 1]
        assert np.all(np.diff(mine) > 0)
        assert abs(len(mine) - num * plan.cluster_size / plan.num_sms) <= 1


def simulate(plan: MegaMoePlan, counts: list[int], rng: np.random.Generator) -> None:
    """Workers at random speeds, with the kernel's waits; fails on a deadlock or an overrun ring."""
    by_index = collections.defaultdict(list)
    for tile in tiles_of(plan, counts):
        if tile.phase:
            by_index[tile.index].append(tile)
    queues = collections.defaultdict(collections.deque)
    for worker, index in torch.ops.xstage.megamoe_deal(plan.words(), counts).tolist():
        queues[worker].append(index)
    blocks = len(blocks_of(plan, counts))
    done1, done2 = np.zeros(blocks, int), np.zeros(blocks, int)
    pulled = 0

    def h_free(block: int) -> bool:
        old = block - plan.h_ring_blocks
        return old < 0 or done2[old] == plan.linear2_tiles

    def ready(tile: Tile) -> bool:
        if tile.phase == LINEAR2:
            return bool(done1[tile.block] == plan.linear1_tiles)
        return tile.block < pulled and h_free(tile.block)

    def run(pair: list[Tile]) -> None:
        for tile in pair:
            # No tile may still need what lies in the slot that is written now.
            assert tile.phase == LINEAR2 or h_free(tile.block)
            (done1 if tile.phase == LINEAR1 else done2)[tile.block] += 1

    def next_pairs() -> list[list[Tile]]:
        return [by_index[queue[0]] for queue in queues.values() if queue]

    while any(queues.values()):
        while pulled < blocks and (
            pulled < plan.x_ring_blocks or done1[pulled - plan.x_ring_blocks] == plan.linear1_tiles
        ):
            pulled += 1
        assert any(all(map(ready, pair)) for pair in next_pairs()), "deadlock"
        workers = [worker for worker, queue in queues.items() if queue]
        for worker in rng.permutation(workers)[: max(1, len(workers) // 2)]:
            pair = by_index[queues[worker][0]]
            if all(map(ready, pair)):
                run(pair)
                queues[worker].popleft()
    assert pulled == blocks
    assert np.all(done1 == plan.linear1_tiles) and np.all(done2 == plan.linear2_tiles)


@given(cases(), st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_no_deadlock_at_any_speed(case: tuple[MegaMoePlan, list[int]], seed: int) -> None:
    plan, counts = case
    simulate(plan, counts, np.random.default_rng(seed))


@pytest.mark.parametrize("schedule", [0, 1])
@pytest.mark.parametrize(
    "counts",
    [
        [0] * 8,
        [1] + [0] * 7,
        [0] * 7 + [1],
        [4000] + [0] * 7,
        [0, 0, 4000, 0, 0, 0, 0, 1],
        list(COUNTS[:8]),
        list(COUNTS[3:]),
        [512] * 8,
    ],
    ids=str,
)
def test_adversarial_counts(schedule: int, counts: list[int]) -> None:
    plan = MegaMoePlan(
        world=1, num_experts=8, topk=1, hidden=512, intermediate=256, max_tokens=8192, num_sms=14,
        schedule=schedule, group_blocks=4, lead_blocks=6, wave_blocks=14, x_ring_blocks=4,
        h_ring_blocks=14,
    )  # fmt: skip
    simulate(plan, counts, np.random.default_rng(0))


@pytest.mark.parametrize("intermediate", [1536, 2048])
def test_interleaved_gives_every_worker_both_kinds(intermediate: int) -> None:
    """A burst of Linear-2 is followed by Linear-1 work on the same worker.

    With 2048 there are as many Linear-1 as Linear-2 tiles, in strict turns, for an even number of
    workers: a deal that did not turn would give every worker one kind only.
    """
    plan = MegaMoePlan(
        world=8, num_experts=128, topk=4, hidden=4096, intermediate=intermediate, max_tokens=8192,
        h_ring_blocks=64, mix=1,
    )  # fmt: skip
    counts = [2048] * 16
    phase = {tile.index: tile.phase for tile in tiles_of(plan, counts)}
    deal = torch.ops.xstage.megamoe_deal(plan.words(), counts).tolist()
    share = plan.linear1_tiles * 16 * 16 / 2 / 66
    for worker in range(66):
        kinds = [phase[index] for w, index in deal if w == worker]
        middle = kinds[8:-8]
        longest = max(len(run) for run in "".join(map(str, middle)).split("1"))
        assert longest <= 4
        assert abs(kinds.count(LINEAR1) - share) < 6


def test_wave_keeps_whole_experts_together() -> None:
    plan = MegaMoePlan(
        world=1, num_experts=4, topk=1, hidden=256, intermediate=128, max_tokens=4096,
        schedule=0, wave_blocks=5, h_ring_blocks=8, group_blocks=8, cluster_size=1,
    )  # fmt: skip
    # 3, 3, 1 and 7 blocks: waves of [3], [3 + 1], [5 of 7], [2 of 7].
    order = [
        (tile.phase, tile.block) for tile in tiles_of(plan, [384, 300, 100, 800]) if tile.n == 0
    ]
    waves = [range(0, 3), range(3, 7), range(7, 12), range(12, 14)]
    assert order == [(p, b) for wave in waves for p in (LINEAR1, LINEAR2) for b in wave]


ROWS_BY_SOURCE = st.lists(st.sampled_from(COUNTS) | st.integers(0, 40), min_size=1, max_size=8)


@given(ROWS_BY_SOURCE, st.integers(0, 7))
@settings(max_examples=200, deadline=None)
def test_pulled_rows_come_from_all_sources_in_turn(counts: list[int], rank: int) -> None:
    rank %= len(counts)
    table = torch.ops.xstage.megamoe_row_sources(counts, rank, 0).tolist()
    expected = [(s, i) for s, count in enumerate(counts) for i in range(count)]
    assert sorted(map(tuple, table)) == expected
    peers_first = [(rank + 1 + i) % len(counts) for i in range(len(counts))]
    assert [s for s, i in table if i == 0] == [s for s in peers_first if counts[s] > 0]
    # Evenly: after any number of rows, sources that still have rows are at most one apart.
    taken = [0] * len(counts)
    for source, index in table:
        assert index == taken[source]
        taken[source] += 1
        open_ = [t for t, count in zip(taken, counts, strict=True) if t < count]
        if open_:
            assert max(open_) - min(open_) <= 1


@given(ROWS_BY_SOURCE, st.integers(0, 7))
@settings(max_examples=50, deadline=None)
def test_pushed_rows_come_after_those_of_the_own_rank(counts: list[int], rank: int) -> None:
    rank %= len(counts)
    table = torch.ops.xstage.megamoe_row_sources(counts, rank, 1).tolist()
    order = [(rank + i) % len(counts) for i in range(len(counts))]
    assert table == [[s, i] for s in order for i in range(counts[s])]
