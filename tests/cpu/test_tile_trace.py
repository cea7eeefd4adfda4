"""Records of the trace build become tiles, spans and the activity of the tensor cores."""

from __future__ import annotations

import importlib
import pathlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture
def tile_trace(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("_tile_trace")


def test_decode_reads_tiles_of_both_math_tracks(tile_trace):
    words = torch.zeros(3, 4, 5, 8, dtype=torch.int64)
    tile = 2 << 48 | 77 << 24 | 5
    words[1, 1, 0] = torch.tensor([1, tile, 10_000, 15_000, 1980, 990, 3960, 9900])
    words[2, 2, 3] = torch.tensor([1, 1 << 48, 12_000, 13_000, 0, 0, 0, 1980])
    words[0, 0, 0] = torch.tensor([2, 0, 1, 2, 3, 4, 5, 0])  # a phase record, not a tile
    words[0, 1, 0] = torch.tensor([1, 0, 1, 2, 3, 4, 5, 9])  # keeps step, has no tile
    tiles = tile_trace.decode(words)
    assert tiles.cta.tolist() == [1, 2]
    assert tiles.group.tolist() == [0, 1]
    assert tiles.phase.tolist() == [2, 1]
    assert (tiles.block[0], tiles.n[0]) == (77, 5)
    np.testing.assert_allclose(tiles.begin_us, [0.0, 2.0])
    np.testing.assert_allclose(tiles.clock_mhz, 1980.0)
    np.testing.assert_allclose(tiles.hand_over_us, [2.0, 0.0])
    np.testing.assert_allclose(tiles.first_wait_us, [1.0, 0.0])
    assert len(tiles.of_phase(2).cta) == 1
    # Half a microsecond of the first tile's three waits for operands.
    np.testing.assert_allclose(tiles.activity(1.0), np.array([5, 5, 11]) / 12)
    empty = tile_trace.decode(torch.zeros(1, 4, 1, 8, dtype=torch.int64))
    assert len(empty.cta) == len(empty.activity(1.0)) == 0


def test_phases_of_a_call(tile_trace):
    words = torch.zeros(2, 4, 3, 8, dtype=torch.int64)
    for cta, late in ((0, 0), (1, 2_000)):
        words[cta, 0, 0] = torch.tensor([2, 0, 1_000, 99_000, 0, 0, 47_000, 0])
        words[cta, 0, 1] = torch.tensor([4, 0, 60_000 + late, 71_000, 0, 0, 0, 0])
        words[cta, 0, 2] = torch.tensor([5, 0, 71_000, 81_000 - late, 0, 0, 0, 0])
        words[cta, 1, 0] = torch.tensor([1, 1 << 48, 51_000 + late, 60_000, 0, 0, 0, 0])
    phases = tile_trace.phases_us(words)
    assert phases == {
        "counts_us": 47.0, "first_tile_us": 51.0, "tiles_us": 61.0, "signal_us": 9.0,
        "combine_us": 10.0,
    }  # fmt: skip
    assert tile_trace.phases_us(torch.zeros(1, 4, 1, 8, dtype=torch.int64)) == {}


def test_waits_for_operands_are_not_activity(tile_trace):
    ones = np.ones(2)
    begin, end = np.array([0.0, 2.0]), np.array([2.0, 4.0])
    halves = tile_trace.busy_share(begin, end, 1, 1.0, 0.5 * ones)
    np.testing.assert_allclose(halves, 0.5)
    words = torch.zeros(1, 4, 1, 8, dtype=torch.int64)
    words[0, 1, 0] = torch.tensor([1, 1 << 48, 0, 4_000, 0, 990, 1980, 7920])
    # 4 us: 1 us of hand-over, half a microsecond of the main loop waits for operands.
    activity = tile_trace.decode(words).activity(1.0)
    np.testing.assert_allclose(activity, [2.5 / 3] * 3, rtol=1e-6)


@given(
    intervals=st.lists(st.tuples(st.floats(0, 50), st.floats(0, 20)), min_size=1, max_size=30),
    width=st.sampled_from([0.5, 1.0, 7.0]),
)
def test_busy_share_keeps_the_area(intervals, width):
    import sys

    sys.path.insert(0, str(ROOT / "benchmarks"))
    from _tile_trace import busy_share

    begin = np.array([a for a, _ in intervals])
    end = begin + np.array([b for _, b in intervals])
    share = busy_share(begin, end, 3, width)
    assert share.sum() * 3 * width == pytest.approx((end - begin).sum(), abs=1e-6)
    assert (share >= -1e-9).all()
