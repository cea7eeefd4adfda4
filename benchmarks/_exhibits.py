"""Tables and pictures of exhibits 3 to 6, from result lines alone; see evidence.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import _plans
import _sweep
import matplotlib
import numpy as np
import numpy.typing as npt

from xstage_ext import machine
from xstage_ext.model import BurstGap
from xstage_ext.planner import attention_choice, choose
from xstage_ext.planner.attention_cost import Tiles
from xstage_ext.planner.megamoe import SCHEDULES, MegaMoePlan
from xstage_ext.planner.problem import MoEProblem

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

Line = Mapping[str, Any]
Table = tuple[Sequence[str], list[Sequence[str]]]
FloatArray = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Exhibit:
    """What a page shows."""

    text: str
    tables: list[Table]
    figure: Any


def by_arm(lines: Sequence[Line]) -> dict[str, dict[str, Line]]:
    """Lines by shape, then arm; a later line replaces an earlier one."""
    found: dict[str, dict[str, Line]] = {}
    for line in lines:
        found.setdefault(str(line["shape"]), {})[line["arm"]] = line
    return found


# --- 3: attention -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Overhead:
    """Time over attention alone, us; `low` and `high` hold it with 95%, None: a bare difference."""

    us: float
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        return f"{self.us:+.1f}" + (
            "" if self.low is None else f" [{self.low:+.1f} {self.high:+.1f}]"
        )

    @property
    def may_be_zero(self) -> bool:
        """Whether the interval holds zero."""
        return self.low is not None and self.high is not None and self.low <= 0.0 <= self.high


def overhead_of(arm: Line, alone: Line) -> Overhead:
    """Of an arm, by its ratios round by round where they were recorded, else by medians.

    At the power limit calls of milliseconds scatter by several percent, which neighbours in time
    share: a difference of medians shows the scatter, a ratio of neighbours the cost.
    """
    us = float(alone["us_median"])
    if "over_fa3" not in arm:
        return Overhead(float(arm["us_median"]) - us)
    return Overhead(*((arm[name] - 1.0) * us for name in ("over_fa3", "over_low", "over_high")))


def attention(lines: Sequence[Line], profile: machine.MachineProfile) -> Exhibit:
    """Time over attention alone, measured and predicted, with the completion-coupled arm."""
    complete = [
        arms for arms in by_arm(lines).values() if {"fa3", "fused", "fused coupled"} <= set(arms)
    ]
    rows: list[Sequence[str]] = []
    unclear: list[str] = []
    series: dict[str, list[tuple[int, float]]] = {}
    for arms in sorted(complete, key=lambda arms: int(arms["fa3"]["shape"]["rows"])):
        alone = arms["fa3"]
        shape = alone["shape"]
        expected = predicted_overheads_us(shape, alone["world"], profile)
        seen = {name: overhead_of(arms[name], alone) for name in OVERHEADS if name in arms}
        cells = [str(seen.get(name, "-")) for name in OVERHEADS]
        cells += [f"{value:+.1f}" for value in expected.values()]
        rows.append([f"{shape['name']} {shape['heads']}x{shape['head_dim']}",
                     str(shape["rows"]), f"{alone['us_median']:.1f}", *cells])  # fmt: skip
        if seen["fused"].may_be_zero:
            unclear.append(shape["name"])
        if shape["name"] == f"s{shape['rows']}":
            told = {f"predicted {name}": us for name, us in expected.items()}
            for name, us in ({name: cost.us for name, cost in seen.items()} | told).items():
                series.setdefault(name, []).append((shape["rows"], us / alone["us_median"]))
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for name, points in series.items():
        style = "--" if name.startswith("predicted") else "o-"
        axes.plot(*zip(*points, strict=True), style, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("symlog", linthresh=0.01)
    axes.set_xlabel("rows of the sequence (12 heads of 128 per rank)")
    axes.set_ylabel("time over attention alone, share of it")
    axes.legend()
    head = ["problem", "rows", "attention us", *OVERHEADS, *(f"predicted {n}" for n in PREDICTED)]
    text = (
        "Microseconds over attention alone until the result has arrived (receiver-ready). With "
        "brackets, which hold it with 95%: the ratio of neighbours in time, less one, times the "
        "median of attention alone. Without: a difference of medians, which for calls of "
        "milliseconds shows how the clock wandered. *fused* and *fused burst* take turns with "
        "attention alone and nothing else, so they are known best; the other arms with all arms."
    )
    if unclear:
        text += f" The fused kernel's cost cannot be told from zero for {', '.join(unclear)}."
    return Exhibit(text, [(head, rows)], figure)


OVERHEADS = ("fused", "fused burst", "fused coupled", "fa3 + a2a", "fa3 + nccl")
PREDICTED = ("fused", "coupled", "serial")


def predicted_overheads_us(
    shape: Line, world: int, profile: machine.MachineProfile
) -> dict[str, float]:
    """By the law: fused, coupled (every tile waits until it is visible), serial."""
    rows = tuple(shape["rows"] // world + (r < shape["rows"] % world) for r in range(world))
    heads = shape["heads"] * world
    problem = attention_choice.AttentionProblem(
        heads, heads, shape["head_dim"], rows, causal=shape["causal"]
    )
    told = attention_choice.decide(problem, profile).predicted_us
    tiles = Tiles.of(problem, profile)
    law = BurstGap.of(
        profile.mechanism("tma"), profile.gpu.num_sms, tiles.bytes,
        remote_share=1.0 - 1.0 / world, both_directions=True,
    )  # fmt: skip
    # The waits of all tiles but the last; its own are in the fused arm's time too.
    waits = (tiles.per_sm - 1) * float(law.completion_coupled(tiles.us))
    fused = told["fused"] - told["attention"]
    serial = told["serial"] - told["attention"]
    return dict(zip(PREDICTED, (fused, fused + waits, serial), strict=True))


# --- 4: pacing ----------------------------------------------------------------------------------


def pacing(lines: Sequence[Line], sweep: Sequence[Line], attention: Sequence[Line]) -> Exhibit:
    """Cost of sending by way of sending, and what a load waits for, in the probe's main loop."""
    shapes = by_arm(lines)
    figure, panels = plt.subplots(2, 1, figsize=(10, 8), sharex=True, layout="constrained")
    arms = [arm for arm in dict.fromkeys(line["arm"] for line in lines) if arm != "none"]
    tables: list[Table] = []
    for number, found in enumerate(shapes.values()):
        shape, free = found["none"]["shape"], found["none"]["us_median"]
        label = f"{shape['tile_bytes'] >> 10} KiB per {free:.1f} us"
        label += f", {shape['pulls']} SMs of the peer pulling" if shape["pulls"] else ""
        rows = []
        for arm in arms:
            line = found[arm]
            p99, most = line["load_wait_p99_us"], line["load_wait_max_us"]
            rows.append([arm, f"{line['us_median']:.2f}", f"{line['over_no_store']:+.1%}",
                         f"{line['egress_GBps']:.0f}", f"{p99:.2f}", f"{most:.2f}"])  # fmt: skip
        head = [label, "us per tile", "over sending nothing", "GB/s", "load waits p99 us", "max"]
        tables.append((head, rows))
        offset = (number - len(shapes) / 2) * 0.1
        place = np.arange(len(arms)) + offset
        for axes, key, scale in zip(
            panels, ("over_no_store", "load_wait_p99_us"), (100.0, 1.0), strict=True
        ):
            axes.bar(place, [scale * found[arm][key] for arm in arms], 0.1, label=label)
    panels[0].set_ylabel("% over the loop that sends nothing")
    panels[0].set_yscale("symlog", linthresh=1.0)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    panels[1].set_ylabel("a load waits, us (p99)")
    panels[1].set_yscale("log")
    panels[1].set_xticks(range(len(arms)), arms, rotation=40, ha="right", fontsize=8)
    text = (
        "All SMs of one GPU multiply and send an output tile to the other GPU every few steps. A "
        "burst may cast a shadow: loads behind it wait until it has left. Here it shows for bulk "
        "bursts of 64 KiB, hardly for those of 32 KiB or for plain stores, and not for slices over "
        "most of the next tile's main loop. Where the link is full (64 KiB per 16 us, or all SMs "
        "of the peer pulling) loads wait whatever the way of sending, paced slices too. Where it "
        "is not, slices cost the less, the longer they are: those of 1 KiB most."
    )
    kernels = _in_megamoe(sweep), _in_attention(attention)
    if any(kernels):
        text += " Below: the same choice in the kernels."
    if kernels[1]:
        text += (
            " Attention *at home* is by the clock, in turns with others, the kernels that send by "
            "a profiler, a few launches of one arm in a row: above a millisecond they differ by "
            "the GPU's clock, not by the stores ([exhibit 3](attention.md) compares neighbours in "
            "time)."
        )
    return Exhibit(text, [*tables, *kernels[0], *kernels[1]], figure)


