"""What `xstage plan` says about an attention layer: the law's numbers of every way to send."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any

from ._burst_report import HEAD, LAW, BurstReport, beyond_measurement
from .machine import MachineProfile, load_here
from .planner.attention import check_launch_fields
from .planner.attention_choice import (
    HEAD_DIMS,
    HEAD_DIMS_TEXT,
    AttentionDecision,
    AttentionProblem,
    decide,
)
from .planner.attention_cost import Ends, Tiles, Way, sends, ways


@dataclasses.dataclass(frozen=True)
class Span:
    """A stretch of an SM's time, in us. `kind`: "compute", "store", "shadow", "drain" or "signal";
    shadows lie over what else the SM does.
    """

    kind: str
    begin_us: float
    us: float


@dataclasses.dataclass(frozen=True)
class AttentionReport:
    """A decision with the numbers behind it.

    `ways`: every way to send, by the law; empty where one rank sends nothing. `chosen`: which of
    them was chosen, None there.
    """

    problem: AttentionProblem
    decision: AttentionDecision
    tiles: Tiles
    ends: Ends
    ways: tuple[Way, ...]
    given: tuple[str, ...] = ()
    beyond: str | None = None
    """What of this problem the profile has not seen (`beyond_measurement`)."""

    @classmethod
    def of(
        cls, problem: AttentionProblem, profile: MachineProfile | None, fields: dict[str, int]
    ) -> AttentionReport:
        """Decide, and collect what explains the decision."""
        check_launch_fields(fields)
        profile = load_here() if profile is None else profile
        decision = decide(problem, profile, **fields)
        tiles = Tiles.of(problem, profile, fields)
        return cls(
            problem,
            decision,
            tiles,
            Ends.of(problem, tiles, profile),
            ways(problem, tiles, profile, decision.plan.slice_bytes),
            tuple(fields),
            beyond_measurement(profile, problem.world),
        )

    @property
    def chosen(self) -> str | None:
        """Name of the way chosen."""
        if not self.ways:
            return None
        return "serial" if self.decision.action == "serial" else sends(self.decision.plan)

    @property
    def no_kernel(self) -> str | None:
        """Why no kernel would run, so that torch and NCCL do; None where one would."""
        if self.problem.head_dim in HEAD_DIMS:
            return None
        return f"No kernel for head size {self.problem.head_dim} (compiled: {HEAD_DIMS_TEXT})"

    @property
    def bursts(self) -> tuple[BurstReport, ...]:
        """The law for every way."""
        return tuple(
            BurstReport.of(way.name, "tma", way.law, way.gap_us, way.shadow_us) for way in self.ways
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain types for JSON."""
        problem = dataclasses.asdict(self.problem)
        return dataclasses.asdict(self.decision) | {
            "problem": problem | {"dtype": str(self.problem.dtype).removeprefix("torch.")},
            "tiles": dataclasses.asdict(self.tiles),
            "chosen": self.chosen,
            "alternatives": {way.name: way.us for way in self.ways},
            "bursts": [
                dataclasses.asdict(burst)
                | {"bursts_per_tile": way.bursts, "shadow_adds_us": way.shadow_adds_us}
                for way, burst in zip(self.ways, self.bursts, strict=True)
            ],
            "no_kernel": self.no_kernel,
            "not_measured": self.beyond,
        }

    def second_opinion(self) -> str:
        """Whether the law would choose alike; if not, why it was chosen otherwise."""
        us = {way.name: way.us for way in self.ways}
        fastest = min(us, key=lambda name: us[name])
        mine = us[self.chosen or fastest]
        if us[fastest] == mine:
            return "The law would choose alike."
        told = f"The law would take {fastest}, {1.0 - us[fastest] / mine:.1%} less"
        if self.given:
            return f"{told}; given: {', '.join(self.given)}."
        return (
            f"{told}. Whole tiles are kept where their shadow is little beside a tile: there they "
            "were as fast or faster on two H200 (docs/perf_log.md)."
        )

    def text(self) -> str:
        """For people."""
        d = self.decision
        lines = []
        if self.no_kernel is not None:
            lines.append(f"{self.no_kernel}: torch and NCCL run. With a kernel it would be:")
        told = d.predicted_us if self.ways else {"attention": d.predicted_us["attention"]}
        times = ", ".join(f"{name} {us:.1f}" for name, us in told.items())
        lines.append(f"{d.action}: {d.reason}.")
        lines.append(f"Predicted us, profile {d.profile} ({d.provenance}): {times}.")
        lines += [self.beyond] if self.beyond else []
        if self.ways:
            lines += [
                "",
                f"Ways to send (* chosen; {LAW}), n bursts per tile, us:",
                f"  way           n  {HEAD}  makespan  +shadow",
            ]
            for way, burst in zip(self.ways, self.bursts, strict=True):
                lines.append(
                    f"{'*' if way.name == self.chosen else ' '} {way.name:<11} {way.bursts:3d}  "
                    f"{burst.cells()}  {way.us:8.1f} {way.shadow_adds_us:8.1f}"
                )
            lines.append(
                "Serial: all bytes in one burst behind the last tile. +shadow: what shadows add at "
                "most, if SMs stayed in step; makespans leave it out."
            )
            lines.append(self.second_opinion())
        return "\n".join(lines)

    def timeline(self, name: str) -> tuple[Span, ...]:
        """One SM's tiles under a way of `WAYS`, or "attention" where nothing is sent; predicted.

        The last tiles are this rank's own, so the last one sends nothing.
        """
        found = {way.name: way for way in self.ways}
        return tuple(_spans(self.tiles, self.ends, found.get(name)))

    def picture(self, path: pathlib.Path) -> None:
        """The timeline of one SM, fused and serial, predicted, as PNG."""
        draw(self, path)


