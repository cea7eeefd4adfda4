"""`benchmarks/_alternate.py`: half a percent between two calls on a machine that wanders by 8."""

import importlib
import pathlib

import numpy as np
import pytest

from xstage_ext import testing

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"
TIMES = {"alone": 20_000.0, "fused": 20_100.0, "burst": 20_200.0}


@pytest.fixture
def alternate(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("_alternate")


@pytest.fixture
def arms(monkeypatch):
    """Calls whose time is that of TIMES on a machine whose clock wanders, with noise."""
    random = np.random.default_rng(0)
    clock = [0.0]

    def sample(call, calls, group):
        level = 1.0 + 0.08 * np.sin(clock[0] / 3e5)
        took = TIMES[call()] * level * float(np.exp(5e-3 * random.standard_normal()))
        clock[0] += took
        return took

    monkeypatch.setattr(testing, "_cpu_sample", sample)
    monkeypatch.setattr(testing.torch.cuda, "is_available", lambda: False)
    return {name: (lambda name=name: name) for name in TIMES}


def test_small_differences_are_found_under_a_wandering_clock(alternate, arms):
    ratios, blocks = alternate.over_base(arms, "alone", sum(TIMES.values()), seconds=4.8)
    assert blocks == 40 and ratios.keys() == {"fused", "burst"}
    for name, ratio in ratios.items():
        wanted = TIMES[name] / TIMES["alone"]
        assert ratio.low < wanted < ratio.high and ratio.high - ratio.low < 0.008


def test_a_steady_drift_divides_out_of_a_block(alternate):
    drift = 1.0 + 0.1 * np.arange(8)
    # alone, fused, fused, alone: both have the same mean place.
    alone = testing.Timing.of(100.0 * drift[[0, 3, 4, 7]])
    fused = testing.Timing.of(101.0 * drift[[1, 2, 5, 6]])
    ratio = alternate.ratio_of(fused, alone)
    assert (ratio.low, ratio.median, ratio.high) == pytest.approx((1.01, 1.01, 1.01))


@pytest.mark.parametrize(("seconds", "blocks"), [(0.0, 20), (1e6, 60)])
def test_blocks_are_neither_few_nor_many(alternate, arms, seconds, blocks):
    assert alternate.over_base(arms, "alone", 6e4, seconds)[1] == blocks
