"""The plans that the sweep measured beside its arms, and what choosing one of them costs."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import _report
import _sweep

from xstage_ext.planner.megamoe import MegaMoePlan
from xstage_ext.testing import Timing

OP = "megamoe_plans"
"""Result lines of this kind hold every plan of a configuration."""
ALONE = 0.2
"""How much a plan's time alone counts beside its time in turns. By time alone only, layers with
many rows and a busy link lose up to 5% in turns; by time in turns only, as much alone."""
TRACE_OP = "megamoe_trace"
"""And these what the trace build says of one call by a plan."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """A plan and its time.

    Attributes
    ----------
    us : float
        Median of all samples, levelled (`_level.py`) where they were kept.
    raw_us : float or None
        Median of the samples as the clock said; None where it was not kept.
    halves_us : tuple of float
        Medians of every other sample.
    alone_us : tuple of float
        When the plan follows itself, by pass; empty where that was not measured.
    """

    name: str
    plan: MegaMoePlan
    us: float
    halves_us: tuple[float, float]
    timing: Timing = Timing(0.0, 0.0, 0.0, 0, ())
    raw_us: float | None = None
    alone_us: tuple[float, ...] = ()

    @property
    def usual_alone_us(self) -> float:
        """Median of all passes."""
        return statistics.median(self.alone_us)


@dataclasses.dataclass(frozen=True)
class Case:
    """A configuration with its measured plans.

    Attributes
    ----------
    matrix_tflops : float or None
        What a large dense product reached in the same rounds.
    """

    config: _sweep.Config
    load: _sweep.Load
    plans: tuple[Measured, ...]
    matrix_tflops: float | None = None

    def typical_us(self, one: Measured) -> float:
        """Weighted geometric mean of a plan's times in turns and alone (`ALONE`).

        A plan that was not timed alone (far from the fastest in turns) is taken to slow down as the
        others of its configuration do.
        """
        slower = [plan.usual_alone_us / plan.us for plan in self.rivals if plan.alone_us]
        if not slower:
            return one.us
        own = one.usual_alone_us / one.us if one.alone_us else statistics.median(slower)
        return float(one.us * own**ALONE)

    @property
    def rivals(self) -> tuple[Measured, ...]:
        """Plans that send tokens as often as among the real layer's ranks."""
        sets = self.config.token_sets
        return tuple(one for one in self.plans if one.plan.token_sets == sets)

    def of(self, plan: MegaMoePlan) -> Measured | None:
        """What was measured of a plan."""
        return {one.plan: one for one in self.plans}.get(plan)


def read(lines: Iterable[Mapping[str, Any]]) -> list[Case]:
    """Every configuration among result lines; plans whose results were wrong are left out."""
    configs = _sweep.load_configs()
    configs += [config.at_home() for config in configs]
    by_key = {json.dumps(config.key): config for config in configs}
    cases = []
    for line in lines:
        if line["op"] != OP:
            continue
        config = by_key[json.dumps(line["shape"])]
        plans = tuple(_measured(one) for one in line["plans"] if one["ok"])
        load = _sweep.load_of(config, config.draw())
        cases.append(Case(config, load, plans, line.get("matrix_tflops")))
    return cases


def _measured(one: Mapping[str, Any]) -> Measured:
    timing = Timing(one["us"], one["us_p10"], one["us_p90"], one["n"], ())
    plan = MegaMoePlan(**one["plan"])
    halves = tuple(one["halves_us"])
    alone = tuple(one.get("alone_us", ()))
    return Measured(one["name"], plan, one["us"], halves, timing, one.get("raw_us"), alone)


def measured(
    row: _report.Row, timing: Timing, ok: bool, extra: Mapping[str, object]
) -> _report.Row:
    """A predicted row with what the clock said."""
    us = timing.us_median
    kept = {name: value for name, value in row.extra.items() if name != "predicted"}
    return dataclasses.replace(
        row,
        us_median=us,
        us_p10=timing.us_p10,
        us_p90=timing.us_p90,
        n=timing.n,
        tflops=float(row.extra["flops"]) / us / 1e6,
        egress_GBps=float(row.extra["egress_bytes"]) / us / 1e3,
        ok=ok,
        extra=kept | dict(extra),
    )


def regret(plans: Sequence[Measured], chosen: Measured) -> float:
    """What a choice costs over the best plan in turns, as a share of it.

    The best of many plans is partly the luckiest: one half of the samples says which is best, the
    other half what it takes; then the other way round. So a regret may be below zero by chance.
    """
    return _regret(plans, chosen, lambda plan: plan.halves_us)


def regret_alone(plans: Sequence[Measured], chosen: Measured) -> float | None:
    """The same where every plan follows itself; None where the choice was not timed so."""
    if not chosen.alone_us:
        return None
    return _regret([p for p in plans if p.alone_us], chosen, _halves_alone)


def _halves_alone(plan: Measured) -> tuple[float, float]:
    return statistics.median(plan.alone_us[::2]), statistics.median(plan.alone_us[1::2])


def _regret(
    plans: Sequence[Measured], chosen: Measured, halves: Callable[[Measured], Sequence[float]]
) -> float:
    costs = []
    for judge in (0, 1):
        best = min(plans, key=lambda plan: halves(plan)[1 - judge])
        costs.append(halves(chosen)[judge] / halves(best)[judge] - 1.0)
    return sum(costs) / 2
