"""The plans that the sweep measured beside its arms, and what choosing one of them costs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import _sweep

from xstage_ext.planner.megamoe import MegaMoePlan

OP = "megamoe_plans"
"""Result lines of this kind hold every plan of a configuration."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """A plan and its time.

    Attributes
    ----------
    us : float
        Median of all samples.
    halves_us : tuple of float
        Medians of every other sample.
    """

    name: str
    plan: MegaMoePlan
    us: float
    halves_us: tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Case:
    """A configuration with its measured plans.

    Attributes
    ----------
    plans : tuple
        Timed one after the other, at the power limit.
    arms : dict
        Time of the plans of the sweep's arms, us, by plan: in turns with the unfused pipeline,
        which lets the GPU cool.
    """

    config: _sweep.Config
    load: _sweep.Load
    plans: tuple[Measured, ...]
    arms: dict[MegaMoePlan, float]


def read(lines: Iterable[Mapping[str, Any]]) -> list[Case]:
    """Every configuration among result lines; plans whose results were wrong are left out."""
    by_key = {json.dumps(config.key): config for config in _sweep.load_configs()}
    arms: dict[str, dict[str, float]] = {}
    grids: dict[str, list[Mapping[str, Any]]] = {}
    for line in lines:
        key = json.dumps(line["shape"])
        if line["op"] == OP:
            grids[key] = [one for one in line["plans"] if one["ok"]]
        elif line["op"] == "megamoe" and line["arm"] in _sweep.ARMS and line["ok"]:
            arms.setdefault(key, {})[line["measured_as"]] = line["us_median"]
    cases = []
    for key, grid in grids.items():
        config = by_key[key]
        plans = tuple(
            Measured(one["name"], MegaMoePlan(*one["plan"]), one["us"], tuple(one["halves_us"]))
            for one in grid
        )
        seen = {one.plan: arms[key][one.name] for one in plans if one.name in arms.get(key, {})}
        cases.append(Case(config, _sweep.load_of(config, config.draw()), plans, seen))
    return cases


def regret(plans: Sequence[Measured], chosen: Measured) -> float:
    """What a choice costs over the best plan, as a share of it.

    The best of many plans is partly the luckiest: one half of the samples says which is best, the
    other half what it takes; then the other way round. So a regret may be below zero by chance.
    """
    costs = []
    for judge in (0, 1):
        best = min(plans, key=lambda plan: plan.halves_us[1 - judge])
        costs.append(chosen.halves_us[judge] / best.halves_us[judge] - 1.0)
    return sum(costs) / 2