STORES = {
    "st": {"store": 0, "slice_rows": 4},
    "bulk burst": {"store": 1, "slice_rows": 4},
    "paced, 1 row per warp": {"store": 2, "slice_rows": 1},
    "paced, 4 rows per warp": {"store": 2, "slice_rows": 4},
}


def _in_megamoe(lines: Sequence[Line]) -> list[Table]:
    """Time over that of the same plan with bulk bursts, by way of storing and schedule."""
    ratios: dict[tuple[int, str], list[float]] = {}
    for line in lines:
        times = {MegaMoePlan(*one["plan"]): one["us"] for one in line["plans"]}
        for plan in times:
            if plan.store != STORES["bulk burst"]["store"]:
                continue
            for name, fields in STORES.items():
                other = dataclasses.replace(plan, **fields)
                if other in times:
                    ratio = times[other] / times[plan]
                    ratios.setdefault((plan.schedule, name), []).append(ratio)
    rows: list[Sequence[str]] = []
    for (schedule, name), found in sorted(ratios.items()):
        p10, p90 = np.percentile(found, [10, 90])
        cells = (_sweep.geometric_mean(found), p10, p90)
        label = f"{SCHEDULES[schedule]}, {name}"
        rows.append([label, str(len(found)), *(f"{value:.3f}" for value in cells)])
    head = ["megamoe, time over bulk bursts", "configurations", "mean", "p10", "p90"]
    return [(head, rows)] if rows else []


