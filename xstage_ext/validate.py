"""`xstage validate`: does the law predict what it has not seen?

The parameters are frozen in a profile. Predictions of the law and of every counterfactual are
written to disk first; then the same points are measured: other sizes, other numbers of producers,
other gaps, random gaps, all ranks sending, and bursts in step. Nothing is fitted here.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import itertools
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from . import _measure, _scores
from ._json import dumps
from ._measure import Row
from ._session import Session, on_all_gpus
from .burst import Point
from .calibrate import warn_when_busy
from .machine import MachineProfile, load
from .model import BurstGap, burst_shadow
from .producers import ProducerTrain, run_trains

KIB = 1024
LAWS = ("ours", "completion_coupled", "unbounded_async", "rate_only", "two_term", "three_term")
FAMILIES = {
    "train": "free-running trains, fixed gaps",
    "random": "free-running trains, random gaps, each producer its own",
    "random_common": "free-running trains, random gaps, the same for all producers",
    "both": "free-running trains, all ranks sending",
    "aligned": "bursts in step on an empty pipe",
}


@dataclasses.dataclass(frozen=True)
class Held:
    """A held-out point and the family it belongs to."""

    family: str
    point: Point


@dataclasses.dataclass(frozen=True)
class BenchGap:
    """What the bench makes of a gap: it lasts max(shortest, G + late), in us."""

    shortest_us: float
    late_us: float

    def mean(self, gaps_us: np.ndarray | float) -> float:
        """Mean of what the given gaps really last."""
        return float(np.mean(np.maximum(self.shortest_us, np.asarray(gaps_us) + self.late_us)))


def held_out_points(profile: MachineProfile, seed: int = 2026) -> list[Held]:
    """Points that no calibration fits: sizes, producers and gaps between and beyond the fitted."""
    rng = np.random.default_rng(seed)
    held = []
    for point, drain in _sizes_and_producers(profile):
        held.append(Held("aligned", point))
        for share in (0.0, 0.3, 0.6, 0.8, 0.9, 1.1, 1.4, 2.0):
            gap = round(share * drain, 2)
            held.append(Held("train", dataclasses.replace(point, gap_us=gap)))
        if point.nbytes not in (24 * KIB, 48 * KIB) or point.producers == 16:
            continue
        for share in (0.3, 0.6, 0.8, 1.3):
            gap = round(share * drain, 2)
            spaced = dataclasses.replace(point, gap_us=gap)
            for family, rows in (("random", point.producers), ("random_common", 1)):
                gaps = rng.uniform(0.0, 2.0 * gap, size=(rows, 256))
                held.append(Held(family, dataclasses.replace(spaced, gaps_us=gaps)))
            held.append(Held("both", spaced))
    return held


def _sizes_and_producers(profile: MachineProfile) -> Iterator[tuple[Point, float]]:
    """Points of the held-out sizes and producers, and the time V/R that each drains, us."""
    most = profile.gpu.num_sms
    producers = (16, round(0.38 * most), round(0.75 * most), most)
    for mechanism in ("st", "bulk", "tma"):
        rate = profile.mechanism(mechanism).R_GBps
        # A tensor store moves boxes of 64 rows of 128 bytes.
        sizes = (4, 16, 24, 48, 96) if mechanism == "tma" else (4, 12, 20, 24, 48, 96)
        for K, size in itertools.product(producers, sizes):
            point = Point(mechanism, K, size * KIB)
            yield point, point.volume / (float(rate(K)) * 1e3)


def predict(profile: MachineProfile, held: Held, bench: BenchGap) -> Row:
    """Issue time by our law and by every counterfactual, us, and whether each says `stalled`."""
    point = held.point
    law = BurstGap.of(
        profile.mechanism(point.mechanism),
        point.producers,
        point.nbytes,
        both_directions=held.family == "both",
    )
    gap = bench.mean(point.gap_us if point.gaps_us is None else point.gaps_us)
    in_step = held.family == "aligned"
    # In step on an empty pipe the gap is as good as infinite: only the capacity can stall.
    pause = np.inf if in_step else gap
    T0 = float(np.asarray(law.T0_us))
    predicted = {
        "ours": float(law.steady(pause) if in_step else law.free_running(pause)),
        "completion_coupled": float(law.completion_coupled()),
        "unbounded_async": T0,
        "rate_only": float(law.rate_only(pause)),
        "two_term": float(law.two_term(pause)),
        "three_term": float(law.steady(pause)),
    }
    return {
        "family": held.family,
        "mechanism": point.mechanism,
        "K": point.producers,
        "B": point.nbytes,
        "gap_us": point.gap_us,
        "T0_us": T0,
        "V_over_R_us": float(law.drain_us),
        "predicted": predicted,
    }


def predict_by_producers(
    profile: MachineProfile, held: list[Held], rows: list[Row], bench: BenchGap
) -> None:
    """Replace `ours` by the law producer by producer where unequal service matters.

    That is where something holds producers in step: bursts in step, and random gaps in common.
    """
    trains, chosen = [], []
    for i, one in enumerate(held):
        point = one.point
        mechanism = profile.mechanism(point.mechanism)
        K, nbytes = point.producers, point.nbytes
        gaps = np.zeros((1, 1)) if point.gaps_us is None else point.gaps_us
        train = ProducerTrain(
            K,
            nbytes,
            float(mechanism.T0_us(K, nbytes)),
            float(mechanism.R_GBps(K)),
            float(mechanism.Q_bytes(K)),
            np.maximum(bench.shortest_us, gaps + bench.late_us),
            mechanism.shares,
        )
        if one.family == "aligned":
            rows[i]["predicted"]["ours"] = float(train.isolated().mean())
        elif one.family == "random_common":
            chosen.append(i)
            trains.append(train)
    windows = [_measure.settled_until(_measure.window_for(held[i].point).window_us) for i in chosen]
    means = run_trains(trains, windows, _measure.WARM_US).mean_us
    for i, mean in zip(chosen, means, strict=True):
        rows[i]["predicted"]["ours"] = float(mean)


def measure_point(session: Session, held: Held) -> Row | None:
    """Measure one point; collective for the family `both`, else the leading rank's affair."""
    if held.family == "both":
        row = _measure.train_everywhere(session, held.point)
        return row if session.leads else None
    if not session.leads:
        return None
    if held.family == "aligned":
        return _measure.isolated(session.bench, held.point)
    return _measure.train(session.bench, held.point)


