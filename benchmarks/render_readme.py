"""Writes the result tables of README.md from benchmarks/results/*.jsonl.

    python benchmarks/render_readme.py            # rewrite README.md
    python benchmarks/render_readme.py --check    # fail when it would change

No figure is typed by hand: each comes from a result file, with its hardware, date and command.
Files whose name holds `quick` or `.part-` are not shown.
"""

from __future__ import annotations

import json
import math
import pathlib
import sys
from collections.abc import Iterable
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"
BEGIN, END = "<!-- results: written by benchmarks/render_readme.py -->", "<!-- end of results -->"
FEW = 12  # configurations up to which every one gets a line

# The arm that others are compared with, by operator; the first arm of a file where none is named.
BASELINES = {"megamoe": "wave/st"}

Line = dict[str, Any]


def read(path: pathlib.Path) -> list[Line]:
    """Result lines of a file; the last one may be torn."""
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return [line for line in lines if "arm" in line and "us_median" in line]


def groups(lines: Iterable[Line]) -> dict[tuple[str, int, bool], list[Line]]:
    """Lines by operator, ranks, and whether they were predicted."""
    found: dict[tuple[str, int, bool], list[Line]] = {}
    for line in lines:
        key = (line["op"], line["world"], bool(line.get("predicted")) or line["n"] == 0)
        found.setdefault(key, []).append(line)
    return found


def by_configuration(lines: list[Line]) -> dict[str, dict[str, Line]]:
    """Arms of each configuration; a later line replaces an earlier one."""
    found: dict[str, dict[str, Line]] = {}
    for line in lines:
        found.setdefault(json.dumps(line["shape"]), {})[line["arm"]] = line
    return found


def shape_text(shape: dict[str, Any]) -> str:
    """A configuration in words."""
    return " ".join(f"{name}={value}" for name, value in shape.items() if name != "seed")


def microseconds(line: Line) -> str:
    """A median with its spread, or a prediction."""
    spread = f" [{line['us_p10']:.0f}, {line['us_p90']:.0f}]" if line["n"] else ""
    wrong = " WRONG" if line.get("ok") is False else ""
    return f"{line['us_median']:.0f}{spread}{wrong}"


def detail(configurations: dict[str, dict[str, Line]]) -> list[str]:
    """One row per configuration, one column per arm."""
    arms = list(dict.fromkeys(arm for found in configurations.values() for arm in found))
    rows = ["| us, median [p10, p90] | " + " | ".join(arms) + " |", "|---" * (len(arms) + 1) + "|"]
    for shape, found in configurations.items():
        cells = [microseconds(found[arm]) if arm in found else "" for arm in arms]
        rows.append(f"| {shape_text(json.loads(shape))} | " + " | ".join(cells) + " |")
    return rows


def comparison(configurations: dict[str, dict[str, Line]], baseline: str) -> list[str]:
    """Every arm against the baseline over all configurations that have both."""
    arms = list(dict.fromkeys(arm for found in configurations.values() for arm in found))
    rows = [
        f"| arm | over `{baseline}`, geometric mean | best | worst | below 1.00x | n |",
        "|---|---|---|---|---|---|",
    ]
    for arm in arms:
        both = [f for f in configurations.values() if arm in f and baseline in f]
        if arm == baseline or not both:
            continue
        ratios = sorted(
            ((f[baseline]["us_median"] / f[arm]["us_median"], f[baseline], f[arm]) for f in both),
            key=lambda item: item[0],
        )
        mean = math.exp(sum(math.log(ratio) for ratio, _, _ in ratios) / len(ratios))
        below = sum(ratio < 1.0 for ratio, _, _ in ratios)
        rows.append(
            f"| {arm} | {mean:.3f}x | {extreme(ratios[-1])} | {extreme(ratios[0])} | {below} "
            f"| {len(ratios)} |"
        )
    return rows


def extreme(item: tuple[float, Line, Line]) -> str:
    """A ratio with its two times and its configuration."""
    ratio, base, arm = item
    shape = base["shape"]
    name = f"{shape['model']}, T={shape['tokens']}" if "model" in shape else shape_text(shape)
    return f"{ratio:.2f}x ({base['us_median']:.0f} to {arm['us_median']:.0f} us; {name})"


def source(path: pathlib.Path, line: Line, predicted: bool) -> str:
    """Where a table comes from."""
    where = f"`benchmarks/results/{path.name}`, `{line['command']}`, {line['date'][:10]}"
    if predicted:
        profile = f"profile {line.get('profile')} ({line.get('provenance')})"
        return f"**Predicted** by the simulator, {profile}; nothing here was measured. {where}."
    gpu = f"{line['world']} x {line['gpu']}, driver {line['driver']}, torch {line['torch']}"
    return f"Measured on {gpu}, commit {line['commit']}. {where}."


def tables() -> list[str]:
    """All tables, file after file."""
    text: list[str] = []
    for path in sorted(RESULTS.glob("*.jsonl")):
        if "quick" in path.name or ".part-" in path.name:
            continue
        for (op, world, predicted), lines in groups(read(path)).items():
            configurations = by_configuration(lines)
            text += [
                f"**{op}, {world} ranks, {len(configurations)} configurations.** "
                + source(path, lines[-1], predicted),
                "",
            ]
            baseline = BASELINES.get(op, lines[0]["arm"])
            few = len(configurations) <= FEW
            text += detail(configurations) if few else comparison(configurations, baseline)
            text.append("")
    return text or ["No result files yet: run `make sweep`.", ""]


def render(readme: str) -> str:
    """README with the tables between its markers replaced."""
    before, _, rest = readme.partition(BEGIN)
    _, marker, after = rest.partition(END)
    if not marker:
        raise SystemExit(f"README.md lacks the markers {BEGIN} and {END}")
    return before + BEGIN + "\n\n" + "\n".join(tables()) + END + after


def main() -> int:
    """Rewrites README.md, or checks it."""
    old = README.read_text(encoding="utf-8")
    new = render(old)
    if sys.argv[1:] == ["--check"]:
        print("README.md is up to date" if new == old else "run benchmarks/render_readme.py")
        return int(new != old)
    README.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
