"""The Burst-Gap law producer by producer: who is served how fast decides who stays in step.

`model.BurstGap` treats K producers as one. On the machine each has a queue of its own, of capacity
Q/K, and the link serves the queues that are not empty at unequal rates (`Mechanism.shares`). Two
things follow that the lumped law cannot say: a train that begins in step loses step within a few
bursts, and gaps that are random but the same for everybody stall some bursts of a link that is not
full on average. With equal shares this *is* the lumped recursion.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from .machine import FloatArray, FloatLike

STEP_US = 0.1


@dataclasses.dataclass(frozen=True)
class ProducerTrain:
    """One train: K producers, B bytes each, gaps, on a link of a given law.

    Attributes
    ----------
    K, B_bytes : float
    T0_us, R_GBps, Q_bytes : float
        As in `model.BurstGap`, for this K and B.
    gaps_us : array [rows, n]
        Gap after each burst, cyclically; row `k % rows` belongs to producer k.
    shares : sequence of float
        Relative service rates as evenly spaced quantiles; empty means equal.
    """

    K: int
    B_bytes: float
    T0_us: float
    R_GBps: float
    Q_bytes: float
    gaps_us: FloatArray
    shares: Sequence[float] = ()

    def weights(self) -> FloatArray:
        """Service weight of every producer, mean 1; which producer has which is arbitrary."""
        if len(self.shares) == 0:
            return np.ones(self.K)
        quantiles = (np.arange(self.K) + 0.5) / self.K
        nodes = (np.arange(len(self.shares)) + 0.5) / len(self.shares)
        weights = np.interp(quantiles, nodes, np.asarray(self.shares, np.float64))
        weights = np.random.default_rng(self.K).permutation(weights)
        return np.asarray(weights / weights.mean())

    def isolated(self) -> FloatArray:
        """Issue time of every producer when all begin together on an empty pipe, us; [K].

        A producer is done when all but Q/K of its bytes have left. The link serves by weight those
        who still have bytes, so the time at which `x` bytes per unit of weight have left is
        t(x) = sum over producers of min(w x, B) / R, and producer k is done at t((B - Q/K) / w_k).
        With equal weights this is (V - Q)/R.
        """
        weights = self.weights()
        need = max(0.0, self.B_bytes - self.Q_bytes / self.K) / weights
        left = np.minimum(weights[None, :] * need[:, None], self.B_bytes).sum(axis=1)
        return np.asarray(np.maximum(self.T0_us, left / (self.R_GBps * 1e3)))


@dataclasses.dataclass(frozen=True)
class TrainTimes:
    """Issue times of trains.

    Attributes
    ----------
    mean_us : array [trains]
        Mean over all bursts that begin between `warm_us` and the end of the train's window.
    first_us : array [trains, bursts]
        Mean over producers of the first bursts; NaN where the window ended before.
    """

    mean_us: FloatArray
    first_us: FloatArray


def _rows(values: Sequence[float]) -> FloatArray:
    return np.asarray(values, np.float64)[:, None]


def run_trains(
    trains: Sequence[ProducerTrain],
    windows_us: FloatLike = 500.0,
    warm_us: float = 150.0,
    first: int = 8,
) -> TrainTimes:
    """Run trains as fluids in steps of `STEP_US`, all at once.

    In a step a producer that issues hands over bytes at B/T0 until its queue holds Q/K, then as
    fast as its queue is served; queues share R by weight. Ends of bursts are interpolated.

    Parameters
    ----------
    trains
        They do not influence each other.
    windows_us : array_like
        Time until which bursts of each train count; a number or one per train. Gaps that are equal
        for all producers have a mean of their own in every window, so compare equal windows.
    warm_us : float
        Bursts that begin earlier do not count.
    first : int
        Bursts of `TrainTimes.first_us`.
    """
    windows = np.broadcast_to(np.asarray(windows_us, np.float64), len(trains))
    P, most = len(trains), max(train.K for train in trains)
    n = max(train.gaps_us.shape[1] for train in trains)
    real = np.zeros((P, most), bool)
    weight = np.zeros((P, most))
    gaps = np.zeros((P, most, n))
    for i, train in enumerate(trains):
        real[i, : train.K] = True
        weight[i, : train.K] = train.weights()
        rows = np.arange(train.K) % train.gaps_us.shape[0]
        gaps[i, : train.K] = np.resize(train.gaps_us[rows].T, (n, train.K)).T
    size = _rows([train.B_bytes for train in trains])
    T0 = _rows([train.T0_us for train in trains])
    rate = _rows([train.R_GBps for train in trains]) * 1e3 * STEP_US
    issue = size / np.maximum(T0, 1e-3) * STEP_US
    capacity = _rows([train.Q_bytes / train.K for train in trains])

    backlog = np.zeros((P, most))
    left = np.where(real, size, 0.0)
    begin = np.zeros((P, most))
    index = np.zeros((P, most), np.intp)
    total, count = np.zeros(P), np.zeros(P)
    sums, seen = np.zeros((P, first)), np.zeros((P, first))
    for step in range(round(float(windows.max()) / STEP_US)):
        now = step * STEP_US
        # The part of this step in which the producer issues.
        part = np.clip((now + STEP_US - begin) / STEP_US, 0.0, 1.0) * (left > 0)
        busy = real & ((backlog > 1.0) | (part > 0))
        served = np.where(busy, weight, 0.0)
        served *= rate / np.maximum(served.sum(axis=1, keepdims=True), 1e-12)
        offered = np.minimum(issue * part, np.maximum(capacity - backlog, 0.0) + served)
        taken = np.minimum(offered, left)
        backlog = np.maximum(backlog + taken - served, 0.0)
        ended = (left > 0) & (taken >= left - 1e-6) & (part > 0)
        fraction = np.where(ended, left / np.maximum(offered, 1e-9), 1.0)
        left -= taken
        at = np.nonzero(ended)
        which, burst = at[0], index[at]
        if len(which) == 0:
            continue
        end = np.maximum(begin[at], now) + fraction[at] * part[at] * STEP_US
        T = np.maximum(end - begin[at], T0[which, 0])
        settled = (begin[at] >= warm_us) & (begin[at] <= windows[which])
        np.add.at(total, which[settled], T[settled])
        np.add.at(count, which[settled], 1.0)
        early = burst < first
        np.add.at(sums, (which[early], burst[early]), T[early])
        np.add.at(seen, (which[early], burst[early]), 1.0)
        begin[at] += T + gaps[at[0], at[1], burst % n]
        index[at] += 1
        left[at] = size[which, 0]
    with np.errstate(invalid="ignore", divide="ignore"):
        return TrainTimes(total / count, sums / seen)
