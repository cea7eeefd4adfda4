"""Writes the tables of README.md (and of any other page) from benchmarks/results/.

    python benchmarks/render_readme.py [FILE ...] [--check]

A page holds places like

    <!-- results: sweep -->
    <!-- /results -->

and everything between the two marks is replaced. Nothing in a table is typed by hand; a test runs
--check, which fails when a page differs from the results.
"""

from __future__ import annotations

import argparse
import pathlib
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import _plans
import _report
import _sweep

from xstage_ext import machine

FEWEST = 20  # samples that a median should have
PAGES = [_report.ROOT / "README.md", *sorted(_report.ROOT.glob("csrc/*/README.md"))]
PLACE = re.compile(r"(<!-- results: (\S+) -->\n).*?(<!-- /results -->)", re.DOTALL)
Line = Mapping[str, Any]


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose first column is text and whose others are numbers."""
    rule = "|---|" + "---:|" * (len(head) - 1)
    return "\n".join(
        ["| " + " | ".join(head) + " |", rule, *("| " + " | ".join(r) + " |" for r in rows)]
    )


def origin(lines: Sequence[Line]) -> str:
    """Where, when and how, and of which commits: one sentence under every table."""

    def each(name: str) -> list[str]:
        return list(dict.fromkeys(str(line[name]) for line in lines if line.get(name)))

    ranks = "" if lines[-1]["world"] == 1 else f"{lines[-1]['world']} x "
    driver = f", driver {', '.join(each('driver'))}" if each("driver") else ""
    days = sorted({date[:10] for date in each("date")})
    commits = each("commit")
    parts = [f"torch {', '.join(each('torch'))}", " to ".join(dict.fromkeys((days[0], days[-1])))]
    if commits:
        plural = "s" if len(commits) > 1 else ""
        dirty = " (+: with uncommitted changes)" if any(c.endswith("+") for c in commits) else ""
        parts.append(f"commit{plural} {', '.join(commits)}{dirty}")
    parts += [f"`{command}`" for command in each("command")]
    text = f"{ranks}{', '.join(each('gpu')) or 'no GPU'}{driver}; {', '.join(parts)}."
    if each("labelled"):
        text += (
            " Which measured plan an arm stands for, and its prediction, follow commit "
            f"{', '.join(each('labelled'))} (`sweep_84.py --part label`)."
        )
    return text


def sweep() -> str:
    """Geometric means by model over the sweep: times and ratios of wave, interleaved, planner."""
    found = [line for line in _report.read("sweep_84.jsonl") if line["op"] == "megamoe"]
    lines = [line for line in found if line["n"] > 0]
    if not lines:
        return "No results yet: `python benchmarks/sweep_84.py --record`."
    arms = [*_sweep.ARMS, "serial"]
    groups: dict[str, dict[str, dict[str, Line]]] = {}
    for line in lines:
        shape = str(line["shape"])
        groups.setdefault(line["shape"]["model"], {}).setdefault(shape, {})[line["arm"]] = line
    rows = []
    everything: list[dict[str, Line]] = []
    for model, shapes in groups.items():
        complete = [by_arm for by_arm in shapes.values() if set(arms) <= by_arm.keys()]
        everything += complete
        if complete:
            mark = " (held out)" if complete[0]["planner"].get("held_out") else ""
            rows.append([model + mark, str(len(complete)), *_sweep_cells(complete, arms)])
    if not everything:
        return "No complete configuration yet: `python benchmarks/sweep_84.py --record`."
    rows.append(["**all**", str(len(everything)), *_sweep_cells(everything, arms)])
    head = ["model", "n", *(f"{arm}, us" for arm in arms)]
    head += ["wave/st over interleaved/st", "wave/st over planner", "worst", "best"]
    head += [f"wave/st over {_sweep.AS_IT_IS}", "ceiling reached"]
    text = (
        "Geometric means over token counts, remote shares and routings. The planner's ranking of "
        "plans was fitted to these measurements, without the models that are marked (its form was "
        "chosen with all seven in view). Tokens that are pushed cross the link as often as among "
        "the eight ranks for which the two stand; `two ranks` is the planner's choice where one "
        "crosses once, as it does between two. `serial` is the unfused pipeline of torch and NCCL, "
        "in fewer samples."
    )
    text += _as_the_clock_said(everything) + _alone(everything)
    few = sum(found[arm]["n"] < FEWEST for found in everything for arm in _sweep.ARMS)
    if few:
        text += f" {few} of {len(everything) * len(_sweep.ARMS)} times are medians of fewer than "
        text += f"{FEWEST} samples."
    text += "\n\n"
    return text + markdown(head, rows) + "\n\n" + origin(lines)


def _over_planner(complete: Sequence[Mapping[str, Line]], field: str) -> list[float]:
    """The wave with `st` over the planner's choice by one field; empty where some lack it."""
    pairs = [(found["wave/st"].get(field), found["planner"].get(field)) for found in complete]
    ratios = [wave / ours for wave, ours in pairs if wave is not None and ours is not None]
    return ratios if len(ratios) == len(pairs) else []


