"""Decoding of kernel traces."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from xstage_ext import trace


def test_decode_reads_tiles_of_both_math_tracks():
    words = torch.zeros(3, 4, 5, 8, dtype=torch.int64)
    tile = 2 << 48 | 77 << 24 | 5
    words[1, 1, 0] = torch.tensor([1, tile, 10_000, 15_000, 1980, 990, 3960, 0])
    words[2, 2, 3] = torch.tensor([1, 1 << 48, 12_000, 13_000, 0, 0, 0, 0])
    words[0, 0, 0] = torch.tensor([2, 0, 1, 2, 3, 4, 5, 0])  # a phase record, not a tile
    tiles = trace.decode(words, clock_mhz=1980.0)
    assert tiles.cta.tolist() == [1, 2]
    assert tiles.group.tolist() == [0, 1]
    assert tiles.phase.tolist() == [2, 1]
    assert (tiles.block[0], tiles.n[0]) == (77, 5)
    np.testing.assert_allclose(tiles.begin_us, [0.0, 2.0])
    np.testing.assert_allclose(tiles.end_us, [5.0, 3.0])
    np.testing.assert_allclose(tiles.hand_over_us, [2.0, 0.0])
    np.testing.assert_allclose(tiles.first_wait_us, [1.0, 0.0])
    assert len(tiles.of_phase(2).cta) == 1
    np.testing.assert_allclose(tiles.activity(1.0), [0.5, 0.5, 1.0])


def test_empty_trace():
    tiles = trace.decode(torch.zeros(1, 4, 1, 8, dtype=torch.int64), 1000.0)
    assert len(tiles.cta) == len(tiles.activity(1.0)) == 0


@given(
    st.lists(st.tuples(st.floats(0, 50), st.floats(0, 20)), min_size=1, max_size=30),
    st.sampled_from([0.5, 1.0, 7.0]),
)
def test_busy_share_keeps_the_area(intervals, width):
    begin = np.array([a for a, _ in intervals])
    end = begin + np.array([b for _, b in intervals])
    share = trace.busy_share(begin, end, 3, width)
    assert share.sum() * 3 * width == pytest.approx((end - begin).sum(), abs=1e-6)
    assert (share >= -1e-9).all()
