"""From rows of measurements to a machine profile: pure, so that tests need no GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np
from scipy import optimize

from . import _fits
from ._fits import Estimate
from ._measure import STALL_FACTOR, STALL_US, Row
from .errors import CalibrationError
from .machine import Interval, IssueTable, Mechanism, ProducerCurve, Shadow
from .producers import ProducerTrain

MECHANISMS = ("st", "bulk", "tma")
PROBES = ("load", "atomic", "bulk_load", "tma_load")
SHADOW_SETTLES_US = 0.9
"""Earlier probes may overtake a burst whose copies are still being issued; they are not fitted."""
KIB = 1024


@dataclasses.dataclass(frozen=True)
class Finding:
    """One estimate of one quantity, for the report. `quantity` reads `st/R_GBps@132`."""

    quantity: str
    estimate: Estimate
    chosen: bool

    def asdict(self) -> dict[str, Any]:
        """Plain dict for JSON."""
        return {"quantity": self.quantity, "chosen": self.chosen} | dataclasses.asdict(
            self.estimate
        )


def select(rows: Iterable[Row], **wanted: Any) -> list[Row]:
    """Rows whose fields have the wanted values."""
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


def column(rows: list[Row], key: str) -> np.ndarray:
    """One field of all rows, NaN where it is absent."""
    return np.array([row.get(key, np.nan) for row in rows], dtype=np.float64)


def _volume(rows: list[Row]) -> np.ndarray:
    return np.asarray(column(rows, "K") * column(rows, "B"))


def fit_T0(rows: list[Row], mechanism: str) -> tuple[IssueTable, list[Finding]]:
    """T0(K, B): the plateau of free-running trains with long gaps, beside the local control.

    `isolated_T0` is the third route.
    """
    plateau = select(rows, kind="plateau", mechanism=mechanism)
    producers = sorted({int(row["K"]) for row in plateau})
    sizes = sorted({int(row["B"]) for row in plateau})
    if not producers or len(sizes) < 3:
        raise CalibrationError(
            f"{mechanism}: T0: expected plateau rows of 3 or more sizes, got sizes {sizes} of "
            f"producers {producers}"
        )
    findings, table = [], []
    for K in producers:
        line = []
        for B in sizes:
            values = column(select(plateau, K=K, B=B), "median")
            estimate = _fits.median(values, "plateau, long gaps", fewest=1)
            findings.append(Finding(f"{mechanism}/T0_us@{K},{B}", estimate, True))
            line.append(estimate.value)
            control = select(rows, kind="control", mechanism=mechanism, K=K, B=B)
            if control:
                local = _fits.median(column(control, "median"), "local memory", fewest=1)
                findings.append(Finding(f"{mechanism}/T0_us@{K},{B}", local, False))
        table.append(tuple(line))
    return (
        IssueTable(tuple(map(float, producers)), tuple(map(float, sizes)), tuple(table)),
        findings,
    )


def isolated_T0(
    rows: list[Row], mechanism: str, T0: IssueTable, R: ProducerCurve, Q: ProducerCurve
) -> list[Finding]:
    """T0(K, B) from bursts in step on an empty pipe, where the law says that they do not stall."""
    single = select(rows, kind="isolated", mechanism=mechanism, fence=False, local=False)
    findings = []
    for K in map(int, T0.producers):
        # Of few producers no capacity is seen; that of an SM is taken as where it is.
        seen = K if K in Q.producers else Q.producers[0]
        capacity = float(Q(seen)) * K / seen
        for B in map(int, T0.nbytes):
            some = select(single, K=K, B=B)
            drained = float(R(K)) * float(T0(K, B)) * _fits.BYTES_PER_US_PER_GBPS
            # Well in front of the knee, which is not sharp.
            if some and capacity + 0.9 * drained >= K * B:
                estimate = _fits.median(column(some, "mean"), "in step, empty pipe", fewest=1)
                findings.append(Finding(f"{mechanism}/T0_us@{K},{B}", estimate, False))
    return findings


def fit_R(rows: list[Row], mechanism: str, T0: IssueTable) -> tuple[ProducerCurve, list[Finding]]:
    """R(K): throughput of saturated trains, and the slope of the time until visible over V."""
    fenced = select(rows, kind="isolated", mechanism=mechanism, fence=True, local=False)
    producers = sorted({int(row["K"]) for row in fenced})
    findings, values = [], []
    for K in producers:
        # Shorter bursts end before the last bytes of the first stores have arrived.
        some = [row for row in select(fenced, K=K) if row["B"] >= 32 * KIB]
        slope = _fits.rate_from_slope(
            _volume(some), column(some, "visible_slowest"), "slope of the time until visible"
        )
        saturated = [row for row in _saturated(rows, mechanism, K, T0) if row["B"] >= 32 * KIB]
        long = select(rows, kind="long", mechanism=mechanism, K=K)
        chosen = slope
        if saturated:
            chosen = _fits.median(
                column(saturated, "R_GBps"), "throughput of saturated trains", fewest=1
            )
            findings.append(Finding(f"{mechanism}/R_GBps@{K}", chosen, True))
        findings.append(Finding(f"{mechanism}/R_GBps@{K}", slope, not saturated))
        if long:
            rate = _fits.median(
                column(long, "R_GBps"),
                f"throughput of bursts of {long[0]['B'] >> 20} MiB",
                fewest=1,
            )
            findings.append(Finding(f"{mechanism}/R_GBps@{K}", rate, False))
        values.append(chosen.value)
    return ProducerCurve(tuple(map(float, producers)), tuple(values)), findings


def fit_Q(
    rows: list[Row],
    mechanism: str,
    T0: IssueTable,
    R: ProducerCurve,
    slowest: bool,
    shares: tuple[float, ...] = (),
) -> tuple[ProducerCurve, list[Finding]]:
    """Q(K): the knee of isolated bursts; beside it the lead of a saturated train over the drain.

    The mean producer's knee allows for unequal service (`ProducerTrain.isolated`).
    """
    name = "Q_slowest_bytes" if slowest else "Q_bytes"
    single = select(rows, kind="isolated", mechanism=mechanism, fence=False, local=False)
    findings, producers, values = [], [], []
    for K in sorted({int(row["K"]) for row in single}):
        some = select(single, K=K)
        rate = float(R(K))
        try:
            knee = _fits.knee(
                _volume(some),
                column(some, "slowest" if slowest else "mean"),
                T0(K, column(some, "B")),
                "isolated bursts",
                rate,
            )
        except CalibrationError:
            # Few producers issue more slowly than the link drains: no knee, no capacity to see.
            continue
        capacity = knee.Q_bytes
        if not slowest and shares:
            capacity = _knee_of_unequal(some, K, T0, rate, shares, capacity)
        findings.append(Finding(f"{mechanism}/{name}@{K}", capacity, True))
        producers.append(float(K))
        values.append(max(0.0, capacity.value))
        lead = None if slowest else _lead(_saturated(rows, mechanism, K, T0), rate)
        if lead is not None:
            findings.append(Finding(f"{mechanism}/{name}@{K}", lead, False))
    if not producers:
        raise CalibrationError(
            f"{mechanism}: Q: no number of producers overfilled the link; send longer bursts"
        )
    return ProducerCurve(tuple(producers), tuple(values)), findings


def _knee_of_unequal(
    rows: list[Row],
    K: int,
    T0: IssueTable,
    rate: float,
    shares: tuple[float, ...],
    start: Estimate,
) -> Estimate:
    """Q from the means of isolated bursts of producers that are served unequally."""
    nbytes, seen = _fits.clean(column(rows, "B"), column(rows, "mean"), 5, start.route)
    sizes = np.unique(nbytes)
    floors = {B: float(T0(K, B)) for B in sizes}

    def misfit(Q: float) -> float:
        gaps = np.zeros((1, 1))
        mean = {
            B: float(ProducerTrain(K, B, floors[B], rate, Q, gaps, shares).isolated().mean())
            for B in sizes
        }
        error = np.array([mean[B] for B in nbytes]) - seen
        return float(np.sum(np.abs(error) / (0.05 + 0.03 * seen)))

    # The misfit has more than one minimum: a grid first.
    grid = np.linspace(0.0, 2.0, 41) * start.value
    best = int(np.argmin([misfit(Q) for Q in grid]))
    near = (float(grid[max(best - 1, 0)]), float(grid[min(best + 1, 40)]))
    found = float(optimize.minimize_scalar(misfit, bounds=near, method="bounded").x)
    # The interval of the plain knee, moved: the same scatter makes it.
    shift = found - start.value
    route = start.route.replace("knee", "knee, producers served by their shares")
    return Estimate(found, start.low + shift, start.high + shift, route, start.points)


def _saturated(rows: list[Row], mechanism: str, K: int, T0: IssueTable) -> list[Row]:
    """Trains without gaps whose bursts are stalled."""
    return [
        row
        for row in select(rows, kind="train", mechanism=mechanism, K=K, gap_us=0.0)
        if row["median"] > STALL_FACTOR * float(T0(K, row["B"])) + STALL_US
    ]


def _lead(trains: list[Row], rate: float) -> Estimate | None:
    """How far the bytes that a saturated train handed over are ahead of those that have left.

    Handed over are Q + R t once the pipe is full. Read soon after, before an error of R counts.
    """
    leads = []
    for row in trains:
        times, taken = np.array(row.get("accepted", np.empty((0, 2)))).T
        soon = times <= 2.0 * times[:1]
        leads.append(taken[soon] - rate * _fits.BYTES_PER_US_PER_GBPS * times[soon])
    if not any(len(lead) for lead in leads):
        return None
    values = [float(np.median(lead)) for lead in leads if len(lead)]
    return _fits.median(values, "lead of a saturated train over the drain", fewest=1)


def fit_visibility(
    rows: list[Row], mechanism: str, R: ProducerCurve
) -> tuple[float, list[Finding]]:
    """From the departure of the last byte until a fence returns."""
    fenced = select(rows, kind="isolated", mechanism=mechanism, fence=True, local=False)
    some = [row for row in fenced if row["K"] >= 8 and row["B"] >= 16 * KIB]
    drained = _volume(some) / (R(column(some, "K")) * _fits.BYTES_PER_US_PER_GBPS)
    estimate = _fits.median(
        column(some, "visible_slowest") - drained, "time until visible less V/R", fewest=3
    )
    return max(0.0, estimate.value), [Finding(f"{mechanism}/visibility_us", estimate, True)]


def fit_R_both(rows: list[Row], mechanism: str) -> tuple[ProducerCurve | None, list[Finding]]:
    """R(K) while the opposite direction is as busy."""
    both = select(rows, kind="both", mechanism=mechanism, gap_us=0.0)
    findings, producers, values = [], [], []
    for K in sorted({int(row["K"]) for row in both}):
        estimate = _fits.median(
            column(select(both, K=K), "R_GBps"), "throughput, both directions busy", fewest=1
        )
        findings.append(Finding(f"{mechanism}/R_both_GBps@{K}", estimate, True))
        producers.append(float(K))
        values.append(estimate.value)
    return (ProducerCurve(tuple(producers), tuple(values)) if producers else None), findings


def fit_shares(rows: list[Row], mechanism: str, T0: IssueTable) -> tuple[float, ...]:
    """Relative service rates of the producers while all of them saturate the link."""
    trains = [
        row
        for row in select(rows, kind="train", mechanism=mechanism, gap_us=0.0)
        if "shares" in row
        and row["median"] > STALL_FACTOR * float(T0(row["K"], row["B"])) + STALL_US
    ]
    if not trains:
        return ()
    most = max(row["K"] for row in trains)
    shares = np.median([row["shares"] for row in trains if row["K"] == most], axis=0)
    return tuple(round(float(share), 4) for share in shares)


def fit_mechanism(rows: list[Row], mechanism: str) -> tuple[Mechanism, list[Finding]]:
    """All parameters of one way to store, with every route to each."""
    T0, found_T0 = fit_T0(rows, mechanism)
    R, found_R = fit_R(rows, mechanism, T0)
    shares = fit_shares(rows, mechanism, T0)
    Q, found_Q = fit_Q(rows, mechanism, T0, R, slowest=False, shares=shares)
    Q_slowest, found_slowest = fit_Q(rows, mechanism, T0, R, slowest=True)
    visibility, found_visibility = fit_visibility(rows, mechanism, R)
    R_both, found_both = fit_R_both(rows, mechanism)
    found_T0 += isolated_T0(rows, mechanism, T0, R, Q)
    findings = found_T0 + found_R + found_Q + found_slowest + found_visibility + found_both
    intervals = {
        finding.quantity.split("/", 1)[1]: Interval(
            round(finding.estimate.low, 4), round(finding.estimate.high, 4)
        )
        for finding in findings
        if finding.chosen and not finding.quantity.split("/", 1)[1].startswith("T0")
    }
    return (
        Mechanism(
            T0_us=_rounded(T0),
            R_GBps=_round_curve(R, 1),
            Q_bytes=_round_curve(Q, 0),
            Q_slowest_bytes=_round_curve(Q_slowest, 0),
            visibility_us=round(visibility, 3),
            R_both_GBps=None if R_both is None else _round_curve(R_both, 1),
            intervals=intervals,
            shares=shares,
        ),
        findings,
    )


def fit_shadow(
    rows: list[Row], mechanism: str, probe: str, R: ProducerCurve
) -> tuple[Shadow, float]:
    """The shadow's parameters, and the median relative error of the fit inside the shadow."""
    probes = select(rows, kind="shadow", probe=probe)
    quiet = column(select(probes, K=0), "median")
    base = _fits.median(quiet, f"{probe} without a burst", fewest=1).value
    cast = [
        row
        for row in select(probes, mechanism=mechanism, local=False)
        if row["K"] > 0 and row["delay_us"] >= SHADOW_SETTLES_US
    ]
    fit = _fits.shadow(
        column(cast, "K"),
        column(cast, "B"),
        column(cast, "delay_us"),
        column(cast, "median"),
        R(column(cast, "K")),
        base,
        f"shadow of {mechanism} on {probe}",
    )
    shadow = Shadow(
        base_us=round(base, 3),
        passed_bytes=ProducerCurve(
            tuple(float(k) for k in fit.producers), tuple(round(float(v)) for v in fit.passed_bytes)
        ),
        cross_bytes=None if fit.cross_bytes is None else round(fit.cross_bytes),
    )
    return shadow, fit.error


def routes_differ(findings: list[Finding], name: str) -> dict[str, float]:
    """Largest relative difference between the routes to each quantity whose name holds `name`."""
    result: dict[str, float] = {}
    for quantity in sorted({f.quantity for f in findings if name in f.quantity}):
        values = [f.estimate for f in findings if f.quantity == quantity]
        if len(values) > 1:
            result[quantity] = max(_fits.agreement(values[0], other) for other in values[1:])
    return result


def _round_curve(curve: ProducerCurve, digits: int) -> ProducerCurve:
    return ProducerCurve(curve.producers, tuple(round(v, digits) for v in curve.values))


def _rounded(table: IssueTable) -> IssueTable:
    us = tuple(tuple(round(v, 4) for v in row) for row in table.us)
    return IssueTable(table.producers, table.nbytes, us)