def _as_the_clock_said(complete: Sequence[Mapping[str, Line]]) -> str:
    """The main ratio without levelling, where times are of levelled samples."""
    ratios = _over_planner(complete, "raw_us")
    if not ratios:
        return ""
    return (
        " Times are medians of samples levelled by their neighbours in time (docs/MEASURING.md); "
        f"by samples as they were, wave/st over planner is {_sweep.geometric_mean(ratios):.3f}x."
    )


def _alone(complete: Sequence[Mapping[str, Line]]) -> str:
    """The main ratio where every plan follows itself."""
    ratios = _over_planner(complete, "alone_us")
    if not ratios:
        return ""
    return (
        " Called again and again instead of in turns with others, at the clock that its own power "
        f"allows, wave/st over planner is {_sweep.geometric_mean(ratios):.3f}x "
        f"({min(ratios):.2f}x to {max(ratios):.2f}x)."
    )


def _sweep_cells(complete: Sequence[Mapping[str, Line]], arms: Sequence[str]) -> list[str]:
    """Means over configurations whose results are right; the last cell says how many are not."""
    right = [found for found in complete if all(found[arm]["ok"] is True for arm in arms)]
    wrong = f"{len(complete) - len(right)} WRONG"
    if not right:
        return [*["-"] * (len(arms) + 5), wrong]
    times = [{arm: found[arm]["us_median"] for arm in arms} for found in right]
    published = [row["wave/st"] / row["interleaved/st"] for row in times]
    ratio = [row["wave/st"] / row["planner"] for row in times]
    reached = [f["planner"]["ceiling_us"] / f["planner"]["us_median"] for f in right]
    cells = [f"{_sweep.geometric_mean(row[arm] for row in times):.0f}" for arm in arms]
    cells.append(f"{_sweep.geometric_mean(published):.3f}x")
    cells.append(f"{_sweep.geometric_mean(ratio):.3f}x")
    cells += [f"{min(ratio):.2f}x", f"{max(ratio):.2f}x"]
    once = _sweep.geometric_mean(row["wave/st"] / row[_sweep.AS_IT_IS] for row in times)
    cells += [f"{once:.3f}x", f"{_sweep.geometric_mean(reached):.0%}"]
    if len(right) < len(complete):
        cells[-1] += f" ({wrong} left out)"
    return cells


def at_home() -> str:
    """Geometric means by model, all rows at home: the planner's plans and dense products."""
    lines = list(_report.read("at_home.jsonl"))
    if not lines:
        return "No results yet: `python benchmarks/bench_at_home.py --record`."
    profile = machine.load("h200x2")
    groups: dict[str, list[tuple[float, float, float]]] = {}
    for case in _plans.read(lines):
        wave, ours = (
            case.of(_sweep.plan_of(case.config, a, profile)) for a in ("wave/st", "planner")
        )
        if wave is not None and ours is not None and case.matrix_tflops is not None:
            dense_us = case.load.flops / case.matrix_tflops / 1e6
            groups.setdefault(case.config.model, []).append((wave.us, ours.us, dense_us))
    groups["**all**"] = [times for some in groups.values() for times in some]
    rows = []
    for model, times in groups.items():
        means = [_sweep.geometric_mean(column) for column in zip(*times, strict=True)]
        ratios = [wave / ours for wave, ours, _ in times]
        cells = [f"{us:.0f}" for us in means]
        cells += [f"{ratio:.3f}x" for ratio in (means[0] / means[1], min(ratios), max(ratios))]
        rows.append([model, str(len(times)), *cells, f"{means[2] / means[1]:.0%}"])
    head = ["model", "n", "wave/st, us", "planner, us", "dense product, us"]
    head += ["wave/st over planner", "worst", "best", "dense over planner"]
    return markdown(head, rows) + "\n\n" + origin(lines)


