"""Tables and pictures of exhibits 1 and 2: what the kernel's tiles do, from result lines alone."""

from __future__ import annotations

import json
from collections.abc import Sequence

import _sweep
import numpy as np
import numpy.typing as npt
from _exhibits import Exhibit, FloatArray, Line, Table, plt
from _tile_trace import busy_share

from xstage_ext import machine, simulate
from xstage_ext.planner.megamoe import MegaMoePlan


def simulated(line: Line, profile: machine.MachineProfile) -> simulate.Simulation:
    """A traced simulation of a traced call; the "local control" kept every row at home."""
    config = _sweep.load_configs()[line["index"]]
    load = _sweep.load_of(config, config.draw())
    counts = load.counts
    if line["arm"] == "local control":
        counts = np.zeros_like(counts)
        counts[load.rank] = load.counts.sum(axis=0)
    return simulate.simulate_megamoe(
        MegaMoePlan(**line["plan"]), counts, profile, rank=load.rank, trace=True,
        num_tokens=config.tokens,
    )  # fmt: skip


def simulated_spans_us(result: simulate.Simulation) -> FloatArray:
    """Hand-over of every Linear-2 tile: epilogue and what the stores hold up."""
    column = {name: i for i, name in enumerate(simulate.TILE_COLUMNS)}
    second = result.tiles[result.tiles[:, column["phase"]] == 2]
    span = second[:, column["end_us"]] - second[:, column["store_begin_us"]]
    return np.asarray(span + simulate.Assumptions().epilogue2_us)


def simulated_activity(result: simulate.Simulation, bin_us: float) -> FloatArray:
    """Share of the clusters that multiply; what is longer than a main loop needs is waiting."""
    column = {name: i for i, name in enumerate(simulate.TILE_COLUMNS)}
    phase, begin, end = (
        result.tiles[:, column[name]] for name in ("phase", "main_begin_us", "store_begin_us")
    )
    share = np.ones_like(begin)
    for number in (1, 2):
        mine = phase == number
        length = np.maximum(end[mine] - begin[mine], 1e-9)
        if mine.any():
            share[mine] = np.minimum(1.0, np.percentile(length, 5) / length)
    start = float(begin.min())
    return busy_share(begin - start, end - start, len(result.workers), bin_us, share)


def spans(lines: Sequence[Line], sweep: Sequence[Line], profile: machine.MachineProfile) -> Exhibit:
    """Distribution of the hand-over of Linear-2 tiles by arm, measured and predicted."""
    figure, axes = plt.subplots(figsize=(9, 5), layout="constrained")
    rows: list[Sequence[str]] = []
    found: list[str] = []
    for place, line in enumerate(lines):
        predicted = simulated_spans_us(simulated(line, profile))
        percent = line["percentiles_us"]
        box = {name: percent[q] for name, q in zip(BOX, (5, 25, 50, 75, 95), strict=True)}
        axes.bxp([box], positions=[place], widths=0.5, showfliers=False)
        axes.plot(place, np.median(predicted), "D", color="tab:red")
        q50, q90 = np.percentile(predicted, [50, 90])
        cells = (percent[50], percent[10], percent[90], percent[100], q50, q90)
        found += misses(line["arm"], (percent[50], percent[90]), (q50, q90))
        clock = f"{line['kernel_clock_mhz']:.0f}"
        rows.append([line["arm"], *(f"{value:.2f}" for value in cells), clock])
    axes.set_xticks(range(len(lines)), [line["arm"] for line in lines])
    axes.plot([], [], "D", color="tab:red", label="predicted median")
    axes.legend()
    axes.set_ylabel("hand-over of a Linear-2 tile, us (box: quartiles, whiskers 5 to 95%)")
    head = ["arm", "median us", "p10", "p90", "max", "predicted median", "predicted p90", "MHz"]
    tables: list[Table] = [(head, rows)]
    if sweep:
        table, more = _over_the_sweep(sweep, profile)
        tables.append(table)
        found += more
    text = f"{_about(lines[0], profile)} {_missed(found)}"
    return Exhibit(text, tables, figure)


OFF = 1.5
"""A prediction that is off by more than so many times is named in words."""


