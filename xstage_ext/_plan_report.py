"""What `xstage plan` says about a mixture-of-experts layer: the law's numbers, and why."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import numpy as np

from .machine import MachineProfile
from .model import BurstGap, Regime, burst_shadow
from .planner import measured, ranking
from .planner.choose import Decision, choose, family_plan, predicted_us, profile_here
from .planner.megamoe import MegaMoePlan
from .planner.problem import MoEProblem
from .simulate import TILE_COLUMNS, Assumptions, Simulation, simulate_megamoe, tile_us

MECHANISMS = ("st", "bulk")


@dataclasses.dataclass(frozen=True)
class BurstReport:
    """The law for the tiles of Linear-2 in one order and by one mechanism; times in us.

    Attributes
    ----------
    order : str
        `"wave"`: Linear-2 tiles follow each other. `"interleaved"`: Linear-1 work lies between.
    gap_us : float
        Time without stores after a tile, G.
    T_iss_us, free_running_us : float
        Issue time when all SMs burst in step, and when nothing holds them in step.
    shadow_us : float
        Wait of a load issued right after the burst, when all SMs burst together.
    """

    order: str
    mechanism: str
    regime: str
    V_bytes: float
    drain_us: float
    gap_us: float
    T0_us: float
    Q_bytes: float
    capacity_term_us: float
    recovery_gap_us: float | None
    T_iss_us: float
    free_running_us: float
    completion_coupled_us: float
    shadow_us: float


@dataclasses.dataclass(frozen=True)
class PlanReport:
    """A decision with the numbers behind it."""

    problem: MoEProblem
    decision: Decision
    alternatives: tuple[tuple[str, float], ...]
    bursts: tuple[BurstReport, ...]
    simulation: Simulation
    beyond: str | None = None
    """What of this problem the profile has not seen (`beyond_measurement`)."""
    timed: str | None = None
    """What the entry of a table of plans says of itself, if one decided (XSTAGE_PLANS)."""

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
        """Whether the simulator would choose alike, and who decides."""
        times = dict(self.alternatives)
        fastest = min(times, key=lambda name: times[name])
        if fastest == self.decision.family:
            return "The simulator would choose alike."
        less = 1.0 - times[fastest] / times[self.decision.family]
        judge = "ranking" if self.timed is None else "table"
        return (
            f"The simulator would take {fastest}, {less:.1%} less. The {judge} decides: plans "
            "differ by less than the simulator errs."
        )

    def judged_by(self) -> str:
        """Where the expected times come from."""
        if self.timed is None:
            return "a ranking fitted to measurements"
        return f"times of this layer in the table of XSTAGE_PLANS: {self.timed or 'no source'}"

    def text(self) -> str:
        """For people."""
        d, s = self.decision, self.simulation
        lines = [
            f"{d.action}: {d.reason}.",
            f"Predicted {s.total_us:.0f} us per rank and call by profile {d.profile} "
            f"({d.provenance}): arithmetic {s.mean('math_us'):.0f}, waiting for the link "
            f"{s.stall_us:.0f}, loads in a shadow {s.mean('shadow_wait_us'):.0f}, waiting for "
            f"flags {s.mean('flag_wait_us'):.0f}, combine {s.combine_us:.0f}; "
            f"egress {s.egress_GBps:.0f} GB/s.",
            f"Floors: arithmetic {d.floors.compute_us:.0f}, link {d.floors.egress_us:.0f}, "
            f"weights {d.floors.weights_us:.0f} us. Workspace {d.bytes / 1e6:.0f} MB per rank.",
            *([self.beyond] if self.beyond else []),
            "",
            "Families of plans (* chosen), by expected time over the fastest one's "
            f"({self.judged_by()}), and what the simulator says, us:",
            *(
                f"{'*' if name == d.family else ' '} {name:<22} {ratio:6.3f}  {us:8.1f}"
                for (name, us), (_, ratio) in zip(self.alternatives, d.expected, strict=True)
            ),
            self.second_opinion(),
            "",
            "Linear-2 tiles (in step: max(T0, V/R - G, (V - Q)/R); free: max(T0, V/R - G)), us:",
            "  order        store  regime     V MB   V/R     G    T0  Q MB    G*  in step   free"
            "  fence  shadow",
        ]
        for b in self.bursts:
            star = "  inf" if b.recovery_gap_us is None else f"{b.recovery_gap_us:5.1f}"
            lines.append(
                f"  {b.order:<12} {b.mechanism:<6} {b.regime:<9} {b.V_bytes / 1e6:5.2f} "
                f"{b.drain_us:5.1f} {b.gap_us:5.1f} {b.T0_us:5.2f} {b.Q_bytes / 1e6:5.2f} {star} "
                f"{b.T_iss_us:8.2f} {b.free_running_us:6.2f} {b.completion_coupled_us:6.1f} "
                f"{b.shadow_us:7.1f}"
            )
        plan = dataclasses.asdict(d.plan)
        lines += ["", "Plan: " + " ".join(f"{name}={value}" for name, value in plan.items())]
        return "\n".join(lines)


def beyond_measurement(profile: MachineProfile, world: int) -> str | None:
    """A sentence for worlds larger than those in which the profile was measured, else None."""
    if world <= profile.world:
        return None
    return (
        f"Not measured: profile {profile.name} knows bursts between {profile.world} GPUs, one "
        f"destination each. For {world} GPUs the same rate per GPU is assumed, however many send "
        "to one."
    )


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
            star = float(law.recovery_gap())
            reports.append(
                BurstReport(
                    order=order,
                    mechanism=name,
                    regime=Regime(int(law.regime(gap))).name.lower(),
                    V_bytes=float(np.asarray(law.V_bytes)),
                    drain_us=float(law.drain_us),
                    gap_us=gap,
                    T0_us=float(np.asarray(law.T0_us)),
                    Q_bytes=float(np.asarray(law.Q_bytes)),
                    capacity_term_us=float(law.capacity_term_us),
                    recovery_gap_us=None if np.isinf(star) else star,
                    T_iss_us=float(law.steady(gap)),
                    free_running_us=float(law.free_running(gap)),
                    completion_coupled_us=float(law.completion_coupled(gap)),
                    shadow_us=float(burst_shadow(profile, name, "bulk_load", K, B * remote_share)),
                )
            )
    return tuple(reports)


def plan_report(
    problem: MoEProblem, profile: MachineProfile | None = None, **overrides: int
) -> PlanReport:
    """Decide, and collect what explains the decision: `text()`, `as_dict()`, `picture(path)`.

    Parameters
    ----------
    profile : MachineProfile, optional
        `machine.load(name)`; None: this GPU's.
    **overrides : int
        Fields of `MegaMoePlan` that are given, not chosen.

    Raises
    ------
    PlanError
        An override is no field, or makes the plan impossible.
    TypeError
        `problem` or `profile` is something else.
    """
    _expect("problem", problem, MoEProblem, "xstage_ext.explain answers for attention")
    if profile is not None:
        _expect("profile", profile, MachineProfile, "xstage_ext.machine.load(name) reads one")
    profile = profile_here() if profile is None else profile
    timed = measured.find(measured.asked_for(), problem, profile.gpu.name)
    decision = choose(problem, profile, **overrides)
    simulation = simulate_megamoe(
        decision.plan, problem.even_counts(), profile, trace=True, num_tokens=problem.load
    )
    alternatives = tuple(
        (name, predicted_us(problem, family_plan(problem, profile, _fields(name)), profile))
        for name, _ in decision.expected
    )
    bursts = burst_reports(decision.plan, profile, problem.remote)
    beyond = beyond_measurement(profile, problem.world)
    source = None if timed is None else timed.source
    return PlanReport(problem, decision, alternatives, bursts, simulation, beyond, source)


def _expect(name: str, value: object, kind: type, remedy: str) -> None:
    if not isinstance(value, kind):
        raise TypeError(
            f"xstage.plan_report: {name}: expected a {kind.__name__}, got "
            f"{type(value).__name__}; {remedy}"
        )


def _fields(family: str) -> dict[str, int]:
    return ranking.DEFAULTS | ranking.FAMILIES[family]


def draw_timeline(
    simulation: Simulation, title: str, path: pathlib.Path, workers: int = 12
) -> None:
    """Tiles of the first workers over time, and the link's use below; every figure predicted."""
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
    top.legend(ncols=5, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, 1.12))
    top.set_ylabel("cluster of SMs")
    top.invert_yaxis()
    time = (np.arange(len(simulation.link)) + 0.5) * simulation.bin_us
    stores = simulation.link[:, 0]
    bottom.fill_between(time, 0, stores, step="mid", color="#ee6677", label="own stores")
    total = simulation.link.sum(axis=1)
    bottom.fill_between(time, stores, total, step="mid", color="#228833", label="answers to pulls")
    bottom.set_ylabel("egress GB/s")
    bottom.set_xlabel("us since the start of the kernel (predicted)")
    bottom.legend(fontsize=8)
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