def by_arm(file: str, command: str) -> Callable[[], str]:
    """Per operator a table with a row per shape and a column of medians per arm."""

    def tables() -> str:
        lines = [line for line in _report.read(file) if line["n"] > 0]
        if not lines:
            return f"No results yet: `{command}`."
        operators = dict.fromkeys(line["op"] for line in lines)
        return "\n\n".join(_table([x for x in lines if x["op"] == op]) for op in operators)

    return tables


SHAPES = {
    "attention": "{name}: {rows:,} rows, {heads} x {head_dim}",
    "attention_a2a": "{name}: {rows:,} rows, {heads} x {head_dim}",
    "megamoe": "{tokens:,} x {hidden:,} x {intermediate:,}, {local_experts} experts, top {topk}",
    "ulysses_attention": "{model}: {rows:,} rows, {heads} x {D} on all ranks",
    "ulysses_a2a": "to {direction}, {rows:,} rows, {heads} x {D}",
}
"""How a shape reads in a table, by operator; tokens, experts and heads are those of one rank."""


def _shape(line: Line) -> str:
    pattern = SHAPES.get(line["op"])
    if pattern is None:
        return " ".join(f"{name}={value}" for name, value in line["shape"].items())
    return pattern.format(**line["shape"])


def _table(lines: Sequence[Line]) -> str:
    arms = list(dict.fromkeys(line["arm"] for line in lines))
    shapes: dict[str, dict[str, Line]] = {}
    for line in lines:
        shapes.setdefault(_shape(line), {})[line["arm"]] = line
    rows = [[name, *(_cell(found.get(arm)) for arm in arms)] for name, found in shapes.items()]
    head = [lines[0]["op"], *(f"{arm}, us" for arm in arms)]
    return markdown(head, rows) + "\n\n" + origin(lines)


def _cell(line: Line | None) -> str:
    if line is None:
        return "-"
    wrong = "" if line["ok"] in (True, None) else " (WRONG)"
    return f"{line['us_median']:.1f}{wrong}"


def _shapes(file: str, op: str) -> dict[str, dict[str, Line]]:
    """Measured lines by shape and arm."""
    found: dict[str, dict[str, Line]] = {}
    for line in _report.read(file):
        if line["op"] == op and line["n"] > 0:
            found.setdefault(_shape(line), {})[line["arm"]] = line
    return found


def _times(arms: Mapping[str, Line], slow: str, fast: str) -> str:
    """How many times as long one arm takes as another."""
    if slow not in arms or fast not in arms:
        return "-"
    return f"{arms[slow]['us_median'] / arms[fast]['us_median']:.3f}"


def _over_fa3(arms: Mapping[str, Line], arm: str) -> str:
    """An arm over attention alone: round by round with its interval, where that was recorded."""
    line = arms.get(arm, {})
    if "over_fa3" not in line:
        return _times(arms, arm, "fa3")
    return f"{line['over_fa3']:.3f} [{line['over_low']:.3f} {line['over_high']:.3f}]"


def attention_rates() -> str:
    """Attention alone: rate, and how much faster than its rivals."""
    shapes = _shapes("attention.jsonl", "attention")
    rows = [
        [
            name,
            f"{arms['fa3']['tflops']:.0f}",
            *(_over_fa3(arms, rival) for rival in ("cudnn", "fa4")),
        ]
        for name, arms in shapes.items()
    ]
    last = [arms["fa3"] for arms in shapes.values()]
    head = ["rows and heads", "TFLOP/s", "times cuDNN's rate", "times flash-attn-4's"]
    return markdown(head, rows) + "\n\n" + origin(last)


