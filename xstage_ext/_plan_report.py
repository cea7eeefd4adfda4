"""What `xstage plan` says about a layer: the law's numbers, and why."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any, overload

import numpy as np

from ._attention_report import AttentionReport
from ._burst_report import HEAD, LAW, BurstReport, beyond_measurement
from .machine import MachineProfile
from .model import BurstGap, burst_shadow
from .planner.attention_choice import AttentionProblem
from .planner.choose import (
    RING_BYTES,
    Decision,
    choose,
    family_plans,
    predicted_us,
    profile_here,
)
from .planner.megamoe import MegaMoePlan, check_given
from .planner.problem import MoEProblem
from .simulate import (
    TILE_COLUMNS,
    TYPICAL_ERROR,
    Assumptions,
    Simulation,
    simulate_megamoe,
    tile_us,
)

MECHANISMS = ("st", "bulk")


@dataclasses.dataclass(frozen=True)
class PlanReport:
    """A decision with the numbers behind it.

    `alternatives`: what the simulator says of every family of plans, with the fields that the
    caller gave; families that contradict these are left out.
    """

    problem: MoEProblem
    decision: Decision
    alternatives: tuple[tuple[str, float], ...]
    bursts: tuple[BurstReport, ...]
    simulation: Simulation
    beyond: str | None = None
    """What of this problem the profile has not seen (`beyond_measurement`)."""

    @property
    def timed(self) -> str | None:
        """What the entry of a table of plans says of itself, if one decided (XSTAGE_PLANS)."""
        return self.decision.timed

    def as_dict(self) -> dict[str, Any]:
        """Plain types for JSON."""
        return {
            "problem": dataclasses.asdict(self.problem),
            "decision": dataclasses.asdict(self.decision),
            "alternatives": dict(self.alternatives),
            "bursts": [dataclasses.asdict(burst) for burst in self.bursts],
            "predicted": {
                "total_us": self.simulation.total_us,
                "stall_us": self.simulation.stall_us,
                "shadow_wait_us": self.simulation.mean("shadow_wait_us"),
                "flag_wait_us": self.simulation.mean("flag_wait_us"),
                "egress_GBps": self.simulation.egress_GBps,
            },
            "not_measured": self.beyond,
            "timed": self.timed,
        }

    def picture(self, path: pathlib.Path) -> None:
        """The timeline of the first SMs and of the link, predicted, as PNG."""
        title = f"{self.decision.action}, predicted by profile {self.decision.profile}"
        draw_timeline(self.simulation, title, path)

    def second_opinion(self) -> str:
        """Whether the simulator would choose alike; if not, what that is worth and who decides."""
        times = dict(self.alternatives)
        fastest = min(times, key=lambda name: times[name])
        if times[fastest] == times[self.decision.family]:
            return "The simulator would choose alike."
        less = 1.0 - times[fastest] / times[self.decision.family]
        told = f"The simulator would take {fastest}, {less:.1%} less"
        judge = "ranking" if self.timed is None else "table"
        if not self.decision.covered:
            this = ", ".join(self.decision.given)
            what = f"such plans (given: {this})" if this else "a layer like this one"
            return f"{told}. The {judge} decides, but nobody measured {what}."
        if self.timed is not None:
            return f"{told}. The table decides: it holds times of this layer."
        if less < TYPICAL_ERROR:
            return f"{told}. The ranking decides: plans differ by less than the simulator errs."
        return (
            f"{told}, more than it usually errs ({TYPICAL_ERROR:.0%}). The ranking, fitted to like "
            "layers, decides; nobody measured this one: `xstage tune` does."
        )

    def judged_by(self) -> str:
        """Where the expected times come from."""
        given = ", ".join(name for name in self.decision.given if name != "dispatch")
        besides = f", without what is given ({given})" if given else ""
        if self.timed is None:
            return f"a ranking fitted to measurements{besides}"
        source = self.timed or "no source"
        return f"times of this layer in the table of XSTAGE_PLANS: {source}{besides}"

    def parts(self) -> str:
        """Where the predicted time goes, mean over the SMs; whole us that add up to the total."""
        s = self.simulation
        parts = {
            "arithmetic": round(s.mean("math_us")),
            "waiting for the link": round(s.stall_us),
            "loads in a shadow": round(s.mean("shadow_wait_us")),
            "waiting for flags": round(s.mean("flag_wait_us")),
            "combine": round(s.combine_us),
        }
        other = round(s.total_us) - sum(parts.values())
        parts["other"] = other  # set-up, epilogues, memory, uneven ends
        return ", ".join(f"{name} {us}" for name, us in parts.items())

    def text(self) -> str:
        """For people."""
        d, s = self.decision, self.simulation
        expected = dict(d.expected)
        lines = [
            f"{d.action}: {d.reason}.",
            f"Predicted {s.total_us:.0f} us per rank and call by profile {d.profile} "
            f"({d.provenance}): {self.parts()}; egress {s.egress_GBps:.0f} GB/s.",
            f"Floors: arithmetic {d.floors.compute_us:.0f}, link {d.floors.egress_us:.0f}, "
            f"weights {d.floors.weights_us:.0f} us. Workspace {d.bytes / 1e6:.0f} MB per rank.",
            *([self.beyond] if self.beyond else []),
            "",
            "Families of plans (* chosen), by expected time over the fastest one's "
            f"({self.judged_by()}), and what the simulator says, us:",
            *(
                f"{'*' if name == d.family else ' '} {name:<22} {expected[name]:6.3f}  {us:8.1f}"
                for name, us in self.alternatives
            ),
            self.second_opinion(),
            "",
            f"Linear-2 tiles ({LAW}), us:",
            f"  order        store  {HEAD}",
            *(f"  {b.order:<12} {b.mechanism:<6} {b.cells()}" for b in self.bursts),
        ]
        plan = dataclasses.asdict(d.plan)
        lines += ["", "Plan: " + " ".join(f"{name}={value}" for name, value in plan.items())]
        return "\n".join(lines)


def gaps_us(plan: MegaMoePlan, profile: MachineProfile) -> dict[str, float]:
    """Mean time without stores after a Linear-2 tile, by order: G of the law."""
    linear1, _ = tile_us(profile, plan, plan.hidden)
    linear2, _ = tile_us(profile, plan, plan.intermediate)
    assume = Assumptions()
    per_tile = plan.linear1_tiles / plan.linear2_tiles
    wave = linear2 + assume.epilogue2_us
    return {"wave": wave, "interleaved": wave + per_tile * (linear1 + assume.epilogue1_us)}


def burst_reports(
    plan: MegaMoePlan, profile: MachineProfile, remote_share: float
) -> tuple[BurstReport, ...]:
    """The law for every order and mechanism."""
    B = 2.0 * plan.block_m * plan.block_n
    K = float(plan.num_sms)
    reports = []
    for order, gap in gaps_us(plan, profile).items():
        for name in MECHANISMS:
            law = BurstGap.of(
                profile.mechanism(name), K, B, remote_share=remote_share, both_directions=True
            )
            shadow = float(burst_shadow(profile, name, "bulk_load", K, B * remote_share))
            reports.append(BurstReport.of(order, name, law, gap, shadow))
    return tuple(reports)


@overload
def plan_report(
    problem: MoEProblem, profile: MachineProfile | None = None, **overrides: int
) -> PlanReport: ...


@overload
def plan_report(
    problem: AttentionProblem, profile: MachineProfile | None = None, **overrides: int
) -> AttentionReport: ...


def plan_report(
    problem: MoEProblem | AttentionProblem,
    profile: MachineProfile | None = None,
    **overrides: int,
) -> PlanReport | AttentionReport:
    """Decide, and collect what explains the decision: `text()`, `as_dict()`, `picture(path)`.

    Parameters
    ----------
    problem : MoEProblem or AttentionProblem
    profile : MachineProfile, optional
        `machine.load(name)`; None: this GPU's.
    **overrides : int
        Fields of `MegaMoePlan` or launch fields of `AttentionPlan` that are given, not chosen.

    Raises
    ------
    PlanError
        An override is no field, or makes the plan impossible.
    TypeError
        `problem` or `profile` is something else.
    """
    if not isinstance(problem, (MoEProblem, AttentionProblem)):
        raise TypeError(
            "xstage.plan_report: problem: expected a MoEProblem or an AttentionProblem, got "
            f"{type(problem).__name__}"
        )
    if profile is not None and not isinstance(profile, MachineProfile):
        raise TypeError(
            "xstage.plan_report: profile: expected a MachineProfile, got "
            f"{type(profile).__name__}; xstage_ext.machine.load(name) reads one"
        )
    if isinstance(problem, AttentionProblem):
        return AttentionReport.of(problem, profile, overrides)
    check_given(overrides)
    profile = profile_here() if profile is None else profile
    decision = choose(problem, profile, **overrides)
    simulation = simulate_megamoe(
        decision.plan, problem.even_counts(), profile, trace=True, num_tokens=problem.load
    )
    alternatives = tuple(
        (name, predicted_us(problem, plan, profile))
        for name, plan in family_plans(
            problem, profile, RING_BYTES, overrides, [name for name, _ in decision.expected]
        )
    )
    bursts = burst_reports(decision.plan, profile, problem.remote)
    beyond = beyond_measurement(profile, problem.world)
    return PlanReport(problem, decision, alternatives, bursts, simulation, beyond)


def draw_timeline(
    simulation: Simulation, title: str, path: pathlib.Path, workers: int = 12
) -> None:
    """Tiles of the first workers over time and what the combine adds; below, the link's use. Every
    figure is predicted."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(11, 6), sharex=True, height_ratios=[3, 1], layout="constrained"
    )
    column = {name: i for i, name in enumerate(TILE_COLUMNS)}
    colours = {1: "#4477aa", 2: "#66ccee"}
    for tile in simulation.tiles[simulation.tiles[:, column["worker"]] < workers]:
        row = tile[column["worker"]]
        wait, begin, store, end = (
            tile[column[name]]
            for name in ("wait_begin_us", "main_begin_us", "store_begin_us", "end_us")
        )
        phase = int(tile[column["phase"]])
        top.broken_barh([(begin, store - begin)], (row - 0.4, 0.8), color=colours[phase])
        if end > store:
            colour = "#ccbb44" if phase == 1 else "#ee6677"
            top.broken_barh([(store, end - store)], (row - 0.4, 0.8), color=colour)
        if begin > wait:
            top.broken_barh([(wait, begin - wait)], (row - 0.15, 0.3), color="0.8")
    for label, colour in {
        "Linear-1": colours[1],
        "Linear-2": colours[2],
        "Linear-1 epilogue": "#ccbb44",
        "Linear-2 stores": "#ee6677",
        "waiting for flags": "0.8",
    }.items():
        top.bar(0, 0, color=colour, label=label)
    total_us = simulation.total_us
    top.axvspan(total_us - simulation.combine_us, total_us, color="#bbbbdd", label="combine")
    top.legend(ncols=6, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, 1.12))
    top.set_ylabel("cluster of SMs")
    top.invert_yaxis()
    time = (np.arange(len(simulation.link)) + 0.5) * simulation.bin_us
    stores = simulation.link[:, 0]
    bottom.fill_between(time, 0, stores, step="mid", color="#ee6677", label="own stores")
    total = simulation.link.sum(axis=1)
    bottom.fill_between(time, stores, total, step="mid", color="#228833", label="tokens")
    bottom.set_ylabel("egress GB/s")
    bottom.set_xlabel("us since the start of the kernel (predicted)")
    bottom.legend(fontsize=8)
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