def _in_attention(lines: Sequence[Line]) -> list[Table]:
    """The attention kernel's own time by way of storing, beside attention that stores at home."""
    rows: list[Sequence[str]] = []
    for arms in by_arm(lines).values():
        if {"fa3", *FUSED} <= set(arms):
            times = [arms["fa3"]["us_median"], *(arms[name]["sender_us"] for name in FUSED)]
            rows.append([arms["fa3"]["shape"]["name"], *(f"{us:.1f}" for us in times)])
    head = ["attention kernel, us", "at home", "at once", "by plan", "waits until visible"]
    return [(head, rows)] if rows else []


FUSED = ("fused burst", "fused", "fused coupled")


# --- 6: the sweep -------------------------------------------------------------------------------


def prediction(lines: Sequence[Line]) -> Exhibit:
    """The simulator's time over the clock's, by arm and by whether the shape was fitted to."""
    figure, axes = plt.subplots(figsize=(6.5, 6), layout="constrained")
    rows: list[Sequence[str]] = []
    for arm in _sweep.ARMS:
        mine = [line for line in lines if line["arm"] == arm]
        seen = np.array([line["us_median"] for line in mine])
        ratio = np.array([line["predicted_us"] for line in mine]) / seen
        axes.plot(seen, ratio, "o", markersize=4, label=arm)
        rows.append([arm, *_errors(ratio)])
    fused = [line for line in lines if line["arm"] in _sweep.ARMS]
    for held_out, label in (
        (False, "all arms, fitted shapes"),
        (True, "all arms, held-out shapes"),
    ):
        mine = [line for line in fused if line["held_out"] == held_out]
        if mine:
            ratio = np.array([line["predicted_us"] / line["us_median"] for line in mine])
            rows.append([label, *_errors(ratio)])
    ratio = np.array([line["predicted_us"] / line["us_median"] for line in fused])
    rows.append(["**all**", *_errors(ratio)])
    axes.axhline(1.0, color="0.3", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xlabel("measured, us")
    axes.set_ylabel("predicted / measured")
    axes.legend(fontsize=8)
    head = ["arm", "configurations", "median error", "95%", "bias"]
    text = (
        "The constants of the simulator that a machine profile does not hold "
        "(`simulate.Assumptions`) were fitted to the fitted shapes of an earlier sweep of the same "
        "layers (`push_rate` of this one), by `benchmarks/fit_simulator.py` (docs/MEASURING.md); "
        "held-out shapes were not. "
        "What the simulator knows of (half-empty tiles, local rows, pauses between calls) was "
        "chosen with the errors of all shapes in view."
    )
    return Exhibit(text, [(head, rows)], figure)


def _errors(ratio: FloatArray) -> list[str]:
    error = np.abs(ratio - 1.0)
    cells = (np.median(error), np.percentile(error, 95), np.median(ratio) - 1.0)
    return [str(len(ratio)), *(f"{value:.1%}" for value in cells)]


def _costs(values: FloatArray) -> list[str]:
    cells = (np.median(values), np.mean(values), np.percentile(values, 90), values.max())
    return [str(len(values)), *(f"{value:.1%}" for value in cells)]


def _families(
    problem: MoEProblem, profile: machine.MachineProfile, decision: choose.Decision
) -> dict[MegaMoePlan, str]:
    """Names of a layer's plans, whatever label they were measured under. Where distances are cut
    to the load, families share a plan: then that of the better rank."""
    names = [name for name, _ in decision.expected]
    found: dict[MegaMoePlan, str] = {}
    for name, plan in choose.family_plans(problem, profile, choose.RING_BYTES, {}, names):
        found.setdefault(plan, name)
    return found


def regret(lines: Sequence[Line], profile: machine.MachineProfile) -> Exhibit:
    """What the planner's choice costs over the best measured plan, fitted and held-out shapes."""
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    costs: dict[bool, list[tuple[float, str, str, str]]] = {False: [], True: []}
    alone: dict[bool, list[float]] = {False: [], True: []}
    for case in _plans.read(lines):
        decision = choose.choose(case.config.problem, profile)
        chosen = case.of(decision.plan)
        if chosen is None:
            raise SystemExit(
                f"{case.config.name}: the planner's choice was not measured: {decision.plan}"
            )
        best = min(case.rivals, key=lambda one: one.us)
        cost = _plans.regret(case.rivals, chosen)
        families = _families(case.config.problem, profile, decision)
        names = [families.get(one.plan, one.name) for one in (chosen, best)]
        costs[case.config.held_out].append((cost, case.config.name, *names))
        cost_alone = _plans.regret_alone(case.rivals, chosen)
        if cost_alone is not None:
            alone[case.config.held_out].append(cost_alone)
    summary: list[Sequence[str]] = []
    for held_out, label in ((False, "fitted"), (True, "held out")):
        found = sorted(costs[held_out])
        if found:
            values = np.array([cost for cost, *_ in found])
            axes.plot(np.linspace(0, 1, len(values)), values * 100, "o-", label=label)
            summary.append([label, *_costs(values)])
        if alone[held_out]:
            summary.append([f"{label}, alone", *_costs(np.array(alone[held_out]))])
    axes.set_xlabel("share of the configurations")
    axes.set_ylabel("% over the best measured plan")
    axes.legend()
    worst = sorted([*costs[False], *costs[True]], reverse=True)[:10]
    rows = [[name, f"{cost:.1%}", chosen, best] for cost, name, chosen, best in worst]
    head = ["shapes", "configurations", "median", "mean", "90%", "worst"]
    tables: list[Table] = [(head, summary)]
    tables.append((["worst configurations", "regret", "chosen", "best"], rows))
    text = (
        f"Up to {max(len(line['plans']) for line in lines)} plans per configuration. Which plan is "
        "best is read from one half of the samples, what it takes from the other: luck does not "
        "count, and a regret may be below zero. The choice is that of the planner as it is now. No "
        "weight of its ranking was fitted to the held-out shapes; its form (which families and "
        "terms) was compared on all seven models, theirs included (docs/perf_log.md)."
    )
    if any(alone.values()):
        text += (
            " *Alone*: every plan follows itself, at the clock that its own power allows, several "
            "times (docs/MEASURING.md); one half of these says which is best, the other what it "
            "takes."
        )
    return Exhibit(text, tables, figure)