def fused_ratios() -> str:
    """Attention with its All-to-All: over attention alone, and others over it."""
    others = ("fused burst", "fused coupled", "fa3 + a2a", "fa3 + nccl", "cudnn + nccl")
    shapes = _shapes("attention.jsonl", "attention_a2a")
    rows = [
        [
            name,
            *(f"{arms[arm]['us_median']:.1f}" for arm in ("fa3", "fused")),
            _over_fa3(arms, "fused"),
            *(_times(arms, arm, "fused") for arm in others),
        ]
        for name, arms in shapes.items()
    ]
    last = [arms["fused"] for arms in shapes.values()]
    head = ["rows and heads of one rank", "alone, us", "fused, us", "fused over alone"]
    head += [f"{arm} over fused" for arm in others]
    return markdown(head, rows) + "\n\n" + origin(last)


def a2a_rates() -> str:
    """The All-to-All: time and rate on the link by size, direction and heads of the model."""
    arms = {"auto-0": "default", "bulk-0": "bulk", "vector-0": "vector", "padded-0": "padded rows"}
    arms |= {"permute+nccl": "permute, NCCL, permute", "nccl": "NCCL alone"}
    lines = [line for line in _report.read("a2a.jsonl") if line["n"] > 0]
    found: dict[tuple[str, int, float], dict[str, Line]] = {}
    for line in lines:
        where = line["shape"]["direction"], line["shape"]["heads"], line["remote_MB"]
        found.setdefault(where, {})[line["arm"]] = line

    def cell(line: Line | None) -> str:
        return "-" if line is None else f"{line['us_median']:.1f} ({line['egress_GBps']:.0f})"

    rows = [
        [f"{size:.2f} MB to {direction}, {heads} heads", *(cell(by_arm.get(arm)) for arm in arms)]
        for (direction, heads, size), by_arm in found.items()
    ]
    head = ["remote bytes of a call", *(f"{name}, us (GB/s)" for name in arms.values())]
    return markdown(head, rows) + "\n\n" + origin(lines)


TABLES: dict[str, Callable[[], str]] = {
    "sweep": sweep,
    "at-home": at_home,
    "a2a": by_arm("a2a.jsonl", "torchrun --nproc-per-node 2 benchmarks/bench_a2a.py"),
    "attention": by_arm(
        "attention.jsonl", "torchrun --nproc-per-node 2 benchmarks/bench_attention.py"
    ),
    "megamoe": by_arm("megamoe.jsonl", "torchrun --nproc-per-node 2 benchmarks/bench_megamoe.py"),
    "rival": by_arm(
        "megamoe_rival.jsonl",
        "torchrun --nproc-per-node 2 benchmarks/bench_megamoe.py --out megamoe_rival.jsonl",
    ),
    "models": by_arm("models.jsonl", "torchrun --nproc-per-node 2 benchmarks/bench_model.py"),
    "attention-rates": attention_rates,
    "fused-ratios": fused_ratios,
    "a2a-rates": a2a_rates,
}


def render(text: str) -> str:
    """The page with every place filled; ValueError for an unknown name."""

    def fill(match: re.Match[str]) -> str:
        name = match.group(2)
        if name not in TABLES:
            raise ValueError(f"results: expected one of {', '.join(TABLES)}, got {name}")
        return f"{match.group(1)}{TABLES[name]()}\n{match.group(3)}"

    return PLACE.sub(fill, text)


def main() -> int:
    """Render or check pages; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", type=pathlib.Path, default=PAGES)
    parser.add_argument("--check", action="store_true", help="change nothing, fail on difference")
    arguments = parser.parse_args()
    stale = []
    for file in arguments.files:
        text = file.read_text(encoding="utf-8")
        rendered = render(text)
        if rendered == text:
            continue
        stale.append(str(file))
        if not arguments.check:
            file.write_text(rendered, encoding="utf-8")
    if stale:
        print("stale:" if arguments.check else "rendered:", *stale)
    return 1 if stale and arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())
