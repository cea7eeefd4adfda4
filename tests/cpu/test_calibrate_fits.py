"""The fits behind `xstage calibrate` on synthetic measurements of a known law."""

from __future__ import annotations

import numpy as np
import pytest

from xstage_ext import _fits, _measure, _profile_fit
from xstage_ext.burst import Point, Trace
from xstage_ext.errors import CalibrationError

R, Q, T0 = 370.0, 2.6e6, 0.55
BYTES_PER_US = R * 1e3


def noisy(values: np.ndarray, seed: int = 1) -> np.ndarray:
    return values * (1 + 0.03 * np.random.default_rng(seed).standard_normal(values.shape))


def isolated(volume: np.ndarray) -> np.ndarray:
    return np.maximum(T0, (volume - Q) / BYTES_PER_US)


VOLUME = np.linspace(0.1e6, 18e6, 60)


def test_knee_within_five_percent() -> None:
    knee = _fits.knee(VOLUME, noisy(isolated(VOLUME)), T0, "synthetic")
    assert knee.R_GBps.value == pytest.approx(R, rel=0.05)
    assert knee.Q_bytes.value == pytest.approx(Q, rel=0.05)
    assert knee.Q_bytes.low <= knee.Q_bytes.value <= knee.Q_bytes.high


def test_knee_with_outliers_disorder_and_nan() -> None:
    times = noisy(isolated(VOLUME))
    times[[7, 31, 55]] *= 10.0
    times[20] = np.nan
    order = np.random.default_rng(3).permutation(len(VOLUME))
    knee = _fits.knee(VOLUME[order], times[order], np.full(len(order), T0), "synthetic")
    assert knee.R_GBps.value == pytest.approx(R, rel=0.05)
    assert knee.Q_bytes.value == pytest.approx(Q, rel=0.05)


def test_knee_follows_a_floor_that_differs_by_point() -> None:
    floor = 0.1 + VOLUME / 20e6
    times = np.maximum(floor, (VOLUME - Q) / BYTES_PER_US)
    order = np.random.default_rng(4).permutation(len(VOLUME))
    knee = _fits.knee(VOLUME[order], noisy(times)[order], floor[order], "synthetic", R)
    assert knee.R_GBps.value == R
    assert knee.Q_bytes.value == pytest.approx(Q, rel=0.05)


@pytest.mark.parametrize(
    ("volume", "times"),
    [
        (np.array([1e6, 9e6]), np.array([T0, 20.0])),
        (np.full(30, 5e6), np.full(30, 6.5)),
        (VOLUME, np.full(len(VOLUME), np.nan)),
        (VOLUME[:6], np.full(6, T0)),
    ],
    ids=["two points", "one volume", "all NaN", "nothing stalls"],
)
def test_knee_refuses_what_does_not_determine_it(volume: np.ndarray, times: np.ndarray) -> None:
    with pytest.raises(CalibrationError, match="synthetic"):
        _fits.knee(volume, times, T0, "synthetic")


def test_rate_from_slope() -> None:
    times = noisy(2.0 + VOLUME / BYTES_PER_US)
    times[5] *= 10.0
    times[6] = np.nan
    estimate = _fits.rate_from_slope(VOLUME[::-1], times[::-1], "slope")
    assert estimate.value == pytest.approx(R, rel=0.05)
    assert estimate.low < R < estimate.high
    assert estimate.points == len(VOLUME) - 1


def test_rate_refuses_constant_times_and_few_points() -> None:
    with pytest.raises(CalibrationError, match="does not grow"):
        _fits.rate_from_slope(VOLUME, np.full(len(VOLUME), 3.0), "slope")
    with pytest.raises(CalibrationError, match="at least 4"):
        _fits.rate_from_slope(VOLUME[:2], VOLUME[:2] / BYTES_PER_US, "slope")


def test_zero_volume_is_a_point_like_any_other() -> None:
    volume = np.concatenate([[0.0], VOLUME])
    estimate = _fits.rate_from_slope(volume, 2.0 + volume / BYTES_PER_US, "slope")
    assert estimate.value == pytest.approx(R, rel=1e-6)


def train(T: float, gap: float, bursts: int, producers: int) -> tuple[np.ndarray, np.ndarray]:
    start = np.arange(producers)[:, None] * 0.37
    begin = start + np.arange(bursts)[None, :] * (T + gap)
    return begin, begin + T


