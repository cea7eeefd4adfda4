"""The law producer by producer: where it equals the lumped law, and what it adds."""

from __future__ import annotations

import numpy as np
import pytest

from xstage_ext.model import BurstGap
from xstage_ext.producers import ProducerTrain, run_trains

K, R, Q = 132, 374.0, 2.45e6
UNEQUAL = (0.79, 0.86, 0.89, 0.92, 0.94, 0.97, 1.0, 1.1, 1.45)


def train(nbytes: float, T0: float, gaps, shares=()) -> ProducerTrain:
    return ProducerTrain(K, nbytes, T0, R, Q, np.atleast_2d(np.asarray(gaps, float)), shares)


@pytest.mark.parametrize("gap", [0.0, 4.0, 8.0, 20.0])
@pytest.mark.parametrize(("nbytes", "T0"), [(16384, 0.3), (32768, 0.55), (65536, 1.2)])
def test_equal_shares_are_the_lumped_recursion(nbytes: float, T0: float, gap: float) -> None:
    law = BurstGap(T0, R, Q, K * nbytes)
    times = run_trains([train(nbytes, T0, gap)], windows_us=400.0)
    lumped = law.transient(np.full(8, gap)).T_iss_us
    assert times.first_us[0] == pytest.approx(lumped, abs=0.15)
    assert times.mean_us[0] == pytest.approx(float(law.steady(gap)), abs=0.15)


@pytest.mark.parametrize("gap", [0.5, 6.0, 12.0, 18.0])
def test_unequal_shares_keep_the_mean_of_a_saturated_train(gap: float) -> None:
    law = BurstGap(1.2, R, Q, K * 65536)
    times = run_trains([train(65536, 1.2, gap, UNEQUAL)], windows_us=900.0)
    assert times.mean_us[0] == pytest.approx(float(law.free_running(gap)), rel=0.06)


def test_unequal_service_breaks_the_step() -> None:
    """In step every burst overfills the pipe; served unequally, a train is soon out of step."""
    gap = 30.0
    equal, unequal = (
        run_trains([train(65536, 1.2, gap, shares)], windows_us=600.0, first=10)
        for shares in ((), UNEQUAL)
    )
    law = BurstGap(1.2, R, Q, K * 65536)
    assert equal.mean_us[0] == pytest.approx(float(law.capacity_term_us), abs=0.2)
    assert unequal.first_us[0, 0] == pytest.approx(float(law.capacity_term_us), rel=0.1)
    assert unequal.mean_us[0] == pytest.approx(1.2, abs=0.15)
    assert np.all(np.diff(unequal.first_us[0, :5]) < 0)


def test_random_gaps_of_all_stall_where_their_mean_would_not() -> None:
    rng = np.random.default_rng(2)
    gaps = rng.uniform(0, 45.0, size=256)
    own = rng.uniform(0, 45.0, size=(K, 256))
    common, each = run_trains(
        [train(49152, 0.87, gaps, UNEQUAL), train(49152, 0.87, own, UNEQUAL)], windows_us=900.0
    ).mean_us
    assert each == pytest.approx(0.87, abs=0.2)
    assert common > each + 0.5


def test_trains_of_different_sizes_run_together() -> None:
    small = ProducerTrain(16, 8192, 0.1, 200.0, 1e5, np.array([[2.0]]))
    alone = run_trains([small]).mean_us[0]
    together = run_trains([train(65536, 1.2, 6.0, UNEQUAL), small]).mean_us[1]
    assert together == pytest.approx(alone, rel=1e-9)


def test_weights_have_mean_one_and_cover_the_quantiles() -> None:
    weights = train(1.0, 1.0, 0.0, UNEQUAL).weights()
    assert weights.mean() == pytest.approx(1.0)
    assert weights.max() / weights.min() == pytest.approx(1.45 / 0.79, rel=0.02)


def test_isolated_burst_of_equal_producers_is_the_closed_form() -> None:
    for nbytes in (4096, 16384, 32768, 98304):
        law = BurstGap(0.5, R, Q, K * nbytes)
        times = train(nbytes, 0.5, 0.0).isolated()
        assert np.ptp(times) == 0.0
        assert times[0] == pytest.approx(float(law.steady(1e9)))


def test_isolated_burst_of_unequal_producers_agrees_with_the_fluid() -> None:
    for nbytes in (32768, 65536, 131072):
        one = train(nbytes, nbytes / 60e3, 500.0, UNEQUAL)
        times = one.isolated()
        fluid = run_trains([one], windows_us=80.0, warm_us=0.0, first=1).first_us[0, 0]
        assert times.mean() == pytest.approx(fluid, abs=0.25)
        assert times.min() < times.mean() < times.max() <= K * nbytes / (R * 1e3)
