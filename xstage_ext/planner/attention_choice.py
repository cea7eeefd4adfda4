"""Decides how a layer's attention and its output All-to-All run: fused or one after the other.

Piggyback: the owner of a tile issues its remote stores and goes on with the next tile. It costs an
issue time per tile, a tail behind the last tile, and, where a burst's shadow reaches the next
loads, pacing. Serial: attention first, then one All-to-All kernel. Any choice can be overridden by
naming a field of the plan. What each takes: `attention_cost.py`.
"""

from __future__ import annotations

import dataclasses
import functools

from .. import machine
from .attention import AttentionPlan
from .attention_cost import Ends, Tiles, makespans, pacing, sends, stalls_us
from .attention_problem import AttentionProblem as AttentionProblem

HEAD_DIMS = (64, 128)
"""Head sizes that the CUDA kernels are compiled for."""
HEAD_DIMS_TEXT = " and ".join(map(str, HEAD_DIMS))
"""The same in words."""


@dataclasses.dataclass(frozen=True)
class AttentionDecision:
    """A plan, and why.

    Attributes
    ----------
    action : str
        "piggyback" (fused) or "serial".
    plan : AttentionPlan
    reason : str
        For people.
    predicted_us : dict
        "attention", "fused", "serial" and "coupled" (every tile waits until it is visible: the
        counterfactual), receiver-ready, in us; predictions from `profile`.
    profile, provenance : str
        Whose numbers, and whether they were measured.
    """

    action: str
    plan: AttentionPlan
    reason: str
    predicted_us: dict[str, float]
    profile: str
    provenance: str


def decide(
    problem: AttentionProblem, profile: machine.MachineProfile | None = None, **fields: int
) -> AttentionDecision:
    """Choose for a problem; the same on every rank, since it reads nothing but its arguments.

    Under a millisecond, then cached. A profile that does not ship is read at first: milliseconds.

    Parameters
    ----------
    problem : AttentionProblem
    profile : MachineProfile, optional
        None: `machine.load_here()`.
    **fields
        Fields of `AttentionPlan` that are given, not chosen.
    """
    if profile is None:
        profile = machine.load_here()
    found = _decided(problem, profile, tuple(sorted(fields.items())))
    return dataclasses.replace(found, predicted_us=dict(found.predicted_us))


@functools.lru_cache(maxsize=256)
def _decided(
    problem: AttentionProblem,
    profile: machine.MachineProfile,
    given: tuple[tuple[str, int], ...],
) -> AttentionDecision:
    fields = dict(given)
    tiles = Tiles.of(problem, profile, fields)
    slices, why = pacing(problem, tiles, profile)
    plan = problem.plan(**({"tile_order": 2 if problem.causal else 0} | slices | fields))
    predicted = makespans(problem, tiles, profile, plan.slice_bytes)
    if sends(plan) == "fence":
        predicted["fused"] = predicted["coupled"]
    if {"slice_bytes", "slice_steps", "completion"} & fields.keys():
        why = f"slices of {plan.slice_bytes} bytes" if plan.slice_bytes else "whole tiles"
    action = "piggyback" if predicted["fused"] <= predicted["serial"] else "serial"
    reason = _reason(problem, profile, tiles, plan, predicted)
    told = [reason, *([why] if problem.world > 1 else [])]
    told += [f"given: {', '.join(fields)}"] if fields else []
    text = "; ".join(told)
    return AttentionDecision(action, plan, text, predicted, profile.name, profile.provenance)


def _reason(
    problem: AttentionProblem,
    profile: machine.MachineProfile,
    tiles: Tiles,
    plan: AttentionPlan,
    predicted: dict[str, float],
) -> str:
    text = f"{tiles.per_sm} tile{'s' if tiles.per_sm != 1 else ''} of {tiles.us:.0f} us per SM"
    if problem.world == 1:
        return f"{text}; one rank keeps its output, so there is no All-to-All"
    ends = Ends.of(problem, tiles, profile)
    text += f" send {tiles.bytes} bytes each: "
    if sends(plan) == "fence":
        each_us = (predicted["fused"] - predicted["attention"] - ends.signal_us) / tiles.per_sm
        text += f"{each_us:.2f} us per tile until it is visible"
    else:
        stall_us = stalls_us(problem, tiles, profile, plan.slice_bytes)
        text += f"{stall_us:.2f} us of stall per tile"
        text += f", {ends.tail_us + ends.signal_us:.1f} us behind the last one"
    alone_us = predicted["serial"] - predicted["attention"]
    return f"{text}, against {alone_us:.1f} us for an All-to-All of its own"