def shadow_points(profile: MachineProfile) -> list[tuple[str, Point, tuple[float, ...]]]:
    """(probe, point, delays) that the shadow's fit has not seen."""
    most = profile.gpu.num_sms
    return [
        (probe, Point(mechanism, K, size * KIB), (1.5, 3.0, 6.0, 10.0))
        for mechanism in ("st", "bulk", "tma")
        for probe in ("load", "atomic", "bulk_load", "tma_load")
        for K in (round(0.6 * most), most)
        for size in (24, 48)
    ]


def _on_rank(session: Session, profile: MachineProfile, out: pathlib.Path) -> dict[str, Any] | None:
    console = Console(stderr=True, quiet=not session.leads)
    warn_when_busy(session, console)
    session.bench.calibrate_clock()
    profile.require(session.facts[0].name)
    held = held_out_points(profile)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not session.leads) as bar:
        task = bar.add_task("predicting", total=None)
        _measure.wake_link(session.bench)
        bench = BenchGap(*_measure.gap_overhead(session.bench))
        rows = [predict(profile, one, bench) for one in held]
        predict_by_producers(profile, held, rows, bench)
        shadows = _predict_shadows(profile)
        if session.leads:
            _write_predictions(profile, rows, shadows, bench, out)
        bar.update(task, description=f"measuring {len(held)} held-out points")
        for row, one in zip(rows, held, strict=True):
            seen = measure_point(session, one)
            if seen is not None:
                row["measured"] = {
                    key: seen[key]
                    for key in ("mean", "median", "p95", "max", "producer_mean", "R_GBps")
                    if key in seen
                }
        bar.update(task, description="measuring the shadow")
        if session.leads:
            _measure_shadows(session, profile, shadows)
    return {"rows": rows, "shadows": shadows} if session.leads else None


def _predict_shadows(profile: MachineProfile) -> list[Row]:
    return [
        {
            "mechanism": point.mechanism,
            "probe": probe,
            "K": point.producers,
            "B": point.nbytes,
            "delay_us": delay,
            "base_us": profile.shadow_of(point.mechanism, probe).base_us,
            "predicted_us": float(
                burst_shadow(profile, point.mechanism, probe, point.producers, point.nbytes, delay)
            ),
        }
        for probe, point, delays in shadow_points(profile)
        for delay in delays
    ]


def _measure_shadows(session: Session, profile: MachineProfile, shadows: list[Row]) -> None:
    measured = [
        row["median"]
        for probe, point, delays in shadow_points(profile)
        for row in _measure.shadow_rows(session.bench, point, probe, delays)
    ]
    for shadow, median in zip(shadows, measured, strict=True):
        shadow["measured_us"] = median


def _write_predictions(
    profile: MachineProfile, rows: list[Row], shadows: list[Row], bench: BenchGap, out: pathlib.Path
) -> None:
    out.mkdir(parents=True, exist_ok=True)
    record = {
        "profile": profile.name,
        "profile_sha256": hashlib.sha256(profile.to_json().encode()).hexdigest(),
        "written": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "bench_gap": dataclasses.asdict(bench),
        "points": rows,
        "shadows": shadows,
    }
    text = (
        dumps(record).replace('{"family"', '\n{"family"').replace('{"mechanism"', '\n{"mechanism"')
    )
    (out / "predictions.json").write_text(text + "\n", encoding="utf-8")


def run(out: pathlib.Path, profile_source: str | None = None) -> dict[str, Any] | None:
    """Predict, measure, compare; writes predictions.json, validation.json, .md and .png to `out`.

    Returns
    -------
    The scores (`_scores.score`); None on ranks that do not lead.
    """
    profile = load(profile_source)
    result = on_all_gpus(_on_rank, profile, out)
    if result is None:
        return None
    scores = _scores.score(result["rows"], result["shadows"], profile)
    record = {"profile": profile.name, "scores": scores} | result
    text = (
        dumps(record).replace('{"family"', '\n{"family"').replace('{"mechanism"', '\n{"mechanism"')
    )
    (out / "validation.json").write_text(text + "\n", encoding="utf-8")
    report = _scores.markdown(scores, profile, FAMILIES)
    (out / "validation.md").write_text(report, encoding="utf-8")
    _scores.picture(result["rows"], profile, out / "validation.png")
    print(report)
    return scores
