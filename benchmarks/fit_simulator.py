"""Fits the simulator's assumptions to the sweep's measured plans, and scores them.

    python benchmarks/fit_simulator.py                    # score simulate.Assumptions as they are
    python benchmarks/fit_simulator.py --fit sustained setup_us ...   # search these fields

Only plans of the shapes that are not held out are fitted to. The search takes random steps; its
result is printed, to be written into simulate.Assumptions by hand. What the kernel's trace shows
(`linear1_hand_over_us` and others in the sweep's results) is better read there than fitted.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import time
from collections.abc import Callable, Sequence

import _plans
import _report
import numpy as np
import numpy.typing as npt

from xstage_ext import machine, simulate

FloatArray = npt.NDArray[np.float64]
NUMBERS = [
    field.name for field in dataclasses.fields(simulate.Assumptions) if type(field.default) is float
]
"""Fields that can be searched."""


@dataclasses.dataclass(frozen=True)
class Point:
    """A measured plan of a configuration."""

    case: _plans.Case
    measured: _plans.Measured


def points_of(cases: Sequence[_plans.Case]) -> list[Point]:
    """Every measured plan."""
    return [Point(case, plan) for case in cases for plan in case.plans]


def subset(points: Sequence[Point], plans: int) -> list[Point]:
    """As many plans of every configuration, drawn from all kinds."""
    taken: dict[int, int] = {}
    chosen = []
    for number in np.random.default_rng(1).permutation(len(points)):
        index = points[number].case.config.index
        taken[index] = taken.get(index, 0) + 1
        if taken[index] <= plans:
            chosen.append(points[number])
    return chosen


def predicted_us(
    points: Sequence[Point], profile: machine.MachineProfile, assume: simulate.Assumptions
) -> FloatArray:
    """Of every point; the simulator runs without Python's lock, so threads share the work."""

    def one(point: Point) -> float:
        result = simulate.simulate_megamoe(
            point.measured.plan,
            point.case.load.counts,
            profile,
            rank=point.case.load.rank,
            assume=assume,
            num_tokens=point.case.config.tokens,
        )
        return result.total_us

    with concurrent.futures.ThreadPoolExecutor() as threads:
        return np.array(list(threads.map(one, points)))


def errors(points: Sequence[Point], predicted: FloatArray) -> FloatArray:
    """Logarithm of predicted over measured."""
    return np.asarray(np.log(predicted / np.array([point.measured.us for point in points])))


def within(points: Sequence[Point], error: FloatArray) -> FloatArray:
    """Errors of the plans of a configuration among each other: less what they have in common."""
    numbers = np.array([point.case.config.index for point in points])
    common = {n: np.median(error[numbers == n]) for n in np.unique(numbers)}
    return error - np.array([common[n] for n in numbers])


def loss(points: Sequence[Point], error: FloatArray) -> float:
    """Mean absolute error, and as much again for plans of a configuration among each other."""
    return float(np.abs(error).mean() + np.abs(within(points, error)).mean())


def search(
    start: simulate.Assumptions,
    fields: Sequence[str],
    cost: Callable[[simulate.Assumptions], float],
    seconds: float,
) -> simulate.Assumptions:
    """Random steps in all fields at once, longer after a success and shorter after a failure."""
    best, least = start, cost(start)
    random, width = np.random.default_rng(0), 0.15
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and width > 0.005:
        factors = np.exp(width * random.standard_normal(len(fields)))
        values = {f: float(getattr(best, f) * x) for f, x in zip(fields, factors, strict=True)}
        trial = dataclasses.replace(best, **values)
        seen = cost(trial)
        if seen < least:
            best, least = trial, seen
            width *= 1.5
            told = ", ".join(f"{f} {v:.3g}" for f, v in values.items())
            print(f"{least:.4f}  {told}", flush=True)
        else:
            width *= 0.94
    return best


def summary(points: Sequence[Point], error: FloatArray) -> str:
    """Errors and what the best prediction of each configuration costs, fitted and held out."""
    lines = ["shapes      plans   error    95%    bias  among each other    95%  regret  worst"]
    for held_out in (False, True):
        chosen = np.array([point.case.config.held_out == held_out for point in points])
        if not chosen.any():
            continue
        mine = [point for point, c in zip(points, chosen, strict=True) if c]
        wrong, relative = np.abs(error[chosen]), np.abs(within(mine, error[chosen]))
        cost = regrets(mine, error[chosen])
        lines.append(
            f"{'held out' if held_out else 'fitted':10}{len(mine):7}{np.median(wrong):8.1%}"
            f"{np.percentile(wrong, 95):7.1%}{np.median(error[chosen]):+8.1%}"
            f"{np.median(relative):18.1%}{np.percentile(relative, 95):7.1%}"
            f"{np.median(cost):8.1%}{max(cost):7.1%}"
        )
    return "\n".join(lines)


def summary_alone(
    points: Sequence[Point], profile: machine.MachineProfile, assume: simulate.Assumptions
) -> str:
    """The same constants without a pause between calls, against plans that follow themselves.

    Nothing was fitted to these times: what changes is the clock that the law of power predicts.
    """
    mine = [point for point in points if point.measured.alone_us]
    if not mine:
        return "alone: not measured"
    seen = np.array([point.measured.usual_alone_us for point in mine])
    back_to_back = dataclasses.replace(assume, idle_us=0.0)
    error = np.log(predicted_us(mine, profile, back_to_back) / seen)
    return (
        f"alone, nothing fitted: {len(mine)} plans, error {np.median(np.abs(error)):.1%}, 95% "
        f"{np.percentile(np.abs(error), 95):.1%}, bias {np.median(error):+.1%}"
    )


def regrets(points: Sequence[Point], error: FloatArray) -> list[float]:
    """Per configuration: what the plan costs that is predicted to be the fastest."""
    by_config: dict[int, list[tuple[float, _plans.Measured]]] = {}
    for point, wrong in zip(points, error, strict=True):
        predicted = point.measured.us * float(np.exp(wrong))
        by_config.setdefault(point.case.config.index, []).append((predicted, point.measured))
    return [
        _plans.regret([plan for _, plan in plans], min(plans, key=lambda pair: pair[0])[1])
        for plans in by_config.values()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fit", nargs="*", default=[], choices=NUMBERS, metavar="FIELD",
                        help=f"fields of simulate.Assumptions: {', '.join(NUMBERS)}")  # fmt: skip
    parser.add_argument("--results", nargs="*", default=["sweep_84.jsonl"])
    parser.add_argument("--profile", default="h200x2")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--plans", type=int, default=5, help="fit to so many per configuration")
    options = parser.parse_args()
    profile = machine.load(options.profile)
    lines = [line for file in options.results for line in _report.read(file)]
    points = points_of(_plans.read(lines))
    assume = simulate.Assumptions()
    if options.fit:
        fitted = subset([p for p in points if not p.case.config.held_out], options.plans)

        def cost(trial: simulate.Assumptions) -> float:
            return loss(fitted, errors(fitted, predicted_us(fitted, profile, trial)))

        assume = search(assume, options.fit, cost, options.seconds)
        print(assume)
    print(summary(points, errors(points, predicted_us(points, profile, assume))))
    print(summary_alone(points, profile, assume))


if __name__ == "__main__":
    main()