def misses(label: str, seen: Sequence[float], predicted: Sequence[float]) -> list[str]:
    """Of a median and a p90, us: those that were predicted wrong, in words."""
    return [
        f"{label}: {name} {measured:.2f} us, predicted {told:.2f} ({measured / told:.2f}x)"
        for name, measured, told in zip(("median", "p90"), seen, predicted, strict=True)
        if max(measured / told, told / measured) > OFF
    ]


def _missed(found: Sequence[str]) -> str:
    if not found:
        return f"No median and no p90 is off its prediction by more than {OFF:g}x."
    return f"Here the prediction fails, by more than {OFF:g}x: {'; '.join(found)}."


def _over_the_sweep(
    lines: Sequence[Line], profile: machine.MachineProfile
) -> tuple[Table, list[str]]:
    """Medians over configurations of each one's median and 90% span, by arm and remote share.

    Also those of them that were predicted wrong, in words.
    """
    by_key = {json.dumps(config.key): config for config in _sweep.load_configs()}
    found: dict[tuple[float, str], list[tuple[float, ...]]] = {}
    for line in lines:
        config = by_key[json.dumps(line["shape"])]
        load = _sweep.load_of(config, config.draw())
        result = simulate.simulate_megamoe(
            MegaMoePlan(**line["plan"]), load.counts, profile,
            rank=load.rank, trace=True, num_tokens=config.tokens,
        )  # fmt: skip
        predicted = np.percentile(simulated_spans_us(result), [50, 90])
        seen = line["linear2_span_us"], line["linear2_span_p90_us"]
        found.setdefault((config.remote_share, line["arm"]), []).append((*seen, *predicted))
    rows: list[Sequence[str]] = []
    wrong: list[str] = []
    for (share, arm), values in sorted(found.items()):
        medians = np.median(np.array(values), axis=0)
        label = f"{arm}, remote {share:g}"
        rows.append([label, str(len(values)), *(f"{v:.2f}" for v in medians)])
        wrong += misses(f"the sweep, {label}", medians[:2], medians[2:])
    head = ["the sweep", "configurations", "median us", "p90", "predicted median", "predicted p90"]
    return (head, rows), wrong


BOX = ("whislo", "q1", "med", "q3", "whishi")


def _about(line: Line, profile: machine.MachineProfile) -> str:
    config = _sweep.load_configs()[line["index"]]
    return (
        f"{config.name}; rank 0 of {line['world']}, one traced call per arm behind warm ones; "
        f"kernel of {line['commit']}. Predictions: the simulator with profile {profile.name} "
        f"({profile.provenance})."
    )


def timeline(lines: Sequence[Line], profile: machine.MachineProfile) -> Exhibit:
    """Share of the math warpgroups that multiply, and how long it is low."""
    lines = [line for line in lines if line["arm"] in _sweep.ARMS]
    figure, panels = plt.subplots(
        len(lines), 1, figsize=(10, 2 * len(lines)), sharex=True, layout="constrained"
    )
    rows: list[Sequence[str]] = []
    for axes, line in zip(panels, lines, strict=True):
        seen, width = np.array(line["activity"]), line["bin_us"]
        predicted = simulated_activity(simulated(line, profile), width)
        axes.fill_between(np.arange(len(seen)) * width, seen, step="post", alpha=0.6)
        axes.step(np.arange(len(predicted)) * width, predicted, where="post", color="tab:red")
        axes.set_ylabel(line["arm"])
        axes.set_ylim(0, 1.05)
        low = seen[:-1] < LOW
        cells = [f"{seen.mean():.0%}", f"{low.mean():.0%}", f"{width * longest(low):.0f}"]
        rows.append([line["arm"], *cells, f"{width * len(seen):.0f}", f"{predicted.mean():.0%}"])
    panels[-1].set_xlabel("us since the first tile; red: predicted")
    head = ["arm", "multiplying", f"time below {LOW:.0%}", "longest such interval us"]
    head += ["tiles us", "predicted multiplying"]
    return Exhibit(_about(lines[0], profile), [(head, rows)], figure)


LOW = 0.5
"""Activity that counts as low."""


def longest(flags: npt.NDArray[np.bool_]) -> int:
    """Length of the longest run of true values."""
    best = run = 0
    for flag in flags:
        run = run + 1 if flag else 0
        best = max(best, run)
    return best