def test_throughput_is_exact_on_a_periodic_train() -> None:
    begin, end = train(T=6.0, gap=2.0, bursts=100, producers=40)
    seen = _fits.throughput(begin, end, 16384, 100.0, 100.0 + 50 * 8.0)
    assert seen == pytest.approx(40 * 16384 / 8.0 / 1e3, rel=1e-9)


def test_fast_producers_do_not_inflate_a_window() -> None:
    """Some producers issue twice as fast and are over early: a window still sees the true rate."""
    begin, end = train(T=4.0, gap=0.0, bursts=200, producers=10)
    begin[:5], end[:5] = begin[:5] / 2, end[:5] / 2  # twice as fast, over after half of the time
    seen = _fits.throughput(begin, end, 1000, 20.0, 380.0)
    assert seen == pytest.approx((5 * 1000 / 2.0 + 5 * 1000 / 4.0) / 1e3, rel=1e-2)


def test_median_and_its_interval() -> None:
    samples = noisy(np.full(200, 7.0))
    samples[:10] = np.nan
    samples[10:20] = 70.0
    estimate = _fits.median(samples, "samples")
    assert estimate.value == pytest.approx(7.0, rel=0.02)
    assert estimate.low <= estimate.value <= estimate.high
    with pytest.raises(CalibrationError, match="at least 5"):
        _fits.median([1.0, np.nan, 2.0], "samples")


def saturated_trace(K: int, nbytes: int, rate: float, capacity: float, gap: float) -> Trace:
    """Producers served at 0.7 to 1.5 of the mean rate, whose queues never run dry in the gaps."""
    weights = np.linspace(0.7, 1.5, K)
    rates = weights / weights.sum() * rate * 1e3
    ends = (np.arange(1, 60)[None, :] * nbytes - capacity / K) / rates[:, None]
    begins = np.concatenate([np.zeros((K, 1)), ends[:, :-1] + gap], axis=1)
    counts = np.full(K, ends.shape[1])
    return Trace(
        Point("bulk", K, nbytes), begins, ends, ends, ends, counts, counts, np.zeros(K), 1980.0
    )


def test_lead_of_a_train_is_the_capacity_however_unequal_the_service() -> None:
    for K, nbytes, gap in ((33, 32768, 0.4), (132, 65536, 0.4), (132, 65536, 0.0)):
        trace = saturated_trace(K, nbytes, 374.0, 1.3e6, gap)
        curve = _measure.accepted_curve(trace, 500.0)
        lead = _profile_fit._lead([{"accepted": curve}, {}], 374.0)
        assert lead is not None and lead.value == pytest.approx(1.3e6, rel=0.03)
    assert _profile_fit._lead([{}], 374.0) is None


def shadow_points(cross: float | None) -> tuple[np.ndarray, ...]:
    K, B, d = (a.ravel() for a in np.meshgrid([33, 132], [8192, 32768, 65536], [1, 2, 4, 8, 16]))
    truth = _fits.ShadowFit(0.3, np.array([33.0, 132.0]), np.array([0.2e6, 0.7e6]), cross, 0.0)
    latency = truth.predict(K, B, d, np.full(len(K), R))
    return K, B, d, latency


@pytest.mark.parametrize("cross", [None, 7000.0])
def test_shadow_within_five_percent(cross: float | None) -> None:
    K, B, d, latency = shadow_points(cross)
    latency = noisy(latency)
    latency[4] = np.nan
    fit = _fits.shadow(K, B, d, latency, R, 0.3, "shadow")
    clean = _fits.ShadowFit(0.3, np.array([33.0, 132.0]), np.array([0.2e6, 0.7e6]), cross, 0.0)
    truth = clean.predict(K, B, d, np.full(len(K), R))
    deep = truth > 1.0
    assert np.median(np.abs(fit.predict(K, B, d, np.full(len(K), R)) / truth - 1)[deep]) < 0.05
    assert (fit.cross_bytes is None) == (cross is None)
    if cross is not None:
        assert fit.cross_bytes == pytest.approx(cross, rel=0.05)
    assert fit.error < 0.1


def test_shadow_refuses_too_few_points() -> None:
    with pytest.raises(CalibrationError, match="at least 6"):
        _fits.shadow([132] * 3, [8192] * 3, [1, 2, 3], [3.0, 2.0, 1.0], R, 0.3, "shadow")


def test_routes_are_compared() -> None:
    one = _fits.Estimate(100.0, 99.0, 101.0, "a", 10)
    other = _fits.Estimate(103.0, 99.0, 107.0, "b", 10)
    assert _fits.agreement(one, other) == pytest.approx(3 / 103)
    assert other.relative_width == pytest.approx(4 / 103)
