"""Fits of the Burst-Gap parameters: pure functions of arrays, tested on synthetic data.

Every fit sorts its points, drops those that are not finite, refuses too few, and is robust against
a minority of outliers. Every result carries a bootstrap interval. Times are us, volumes bytes,
rates GB/s (1e9 bytes per second; one GB/s moves 1e3 bytes in a microsecond).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from scipy import optimize, stats

from .errors import CalibrationError

FloatArray = npt.NDArray[np.float64]
BYTES_PER_US_PER_GBPS = 1e3
RESAMPLES = 120
CONFIDENCE = 0.95


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A number with its bootstrap interval and how it was found.

    Attributes
    ----------
    value, low, high : float
    route : str
        Which measurement and which estimator.
    points : int
        Points that remained after cleaning.
    """

    value: float
    low: float
    high: float
    route: str
    points: int

    @property
    def relative_width(self) -> float:
        """Half of the interval over the value."""
        return (self.high - self.low) / 2 / abs(self.value) if self.value else float("inf")


def clean(
    x: npt.ArrayLike, y: npt.ArrayLike, fewest: int, what: str
) -> tuple[FloatArray, FloatArray]:
    """Finite points with x >= 0, sorted by x.

    Raises
    ------
    CalibrationError
        Fewer than `fewest` remain, or they share a single x.
    """
    xs, ys = np.broadcast_arrays(np.asarray(x, np.float64), np.asarray(y, np.float64))
    keep = np.isfinite(xs) & np.isfinite(ys) & (xs >= 0)
    xs, ys = xs[keep].ravel(), ys[keep].ravel()
    if len(xs) < fewest or len(np.unique(xs)) < min(fewest, 3):
        raise CalibrationError(
            f"{what}: expected at least {fewest} finite points at 3 or more places, got {len(xs)} "
            f"at {len(np.unique(xs))}"
        )
    order = np.argsort(xs, kind="stable")
    return xs[order], ys[order]


def bootstrap(
    statistic: Callable[[FloatArray, FloatArray], float],
    x: FloatArray,
    y: FloatArray,
    route: str,
    seed: int = 0,
) -> Estimate:
    """The statistic of all points, with a percentile interval over resampled points."""
    value = statistic(x, y)
    rng = np.random.default_rng(seed)
    draws = []
    for _ in range(RESAMPLES):
        index = np.sort(rng.integers(0, len(x), len(x)))
        if len(np.unique(x[index])) < 2:
            continue
        draw = statistic(x[index], y[index])
        if np.isfinite(draw):
            draws.append(draw)
    tail = (1 - CONFIDENCE) / 2
    low, high = (
        np.quantile(draws, [tail, 1 - tail]) if len(draws) >= RESAMPLES // 2 else (np.nan, np.nan)
    )
    return Estimate(float(value), float(low), float(high), route, len(x))


def median(samples: npt.ArrayLike, route: str, fewest: int = 5) -> Estimate:
    """Median of repeated measurements of one number."""
    values = np.asarray(samples, np.float64).ravel()
    values = values[np.isfinite(values)]
    if len(values) < fewest:
        raise CalibrationError(f"{route}: expected at least {fewest} samples, got {len(values)}")
    rng = np.random.default_rng(0)
    draws = np.median(rng.choice(values, (RESAMPLES, len(values))), axis=1)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(draws, [tail, 1 - tail])
    return Estimate(float(np.median(values)), float(low), float(high), route, len(values))


def rate_from_slope(volume: npt.ArrayLike, time_us: npt.ArrayLike, route: str) -> Estimate:
    """Drain rate as the inverse slope of time over volume (Theil-Sen: outliers do not count)."""
    x, y = clean(volume, time_us, 4, route)

    def rate(xs: FloatArray, ys: FloatArray) -> float:
        slope = float(stats.theilslopes(ys, xs)[0])
        return 1.0 / slope / BYTES_PER_US_PER_GBPS if slope > 0 else float("nan")

    if not np.isfinite(rate(x, y)):
        raise CalibrationError(f"{route}: time does not grow with volume; nothing was drained")
    return bootstrap(rate, x, y, route)


