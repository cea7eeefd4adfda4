"""What a result file of the sweep says: which configurations it holds, tables, means, a picture."""

from __future__ import annotations

import dataclasses
import io
import json
import pathlib
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import _plans
import _report
import _sweep
from _sweep import ARMS, RIVALS, Config
from _sweep_picture import draw
from rich import box
from rich.console import Console
from rich.table import Table

BASELINE = "wave/st"
WIDTH = 180
"""Of a report that goes to no terminal, in characters."""
Line = dict[str, Any]

console = Console(width=WIDTH if not sys.stdout.isatty() else None)


@dataclasses.dataclass
class Found:
    """Result lines of one configuration.

    Attributes
    ----------
    arms : dict
        By name: those of `_sweep.ARMS`, and "serial" where it was measured.
    plans : dict or None
        The line of all plans; predictions have none.
    traces : dict
        By name of the plan.
    """

    arms: dict[str, Line] = dataclasses.field(default_factory=dict)
    plans: Line | None = None
    traces: dict[str, Line] = dataclasses.field(default_factory=dict)

    @property
    def lines(self) -> list[Line]:
        """All of them."""
        rest = [] if self.plans is None else [self.plans]
        return [*self.arms.values(), *rest, *self.traces.values()]

    @property
    def wrong_arms(self) -> list[str]:
        """Arms whose results were wrong."""
        return [name for name, line in self.arms.items() if line["ok"] is False]

    @property
    def wrong(self) -> list[str]:
        """Names of arms and plans whose results were wrong."""
        plans = self.plans["plans"] if self.plans is not None else []
        return list(dict.fromkeys([*self.wrong_arms, *(p["name"] for p in plans if not p["ok"])]))

    @property
    def is_measured(self) -> bool:
        """Not predicted."""
        return any(line["n"] > 0 for line in self.arms.values())

    @property
    def is_whole(self) -> bool:
        """No line is missing: every arm and, where measured, the pipeline and the plans."""
        beside = "serial" in self.arms and self.plans is not None
        return set(ARMS) <= self.arms.keys() and (beside or not self.is_measured)

    def us(self, arm: str) -> float:
        """Time of an arm."""
        return float(self.arms[arm]["us_median"])


def by_config(lines: Iterable[Line]) -> dict[str, Found]:
    """Result lines by configuration (its key as JSON); a later line replaces an earlier one."""
    found: dict[str, Found] = {}
    for line in lines:
        if line.get("op") not in ("megamoe", _plans.OP, _plans.TRACE_OP):
            continue
        mine = found.setdefault(json.dumps(line["shape"]), Found())
        if line["op"] == "megamoe":
            mine.arms[line["arm"]] = line
        elif line["op"] == _plans.OP:
            mine.plans = line
        else:
            mine.traces[line["arm"]] = line
    return found


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What a run asks of a configuration's lines.

    Attributes
    ----------
    n : int
        Samples of an arm at least; 0: predictions.
    serial_n : int
        Samples of the unfused pipeline at least.
    profile : str or None
        Name of the machine profile; None: any.
    commits : collection or None
        One of these measured it; None: any.
    since : str
        It was measured at this date or later.
    """

    n: int
    profile: str | None = None
    serial_n: int = 1
    commits: Collection[str | None] | None = None
    since: str = ""

    def are_met(self, found: Found | None) -> bool:
        """Nothing is missing or wrong, and nothing comes from other conditions."""
        if found is None or not found.is_whole or found.wrong:
            return False
        if any(
            line["profile"] != (self.profile or line["profile"]) for line in found.arms.values()
        ):
            return False
        if self.n == 0:
            return all(line["n"] == 0 for line in found.arms.values())
        return all(
            line["ok"] is True and line["n"] >= (self.serial_n if arm == "serial" else self.n)
            for arm, line in found.arms.items()
        ) and all(
            line["date"] >= self.since and (self.commits is None or line["commit"] in self.commits)
            for line in found.lines
        )


Shown = Sequence[tuple[Config, Found]]


def report(path: pathlib.Path, configs: Iterable[Config]) -> None:
    """Tables, means and a picture from a result file; the text is written beside it too."""
    found = by_config(_report.read(path))
    pairs = [(c, found[json.dumps(c.key)]) for c in configs if json.dumps(c.key) in found]
    shown = [(c, one) for c, one in pairs if set(ARMS) <= one.arms.keys()]
    if not shown:
        console.print(f"no complete configuration in {path}")
        return
    measured = all(one.is_measured for _, one in shown)
    right = [(c, one) for c, one in shown if not one.wrong_arms]
    parts = [_times(shown, measured), _floors(shown), "\n".join(_head(shown, right, measured))]
    if right:
        parts.append("\n".join(_summary(right, measured)))
    for part in parts:
        _print(console, part)
    paper = Console(file=io.StringIO(), width=WIDTH)
    for part in parts:
        _print(paper, part)
    text = path.with_suffix(".txt")
    written = [line.rstrip() for line in paper.file.getvalue().splitlines()]
    text.write_text("\n".join(written) + "\n", encoding="utf-8")
    if right:
        picture = path.with_suffix(".png")
        title = f"planner's choice over Expert-Wave with plain stores, {_kind(shown, measured)}"
        draw(picture_rows(right), title, picture)
        console.print(f"picture {picture}")
    console.print(f"results {path}\nreport {text}")


def _print(target: Console, part: Table | str) -> None:
    """A table in the console's width; text in lines of its own."""
    target.print(part, highlight=False, markup=False, soft_wrap=isinstance(part, str))


