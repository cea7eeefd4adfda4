"""Times the planner's families of plans for one layer, on the ranks at hand."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable

import torch

from ._trace_moe import MoETensors
from .errors import XStageError
from .machine import MachineProfile
from .planner import measured, ranking
from .planner.choose import family_plan
from .planner.megamoe import DISPATCHES, MegaMoePlan
from .planner.problem import MoEProblem
from .testing import time_arms
from .workspace import SymmetricWorkspace, region_bytes


def plans_of(problem: MoEProblem, profile: MachineProfile) -> dict[MegaMoePlan, list[str]]:
    """Every plan once, with the families that it belongs to."""
    found: dict[MegaMoePlan, list[str]] = {}
    for name, fields in ranking.FAMILIES.items():
        plan = family_plan(problem, profile, ranking.DEFAULTS | fields)
        found.setdefault(plan, []).append(name)
    return found


def tune(
    problem: MoEProblem,
    profile: MachineProfile,
    tensors: MoETensors,
    *,
    pairs: int = 20,
    device: torch.device | str | None = None,
) -> measured.Entry:
    """Medians of the maximum over ranks, plans in turns; the same on every rank.

    Every rank of WORLD calls it. The plans' results are compared bit for bit before.

    Raises
    ------
    XStageError
        A plan gave another result than the first one.
    """
    plans = plans_of(problem, profile)
    names = {families[0]: plan for plan, families in plans.items()}
    nbytes = region_bytes(plan.bytes() for plan in plans)
    with (
        SymmetricWorkspace(nbytes=nbytes, backend="virtual", world=1, device=device)
        if problem.world == 1
        else SymmetricWorkspace(nbytes=nbytes, device=device)
    ) as workspace:

        def call_of(name: str, plan: MegaMoePlan) -> Callable[[], torch.Tensor]:
            words = plan.words(), workspace.channel(name, plan.bytes()).words()
            return lambda: torch.ops.xstage.megamoe(*tensors.all, *words)

        calls = {name: call_of(name, plan) for name, plan in names.items()}
        first = next(iter(calls.values()))()
        for name, call in calls.items():
            if not torch.equal(call(), first):
                raise XStageError(f"xstage tune: {name}: its result differs from the first plan's")
        timings = time_arms(calls, pairs=pairs)
        workspace.check(synchronize=True)
    us = {
        family: round(timings[families[0]].us_median, 2)
        for families in plans.values()
        for family in families
    }
    today = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")
    source = f"{today}, {' '.join(sys.argv[1:])}"
    dispatch = DISPATCHES[next(iter(plans)).dispatch]  # of all of them
    return measured.entry(problem, profile.gpu.name, us, source, dispatch)


def text(problem: MoEProblem, profile: MachineProfile, entry: measured.Entry) -> str:
    """The times, the fastest first, and what the ranking would have chosen."""
    ranked = next(iter(ranking.relative_times(problem, profile, entry.dispatch)))
    lines = [
        f"{problem.load} tokens per rank, {problem.world} ranks; median us, ranking's choice *"
    ]
    for name, us in entry.us:
        mark = "*" if name == ranked else " "
        lines.append(f"{mark} {name:<22} {us:9.1f}  {entry.relative[name]:.3f}")
    return "\n".join(lines)