def throughput(
    begin: FloatArray, end: FloatArray, nbytes: float, low_us: float, high_us: float
) -> float:
    """Rate in GB/s at which all producers' bytes were accepted between two times.

    Parameters
    ----------
    begin, end : array [producers, bursts]
        Stamps on one time axis; NaN where there was no burst.
    nbytes : float
        Bytes of one burst of one producer.
    low_us, high_us : float
        The window. Inside a burst bytes are taken to be accepted evenly. While the pipe stays full
        what was accepted has also left, so this is the drain rate.
    """
    total = 0.0
    for b, e in zip(begin, end, strict=True):
        seen = np.isfinite(b) & np.isfinite(e)
        times = np.column_stack([b[seen], e[seen]]).ravel()
        if len(times) == 0:
            continue
        count = np.repeat(np.arange(len(times) // 2 + 1), 2)[1:-1]
        total += float(np.interp(high_us, times, count) - np.interp(low_us, times, count))
    return total * nbytes / (high_us - low_us) / BYTES_PER_US_PER_GBPS


@dataclasses.dataclass(frozen=True)
class Knee:
    """T = max(T0, (V - Q)/R) fitted to isolated bursts."""

    Q_bytes: Estimate
    R_GBps: Estimate

    def predict(self, volume: FloatArray, T0_us: FloatArray) -> FloatArray:
        """Issue time of an isolated burst, us."""
        rate = self.R_GBps.value * BYTES_PER_US_PER_GBPS
        return np.maximum(T0_us, (volume - self.Q_bytes.value) / rate)


def _hinge(
    x: FloatArray, y: FloatArray, floor: FloatArray, rate: float | None, start: tuple[float, float]
) -> tuple[float, float]:
    """Least absolute-like fit of max(floor, (x - Q)/R); relative error of 3% + 0.05 us weighs."""
    scale = 0.05 + 0.03 * y

    def residual(p: FloatArray) -> FloatArray:
        r = rate if rate is not None else float(np.exp(p[1]))
        return np.asarray(
            (np.maximum(floor, (x - p[0] * 1e6) / (r * BYTES_PER_US_PER_GBPS)) - y) / scale
        )

    first = [start[0] / 1e6] + ([np.log(start[1])] if rate is None else [])
    fit = optimize.least_squares(residual, first, loss="soft_l1", f_scale=1.0)
    return float(fit.x[0] * 1e6), rate if rate is not None else float(np.exp(fit.x[1]))


def knee(
    volume: npt.ArrayLike,
    time_us: npt.ArrayLike,
    T0_us: npt.ArrayLike,
    route: str,
    rate_GBps: float | None = None,
) -> Knee:
    """Segmented regression of isolated bursts: capacity Q and rate R.

    Parameters
    ----------
    volume, time_us, T0_us : array_like
        V in bytes, measured issue time, and the back-pressure-free time of the same burst.
    rate_GBps : float, optional
        Keep the rate fixed and fit the capacity alone.
    """
    floor = np.broadcast_to(np.asarray(T0_us, np.float64), np.shape(volume))
    keep = np.isfinite(np.asarray(volume, float)) & np.isfinite(np.asarray(time_us, float))
    x, y = clean(volume, time_us, 5, route)
    order = np.argsort(np.asarray(volume, np.float64)[keep], kind="stable")
    floor = floor[keep][order]
    stalled = y > 1.5 * floor + 0.1
    if np.count_nonzero(stalled) < 3:
        raise CalibrationError(
            f"{route}: expected at least 3 bursts beyond the knee, got "
            f"{np.count_nonzero(stalled)}; send more bytes"
        )
    slope, intercept = stats.theilslopes(y[stalled], x[stalled])[:2]
    first_rate = rate_GBps or (1.0 / slope / BYTES_PER_US_PER_GBPS if slope > 0 else 300.0)
    first_Q = max(0.0, -intercept / slope) if slope > 0 else float(x.min())
    index = np.arange(len(x), dtype=np.float64)

    def fit(rows: FloatArray) -> tuple[float, float]:
        i = rows.astype(int)
        return _hinge(x[i], y[i], floor[i], rate_GBps, (first_Q, first_rate))

    Q, R = fit(index)
    rng = np.random.default_rng(0)
    draws = np.array(
        [fit(np.sort(rng.integers(0, len(x), len(x))).astype(float)) for _ in range(RESAMPLES // 4)]
    )
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(draws, [tail, 1 - tail], axis=0)
    return Knee(
        Estimate(Q, float(low[0]), float(high[0]), f"{route}: knee", len(x)),
        Estimate(R, float(low[1]), float(high[1]), f"{route}: slope beyond the knee", len(x)),
    )


def agreement(first: Estimate, second: Estimate) -> float:
    """Relative difference of two routes to one number."""
    return abs(first.value - second.value) / max(abs(first.value), abs(second.value), 1e-30)


@dataclasses.dataclass(frozen=True)
class ShadowFit:
    """Latency = base + c tanh(w / c) with w = max(0, (V - passed)/R - delay), c = K cross/R.

    Attributes
    ----------
    base_us : float
        Without a burst.
    passed_bytes : array
        One value per number of producers, in the order of `producers`.
    cross_bytes : float or None
        None where no ceiling shows.
    error : float
        Median relative error over the points in the shadow (latency beyond twice the base).
    """

    base_us: float
    producers: FloatArray
    passed_bytes: FloatArray
    cross_bytes: float | None
    error: float

    def predict(
        self, K: FloatArray, nbytes: FloatArray, delay_us: FloatArray, rate_GBps: FloatArray
    ) -> FloatArray:
        """Latency in us."""
        passed = np.interp(K, self.producers, self.passed_bytes)
        rate = rate_GBps * BYTES_PER_US_PER_GBPS
        wait = np.maximum(0.0, np.maximum(0.0, K * nbytes - passed) / rate - delay_us)
        if self.cross_bytes is not None:
            ceiling = np.maximum(K * self.cross_bytes / rate, 1e-9)
            wait = ceiling * np.tanh(wait / ceiling)
        return np.asarray(self.base_us + wait)


def shadow(
    K: npt.ArrayLike,
    nbytes: npt.ArrayLike,
    delay_us: npt.ArrayLike,
    latency_us: npt.ArrayLike,
    rate_GBps: npt.ArrayLike,
    base_us: float,
    route: str,
) -> ShadowFit:
    """Fit the shadow's parameters to latencies by producers, bytes and delay."""
    k, b, d, y, r = (
        np.asarray(a, np.float64).ravel()
        for a in np.broadcast_arrays(K, nbytes, delay_us, latency_us, rate_GBps)
    )
    keep = np.isfinite(y) & np.isfinite(d)
    k, b, d, y, r = k[keep], b[keep], d[keep], y[keep], r[keep]
    if len(y) < 6:
        raise CalibrationError(f"{route}: expected at least 6 finite points, got {len(y)}")
    nodes = np.unique(k)
    scale = 0.1 + 0.1 * y

    def make(p: FloatArray, ceiling: bool) -> ShadowFit:
        cross = float(p[-1] * 1e3) if ceiling else None
        return ShadowFit(base_us, nodes, np.asarray(p[: len(nodes)] * 1e6), cross, np.nan)

    best: tuple[float, ShadowFit] | None = None
    # Several starts: the ceiling and what has passed trade against each other.
    starts = [(p, c) for p in (0.2, 0.8) for c in (None, 5.0, 25.0, 80.0)]
    for passed_start, ceiling_start in starts:
        ceiling = ceiling_start is not None
        start = [passed_start] * len(nodes) + ([ceiling_start] if ceiling else [])

        def residual(p: FloatArray, ceiling: bool = ceiling) -> FloatArray:
            return np.asarray((make(p, ceiling).predict(k, b, d, r) - y) / scale)

        low = [0.0] * len(nodes) + ([0.1] if ceiling else [])
        high = [50.0] * len(nodes) + ([1e3] if ceiling else [])
        fit = optimize.least_squares(
            residual, start, loss="soft_l1", bounds=(low, high), diff_step=1e-3
        )
        # A ceiling must earn its parameter: the cost is half a chi-square.
        cost = float(fit.cost) + (2.0 if ceiling else 0.0)
        if best is None or cost < best[0]:
            best = (cost, make(fit.x, ceiling))
    assert best is not None
    chosen = best[1]
    deep = y > 2 * base_us
    error = np.abs(chosen.predict(k, b, d, r) - y)[deep] / y[deep]
    return dataclasses.replace(chosen, error=float(np.median(error)) if len(error) else 0.0)