def picture_rows(shown: Shown) -> list[dict[str, Any]]:
    """What `draw` takes: the planner's speed-up and its ceiling, by configuration."""
    return [
        {
            "flop_per_byte": one.arms[BASELINE]["flops"] / one.arms[BASELINE]["egress_bytes"],
            "speedup": one.us(BASELINE) / one.us("planner"),
            "ceiling": one.us(BASELINE) / one.arms[BASELINE]["ceiling_us"],
            "model": config.model,
        }
        for config, one in shown
    ]


def _kind(shown: Shown, measured: bool) -> str:
    """Measured or predicted, and by which profile: that of the lines, whatever is asked for now."""
    names = {f"{x['profile']} ({x['provenance']})" for _, one in shown for x in one.arms.values()}
    return f"{'measured' if measured else 'PREDICTED'}, profile {', '.join(sorted(names))}"


def _new_table(title: str, names: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("model", no_wrap=True)
    for name in ("T", "remote", "routing", *names):
        table.add_column(name, justify="right")
    return table


def _key_cells(config: Config) -> list[str]:
    return [config.model, str(config.tokens), f"{config.remote_share:g}", config.routing]


def _times(shown: Shown, measured: bool) -> Table:
    """Times of arms, ratios, the ceiling."""
    kind = "measured (predicted)" if measured else "predicted"
    names = [arm.replace("interleaved", "interl.").replace("/", "\n") for arm in ARMS]
    names = ["max/\nmean", *names, "wave st/\ninterl. st", "wave st/\nplanner"]
    table = _new_table(
        f"MegaMoE on {shown[0][0].world} ranks, us, {kind}",
        [*names, "ceiling\nus", "by", "ceiling/\nplanner"],
    )
    for config, one in shown:
        base, best = one.arms[BASELINE], one.us("planner")
        cells = [*_key_cells(config), f"{base['load_max_over_mean']:.1f}"]
        for arm in ARMS:
            predicted = f" ({one.arms[arm]['predicted_us']:.0f})" if measured else ""
            wrong = "\nWRONG" if arm in one.wrong_arms else ""
            cells.append(f"{one.us(arm):.0f}{predicted}{wrong}")
        cells += [
            f"{one.us(BASELINE) / one.us('interleaved/st'):.2f}x",
            f"{one.us(BASELINE) / best:.2f}x",
            f"{base['ceiling_us']:.0f}",
            base["ceiling_by"],
            f"{base['ceiling_us'] / best:.0%}",
        ]
        if one.wrong_arms:
            # A ratio of which one side is no result says nothing.
            cells[-5:-3] = ["WRONG", "WRONG"]
            cells[-1] = "WRONG"
        table.add_row(*cells, style="red" if one.wrong_arms else None)
    return table


def _floors(shown: Shown) -> Table:
    """Floors, bytes, and how long a tile's results take to leave where that was traced."""
    table = _new_table(
        "Floors and bytes of the heaviest rank (out: every row pulled; least: tokens as often as "
        "among the real layer's ranks); T_iss: handing over a Linear-2 tile, p50/p90",
        [
            "out\nMB", "least\nMB", "arithmetic\nus", "link\nus", "weights\nus",
            "link, real\nlayer us", "dense\nTFLOP/s", "unfused\nus",
            "T_iss us\nwave st", "T_iss us\nplanner",
        ],
    )  # fmt: skip
    for config, one in shown:
        base = one.arms[BASELINE]
        dense = (one.plans or {}).get("matrix_tflops")
        table.add_row(
            *_key_cells(config),
            *(f"{base[name] / 1e6:.1f}" for name in ("egress_bytes", "least_bytes")),
            *(f"{base[f'{name}_floor_us']:.1f}" for name in ("compute", "link", "weights")),
            f"{base['real_link_floor_us']:.1f}",
            "-" if dense is None else f"{dense:.0f}",
            f"{one.us('serial'):.0f}" if "serial" in one.arms else "-",
            *(_span_cell(one, arm) for arm in (BASELINE, "planner")),
        )
    return table


def _span_cell(one: Found, arm: str) -> str:
    trace = one.traces.get(one.arms[arm].get("measured_as", arm), {})
    if "linear2_span_us" not in trace:
        return "-"
    return f"{trace['linear2_span_us']:.1f}/{trace['linear2_span_p90_us']:.1f}"


def _head(shown: Shown, right: Shown, measured: bool) -> list[str]:
    laws = sorted({f"{config.routing}: {config.law_text}" for config, _ in shown})
    lines = [
        f"{len(shown)} configurations, {_kind(shown, measured)}",
        f"  routing is drawn, not recorded from a model; {'; '.join(laws)}",
    ]
    if measured:
        commits = {str(line["commit"]) for _, one in shown for line in one.lines}
        lines.append(f"  measured at commit {', '.join(sorted(commits))}")
    if len(right) < len(shown):
        left_out = len(shown) - len(right)
        lines.append(f"  WRONG results in {left_out} configurations: left out of all that follows")
    for config, one in shown:
        if one.wrong:
            lines.append(f"    WRONG {config.name}: {', '.join(one.wrong)}")
    return lines


def _summary(shown: Shown, measured: bool) -> list[str]:
    names = [config.name for config, _ in shown]
    times = [{arm: one.us(arm) for arm in one.arms} for _, one in shown]
    comparisons = [(BASELINE, arm) for arm in ARMS if arm != BASELINE] + [("wave", "interleaved")]
    if all("serial" in row for row in times):
        comparisons.append(("serial", "planner"))
    lines = []
    for baseline, arm in comparisons:
        result = summarise(times, names, baseline, arm)
        lines.append(
            f"  {baseline} over {arm}: geometric mean {result.mean:.3f}x, "
            f"best {result.best[0]:.2f}x ({result.best[1]}), "
            f"worst {result.worst[0]:.2f}x ({result.worst[1]}), {len(result.regressions)} below 1"
        )
        if (baseline, arm) == (BASELINE, "planner") and measured:
            both = {
                name: (one.us(BASELINE), one.us(arm))
                for name, (_, one) in zip(names, shown, strict=True)
            }
            lines += [
                "    regression {:.3f}x {}: {:.1f} us, {:.1f} us".format(ratio, name, *both[name])
                for ratio, name in result.regressions
            ]
    lines += _alone(shown)
    for label, chosen in (("all", shown), ("held-out", [s for s in shown if s[0].held_out])):
        if chosen:
            lines.append(f"  planner over the best arm, {label}: {_regret_text(chosen)} more")
    attained = sorted(one.arms[BASELINE]["ceiling_us"] / one.us("planner") for _, one in shown)
    middle = attained[len(attained) // 2]
    lines.append(f"  planner's choice reaches {middle:.0%} of the ceiling (median)")
    if measured:
        errors = sorted(
            abs(one.arms[arm]["predicted_us"] / one.us(arm) - 1.0)
            for _, one in shown
            for arm in ARMS
        )
        lines.append(f"  prediction error {errors[len(errors) // 2]:.1%} (median)")
    return lines


def _alone(shown: Shown) -> list[str]:
    """The main ratio where every plan follows itself."""
    arms = BASELINE, "planner"
    alone = [({arm: one.arms[arm].get("alone_us") for arm in arms}, c.name) for c, one in shown]
    both = [(row, name) for row, name in alone if None not in row.values()]
    if not both:
        return []
    result = summarise(*zip(*both, strict=True), BASELINE, "planner")
    head = (
        f"  each following itself ({len(both)} of {len(shown)} configurations), {BASELINE} "
        f"over planner: geometric mean {result.mean:.3f}x, "
        f"worst {result.worst[0]:.2f}x ({result.worst[1]}), {len(result.regressions)} below 1"
    )
    return [head, *(f"    alone {ratio:.3f}x {name}" for ratio, name in result.regressions)]


def _regret_text(shown: Shown) -> str:
    """How much longer the planner's choice takes than the best arm of each configuration."""
    regrets = sorted(
        (one.us("planner") / min(one.us(arm) for arm in RIVALS) - 1.0, c.name) for c, one in shown
    )
    worst, name = regrets[-1]
    return f"median {regrets[len(regrets) // 2][0]:.1%}, worst {worst:.1%} ({name})"


@dataclasses.dataclass(frozen=True)
class Summary:
    """Ratios of a baseline's time to an arm's over configurations."""

    mean: float
    best: tuple[float, str]
    worst: tuple[float, str]
    regressions: tuple[tuple[float, str], ...]


def summarise(
    times: Sequence[Mapping[str, float]], names: Sequence[str], baseline: str, arm: str
) -> Summary:
    """Geometric mean, extremes, and every configuration below 1."""
    ratios = [(row[baseline] / row[arm], name) for row, name in zip(times, names, strict=True)]
    slower = tuple(sorted(pair for pair in ratios if pair[0] < 1.0))
    return Summary(_sweep.geometric_mean(r for r, _ in ratios), max(ratios), min(ratios), slower)
