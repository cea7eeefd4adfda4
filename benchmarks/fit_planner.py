"""Fits the planner's ranking of plans to the measured sweep, and judges it by shapes left out.

    python benchmarks/fit_planner.py            # judge the weights that the package ships
    python benchmarks/fit_planner.py --fit      # fit them again and write them

The weights are a ridge regression per family of plans (xstage_ext/planner/ranking.py), from shapes
that are not held out. Their penalty is chosen by leaving out one of these shapes after the other.
A plan's time is a weighted mean of two: in turns with other plans, and following itself. Where no
row crosses the link there is one order of families, by their mean times (bench_at_home.py).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence

import _plans
import _report
import numpy as np
from render_readme import origin

from xstage_ext import machine
from xstage_ext.planner import ranking
from xstage_ext.planner.choose import family_plan
from xstage_ext.planner.dispatch import dispatch_of

PENALTIES = (0.01, 0.03, 0.1)
Families = dict[str, _plans.Measured]


def families_of(case: _plans.Case, profile: machine.MachineProfile) -> Families:
    """What was measured for each family's plan; families may share a plan."""
    found = {}
    for name, fields in ranking.FAMILIES.items():
        plan = family_plan(case.config.problem, profile, ranking.DEFAULTS | fields)
        one = case.of(plan)
        if one is not None:
            found[name] = one
    return found


def features_of(case: _plans.Case, profile: machine.MachineProfile) -> tuple[float, ...]:
    """Of a configuration whose families' plans move tokens by the rule."""
    problem = case.config.problem
    return ranking.features(problem, profile, dispatch_of(problem, profile))


def fit(
    cases: Sequence[_plans.Case],
    profile: machine.MachineProfile,
    penalty: float,
    source: str = "",
    at_home: Mapping[str, float] | None = None,
) -> ranking.Ranking:
    """Weights from measured configurations."""
    values = np.array([features_of(case, profile) for case in cases])
    rows: dict[str, list[list[float]]] = {name: [] for name in ranking.FAMILIES}
    logs: dict[str, list[float]] = {name: [] for name in ranking.FAMILIES}
    for case, value in zip(cases, values, strict=True):
        found = families_of(case, profile)
        times = {name: np.log(case.typical_us(one)) for name, one in found.items()}
        mean = np.mean(list(times.values()))
        for name in found:
            rows[name].append(ranking.terms(value.tolist()))
            logs[name].append(float(times[name] - mean))
    weights = {}
    for name in ranking.FAMILIES:
        if len(logs[name]) < 3:
            continue
        x, y = np.array(rows[name]), np.array(logs[name])
        ridge = penalty * np.eye(x.shape[1])
        ridge[0, 0] = 1e-3
        weights[name] = np.linalg.solve(x.T @ x + ridge, x.T @ y).round(5).tolist()
    ends = np.stack([values.min(axis=0), values.max(axis=0)], axis=1).round(3)
    ranges = [(float(low), float(high)) for low, high in ends]
    return ranking.Ranking(weights, ranges, source, dict(at_home or {}))


def at_home_times(
    cases: Sequence[_plans.Case], profile: machine.MachineProfile
) -> dict[str, float]:
    """By family: geometric mean over layers of its time, over that of the fastest family."""
    logs: dict[str, list[float]] = {name: [] for name in ranking.FAMILIES}
    for case in cases:
        times = {name: case.typical_us(one) for name, one in families_of(case, profile).items()}
        for name, us in times.items():
            logs[name].append(float(np.log(us / min(times.values()))))
    means = {name: float(np.exp(np.mean(some))) for name, some in logs.items()}
    order = sorted(means, key=lambda name: means[name])
    return {name: round(means[name] / means[order[0]], 3) for name in order}


Cost = Callable[[Sequence[_plans.Measured], _plans.Measured], float | None]


def regrets(
    cases: Sequence[_plans.Case],
    profile: machine.MachineProfile,
    rule: ranking.Ranking,
    cost_of: Cost = _plans.regret,
) -> list[tuple[float, str, str]]:
    """Per configuration: cost of the rule's choice over the best measured plan, and its name."""
    costs = []
    for case in cases:
        found = families_of(case, profile)
        moves = case.config.remote_share > 0.0
        told = rule.log_times(features_of(case, profile)) if moves else rule.at_home
        chosen = min((name for name in told if name in found), key=lambda name: told[name])
        cost = cost_of(case.rivals, found[chosen])
        if cost is not None:
            costs.append((cost, case.config.name, chosen))
    return costs


def left_out(
    cases: Sequence[_plans.Case],
    profile: machine.MachineProfile,
    penalty: float,
    cost_of: Cost = _plans.regret,
) -> list[tuple[float, str, str]]:
    """Regrets when the weights come from the other models."""
    costs = []
    for model in sorted({case.config.model for case in cases}):
        others = [case for case in cases if case.config.model != model]
        mine = [case for case in cases if case.config.model == model]
        costs += regrets(mine, profile, fit(others, profile, penalty), cost_of)
    return costs


def text(label: str, costs: Sequence[tuple[float, str, str]]) -> str:
    """Median, mean, worst."""
    if not costs:
        return f"{label}: not measured"
    values = [cost for cost, *_ in costs]
    worst = max(costs)
    return (
        f"{label}: {len(values)} configurations, regret median {np.median(values):.1%}, mean "
        f"{np.mean(values):.1%}, worst {worst[0]:.1%} ({worst[1]}: {worst[2]})"
    )


COSTS: dict[str, Cost] = {"in turns": _plans.regret, "alone": _plans.regret_alone}
"""Both count for the choice of the penalty."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fit", action="store_true", help="write new weights")
    parser.add_argument("--results", default="sweep_84.jsonl")
    parser.add_argument("--at-home", default="at_home.jsonl")
    parser.add_argument("--profile", default="h200x2")
    options = parser.parse_args()
    profile = machine.load(options.profile)
    lines = list(_report.read(options.results))
    home_lines = list(_report.read(options.at_home))
    cases, at_home = _plans.read(lines), _plans.read(home_lines)
    fitted = [case for case in cases if not case.config.held_out]
    if options.fit:
        trials = {}
        for penalty in PENALTIES:
            costs = [left_out(fitted, profile, penalty, cost_of) for cost_of in COSTS.values()]
            for label, found in zip(COSTS, costs, strict=True):
                print(text(f"penalty {penalty:g}, each model left out in turn, {label}", found))
            trials[penalty] = [cost for found in costs for cost in found]
        penalty = min(trials, key=lambda p: float(np.mean([cost for cost, *_ in trials[p]])))
        source = origin([line for line in lines if line["op"] == _plans.OP])
        rule = fit(fitted, profile, penalty, source, at_home_times(at_home, profile))
        data = {"source": rule.source, "penalty": penalty, "ranges": rule.ranges}
        data |= {"weights": rule.weights, "at_home": rule.at_home}
        data["at_home_source"] = origin(home_lines)
        ranking._FILE.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        ranking.fitted.cache_clear()
    rule = ranking.fitted()
    held_out = [case for case in cases if case.config.held_out]
    for name, some in (("fitted", fitted), ("held-out", held_out)):
        for label, cost_of in COSTS.items():
            print(text(f"{name} shapes, {label}", regrets(some, profile, rule, cost_of)))
    for label, cost_of in COSTS.items():
        costs = regrets(at_home, profile, rule, cost_of)
        print(text(f"all rows at home, {label}", costs))


if __name__ == "__main__":
    main()