def _spans(tiles: Tiles, ends: Ends, way: Way | None) -> Iterator[Span]:
    now = ends.launch_us
    for tile in range(tiles.per_sm):
        us = tiles.us
        if way is not None and way.name == "slices" and tile:
            # The slices of the tile before leave between the steps of this one.
            us += way.bursts * float(way.law.stall(way.gap_us))
            yield from _stores(way, now)
        yield Span("compute", now, us)
        now += us
        if way is not None and way.name == "fence":
            held = float(way.law.completion_coupled(tiles.us))
            yield Span("store", now, held)
            now += held
        elif way is not None and way.name == "whole tiles" and tile < tiles.per_sm - 1:
            # A tile's time holds the issue of its stores; waiting for the link comes on top.
            issue = float(way.law.steady(tiles.us))
            now += float(way.law.stall(tiles.us))
            yield Span("store", now - issue, issue)
            yield Span("shadow", now, way.shadow_us or 0.0)
    yield from _end(tiles, ends, way, now)


def _stores(way: Way, begin_us: float) -> Iterator[Span]:
    issue = float(way.law.steady(way.gap_us))
    for burst in range(way.bursts):
        at = begin_us + burst * (issue + way.gap_us)
        yield Span("store", at, issue)
        yield Span("shadow", at + issue, way.shadow_us or 0.0)


def _end(tiles: Tiles, ends: Ends, way: Way | None, now: float) -> Iterator[Span]:
    if way is None:
        return
    drain_us = ends.drain_us if way.name == "serial" else ends.tail_us
    if way.name == "fence":
        drain_us = 0.0
    if way.name == "serial":
        now += ends.launch_us
    if drain_us:
        yield Span("drain", now, drain_us)
    yield Span("signal", now + drain_us, ends.signal_us)


_COLOURS = {
    "compute": "#4477aa",
    "store": "#ee6677",
    "shadow": "0.6",
    "drain": "#ccbb44",
    "signal": "#228833",
}


def draw(report: AttentionReport, path: pathlib.Path) -> None:
    """One SM's tiles: the whole call above, the end of its first tile below; every figure
    predicted.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    chosen = report.chosen or "attention"
    fused = sends(report.decision.plan) if chosen == "serial" else chosen
    rows = [fused, "serial"] if report.ways else [chosen]
    figure, panels = plt.subplots(2, 1, figsize=(11, 5), layout="constrained")
    for row, name in enumerate(rows):
        spans = report.timeline(name)
        for kind, colour in _COLOURS.items():
            bars = [(span.begin_us, span.us) for span in spans if span.kind == kind]
            place = (row + 0.28, 0.14) if kind == "shadow" else (row - 0.25, 0.5)
            for panel in panels:
                edge = "white" if kind == "compute" else colour  # else thin bars are not seen
                panel.broken_barh(bars, place, facecolor=colour, edgecolor=edge, linewidth=0.4)
    for kind, colour in _COLOURS.items():
        panels[0].bar(0, 0, color=colour, label=kind)
    panels[0].legend(ncols=5, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, 1.2))
    begin, end = _window(report, fused)
    panels[1].set_xlim(begin, end)
    panels[1].set_title("around the end of the first tile", fontsize=9)
    for panel in panels:
        panel.set_yticks(range(len(rows)), rows)
        panel.set_ylim(len(rows) - 0.4, -0.5)
    panels[1].set_xlabel("us since the start of the kernel (predicted)")
    d = report.decision
    figure.suptitle(f"one SM; {d.action}, predicted by profile {d.profile}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _window(report: AttentionReport, name: str) -> tuple[float, float]:
    """What of the call is shown enlarged: as much as the first tile's stores and shadow need."""
    first = report.ends.launch_us + report.tiles.us
    busy = [
        span.begin_us + span.us
        for span in report.timeline(name)
        if span.kind in ("store", "shadow") and span.begin_us < first + report.tiles.us
    ]
    need = max(busy, default=first) - first
    need = min(max(need, 2.0), 2.0 * report.tiles.us)
    return first - 0.5 * need, first + 1.5 * need
