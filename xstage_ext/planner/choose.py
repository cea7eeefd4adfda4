"""Chooses the plan of a megamoe layer: a few families of plans, ranked by what was measured.

Any choice can be overridden by naming a field of the plan. What a plan takes is predicted by the
simulator, which walks the kernel's own schedule against the Burst-Gap law of the machine profile.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence

import torch

from .. import _env, machine
from ..errors import PlanError, ProfileError
from ..simulate import simulate_megamoe
from . import measured, ranking
from .dispatch import dispatch_of
from .floors import Floors as Floors
from .floors import floors as floors
from .megamoe import (
    DISPATCHES,
    SCHEDULES,
    STORES,
    WEIGHT_LAYOUTS,
    MegaMoePlan,
    check_given,
)
from .problem import MoEProblem

RING_BYTES = 512_000_000
"""Most bytes that the two rings of a rank take by default."""


@dataclasses.dataclass(frozen=True)
class Instance:
    """What the kernel library was compiled for: one kernel."""

    block_m: int
    block_n: int
    cluster_size: int


DEFAULT_INSTANCES = (Instance(128, 256, 2),)


@dataclasses.dataclass(frozen=True)
class Decision:
    """A plan, and why.

    Attributes
    ----------
    action : str
        "wave" or "interleaved".
    family : str
        Which of `ranking.FAMILIES` the plan belongs to, overrides aside.
    plan : MegaMoePlan
        What the ops take (`plan.words()`).
    reason : str
        One or two sentences for people.
    expected : tuple of (str, float)
        Families of plans, the fastest first, and their expected time over its.
    floors : Floors
        What no schedule can beat.
    bytes : int
        Workspace bytes per rank.
    profile, provenance : str
        The machine profile, and whether it was measured.
    given : tuple of str
        Fields that the caller gave.
    dispatch : str
        "pull" or "push", which the plan holds as a number.
    covered : bool
        Whether such plans were timed, with this layer or with layers like it.
    timed : str or None
        What the entry of a table of plans says of itself, if one decided (XSTAGE_PLANS).
    """

    action: str
    family: str
    plan: MegaMoePlan
    reason: str
    expected: tuple[tuple[str, float], ...]
    floors: Floors
    bytes: int
    profile: str
    provenance: str
    given: tuple[str, ...] = ()
    covered: bool = True
    dispatch: str = "pull"
    timed: str | None = None


@functools.cache  # a library stays as it was loaded
def instances() -> tuple[Instance, ...]:
    """The kernels of the loaded library; `DEFAULT_INSTANCES` where none is loaded."""
    try:
        lines = torch.ops.xstage.megamoe_instances().split("\n")
    except (NotImplementedError, RuntimeError):
        return DEFAULT_INSTANCES
    found = [Instance(*map(int, line.split()[:3])) for line in lines if line.strip()]
    return tuple(dict.fromkeys(found)) or DEFAULT_INSTANCES


def choose(
    problem: MoEProblem,
    profile: machine.MachineProfile | None = None,
    *,
    ring_bytes: int = RING_BYTES,
    **overrides: int,
) -> Decision:
    """Decide schedule, lead, ring sizes and the way to store; under a millisecond, then cached.

    Families of plans are ranked by what was timed on this machine where XSTAGE_PLANS names a table
    that holds the layer with tokens moved alike (`measured.py`), else by the ranking that the
    package ships. A profile that does not ship is read at first: milliseconds.

    Parameters
    ----------
    problem : MoEProblem
        Equal on every rank, so that every rank decides the same.
    profile : MachineProfile, optional
        None: `machine.load_here()`.
    ring_bytes : int
        Most bytes that both rings of a rank may take. Plans that cannot run in less take more.
    **overrides : int
        Fields of `MegaMoePlan` that are given, not chosen.

    Raises
    ------
    PlanError
        An override is no field, or makes the plan impossible; XSTAGE_PLANS names no table.
    """
    if profile is None:
        profile = profile_here()
    given = tuple(sorted(overrides.items()))
    table = measured.near(measured.asked_for(), problem, profile.gpu.name)
    return _cached(_Asked(problem, profile, ring_bytes, given, table))


def profile_here() -> machine.MachineProfile:
    """The profile of this GPU; of a Hopper GPU that none describes, the bundled H200's."""
    try:
        return machine.load_here()
    except ProfileError:
        if _env.get("XSTAGE_PROFILE") is not None:
            raise
        return machine.load("h200x2")


@dataclasses.dataclass(frozen=True)
class _Asked:
    """A question to the planner."""

    problem: MoEProblem
    profile: machine.MachineProfile
    ring_bytes: int
    given: tuple[tuple[str, int], ...]
    table: tuple[measured.Entry, ...]


@functools.lru_cache(maxsize=256)
def _cached(asked: _Asked) -> Decision:
    """One decision per problem and profile: the layers of a model share it."""
    return _decide(asked, dict(asked.given))


def _decide(asked: _Asked, overrides: dict[str, int]) -> Decision:
    """Families are judged by plans that move tokens as this one will."""
    check_given(overrides)
    problem, profile = asked.problem, asked.profile
    plan_of = functools.partial(family_plans, problem, profile, asked.ring_bytes)
    grid = _grid(problem, profile, ranking.DEFAULTS["idle_sms"], overrides)
    moved, dispatch = {"dispatch": grid["dispatch"]}, DISPATCHES[grid["dispatch"]]
    timed = next((entry for entry in asked.table if entry.dispatch == dispatch), None)
    if timed is not None:
        told, alike, layers = timed.relative, True, "this one"
    else:
        told = ranking.relative_times(problem, profile, dispatch)
        alike = ranking.covers(problem, profile, dispatch)
        layers = "like layers" if alike else "other layers (none like it was measured)"
    family, plan = next(plan_of(overrides | moved, list(told)))
    usual = plan
    if overrides:  # plans that the ranking was fitted to moved tokens by the rule
        _, usual = next(plan_of({} if timed is None else moved, [family]))
    as_timed = plan == usual
    least = floors(problem, profile)
    return Decision(
        action=SCHEDULES[plan.schedule],
        family=family,
        plan=plan,
        reason=_reason(asked, family, plan, told, least, layers if as_timed else None),
        expected=tuple(told.items()),
        floors=least,
        bytes=plan.bytes(),
        profile=profile.name,
        provenance=profile.provenance,
        given=tuple(overrides),
        covered=alike and as_timed,
        dispatch=dispatch,
        timed=None if timed is None else timed.source,
    )


def _reason(
    asked: _Asked,
    family: str,
    plan: MegaMoePlan,
    told: Mapping[str, float],
    least: Floors,
    timed_with: str | None,
) -> str:
    """`timed_with`: the layers with which such plans were timed; None: what is given changes them,
    so nobody did."""
    schedule = ranking.FAMILIES[family]["schedule"]
    others = [us for name, us in told.items() if ranking.FAMILIES[name]["schedule"] != schedule]
    other = "interleaved" if plan.schedule == 0 else "wave"
    floor = f"{least.us:.{0 if least.us >= 10 else 2}f}"
    text = f"{least.binding} sets the floor ({floor} us)"
    text += f"; {SCHEDULES[plan.schedule]} with {STORES[plan.store]} stores"
    if timed_with is not None and others:
        gain = 1.0 - told[family] / min(others)
        text += f" takes {abs(gain):.1%} {'less' if gain >= 0 else 'more'} than the best {other}"
    if timed_with is not None:
        text += f", by measurements of {timed_with}"
    if plan.schedule == 1:
        text += f"; Linear-1 leads by {plan.lead_blocks} m-blocks"
    rows, tokens = asked.problem.remote * asked.problem.topk, asked.problem.sent_tokens
    if DISPATCHES[plan.dispatch] == "push" and rows > 0.0:
        text += f"; tokens are pushed, {tokens:.1f} instead of {rows:.1f} times each over the link"
    elif rows > 0.0:
        text += "; rows are pulled"
    names = ", ".join(name for name, _ in asked.given)
    return f"{text}; given: {names}" if names else text


def predicted_us(problem: MoEProblem, plan: MegaMoePlan, profile: machine.MachineProfile) -> float:
    """What the simulator says of a plan with even routing, us; milliseconds of work."""
    counts = problem.even_counts()
    return simulate_megamoe(plan, counts, profile, num_tokens=problem.load).total_us


def candidates(
    problem: MoEProblem,
    profile: machine.MachineProfile,
    ring_bytes: int = RING_BYTES,
    overrides: Mapping[str, int] | None = None,
) -> Iterator[MegaMoePlan]:
    """Plans worth judging, each once; every one is possible."""
    given, names = dict(overrides or {}), list(ranking.FAMILIES)
    check_given(given)
    yield from dict.fromkeys(
        plan for _, plan in family_plans(problem, profile, ring_bytes, given, names)
    )


def family_plans(
    problem: MoEProblem,
    profile: machine.MachineProfile,
    ring_bytes: int,
    given: Mapping[str, int],
    names: Sequence[str],
) -> Iterator[tuple[str, MegaMoePlan]]:
    """The plan of every named family that agrees with a given schedule and store."""
    for kept in (("schedule", "store"), ("schedule",), ("store",), ()):
        agreeing = [
            name
            for name in names
            if all(ranking.FAMILIES[name][key] == given[key] for key in kept if key in given)
        ]
        if agreeing:
            break
    for name in agreeing:
        fields = ranking.DEFAULTS | ranking.FAMILIES[name]
        plan = family_plan(problem, profile, fields, ring_bytes, given)
        yield name, _legal(dataclasses.replace(plan, **given), given)


def family_plan(
    problem: MoEProblem,
    profile: machine.MachineProfile,
    fields: Mapping[str, int],
    ring_bytes: int = RING_BYTES,
    given: Mapping[str, int] | None = None,
) -> MegaMoePlan:
    """The plan of a family for a problem: distances cut to the load, rings from them.

    Parameters
    ----------
    fields : mapping
        As in `ranking.FAMILIES`, with `ranking.DEFAULTS`.
    given : mapping, optional
        Fields of the tile and the grid that the caller fixes.
    """
    base = _base(problem, profile, fields, given or {})
    blocks = _load_blocks(base, problem)
    most = max(base.group_blocks, ring_bytes // 2 // (2 * base.block_m * base.intermediate))
    key = "wave_blocks" if base.schedule == 0 else "lead_blocks"
    distance = max(1, min(fields[key], blocks, most))
    return _with_rings(base, problem, distance, fields["x_ring_blocks"], ring_bytes)


def _base(
    problem: MoEProblem,
    profile: machine.MachineProfile,
    fields: Mapping[str, int],
    given: Mapping[str, int],
) -> MegaMoePlan:
    """Shape, order, stores, tile and grid; rings follow."""
    plan = MegaMoePlan(
        world=problem.world,
        num_experts=problem.num_experts,
        topk=problem.topk,
        hidden=problem.hidden,
        intermediate=problem.intermediate,
        max_tokens=problem.max_tokens,
        schedule=fields["schedule"],
        store=fields["store"],
        slice_rows=fields["slice_rows"],
        mix=fields["mix"],
        weight_layout=WEIGHT_LAYOUTS.index(problem.weight_layout),
        token_sets=problem.token_sets,
        **_grid(problem, profile, fields["idle_sms"], given),
    )
    group = min(fields["group_blocks"], max(plan.cluster_size, _load_blocks(plan, problem)))
    return dataclasses.replace(plan, group_blocks=given.get("group_blocks", group))


def _grid(
    problem: MoEProblem,
    profile: machine.MachineProfile,
    idle_sms: int,
    given: Mapping[str, int],
) -> dict[str, int]:
    """Tile and grid, and who moves tokens with so many SMs: as given, else chosen."""
    tile = _tile(problem.rows / problem.experts_per_rank, instances())
    chosen = dataclasses.asdict(tile)
    chosen |= {name: given[name] for name in (*chosen, "num_sms", "dispatch") if name in given}
    cluster = chosen["cluster_size"]
    chosen.setdefault("num_sms", (profile.gpu.num_sms - idle_sms) // cluster * cluster)
    if "dispatch" not in chosen:
        chosen["dispatch"] = DISPATCHES.index(dispatch_of(problem, profile, chosen["num_sms"]))
    return chosen


def _tile(per_expert: float, compiled: Sequence[Instance]) -> Instance:
    """The smallest tile height that holds an expert's rows, else the tallest."""
    by_height = sorted(compiled, key=lambda instance: (instance.block_m, -instance.cluster_size))
    return next((one for one in by_height if per_expert <= one.block_m), by_height[-1])


def _load_blocks(plan: MegaMoePlan, problem: MoEProblem) -> int:
    """m-blocks of a rank when the load is even."""
    each, more = divmod(problem.rows, problem.experts_per_rank)
    blocks = [-(-rows // plan.block_m) for rows in (each, each + 1)]
    return max(1, blocks[0] * (problem.experts_per_rank - more) + blocks[1] * more)


def _max_blocks(plan: MegaMoePlan) -> int:
    rows = plan.world * plan.max_tokens * plan.topk
    return min(rows // plan.block_m + plan.experts_per_rank, rows)


def _with_rings(
    base: MegaMoePlan, problem: MoEProblem, distance: int, x_ring: int, ring_bytes: int
) -> MegaMoePlan:
    """Rings from the schedule: what it needs, and a round of tiles more so that nobody waits."""
    most = _max_blocks(base)
    spare = base.group_blocks + -(-base.num_sms // base.linear2_tiles)
    wave = base.schedule == 0
    least = distance if wave else distance + 2 * base.group_blocks
    h_ring = max(least, min(least + spare, most))
    room = ring_bytes - 2 * h_ring * base.block_m * base.intermediate
    fits = room // (2 * base.block_m * base.hidden)
    wanted = min(x_ring, _load_blocks(base, problem) * 5 // 4)
    return dataclasses.replace(
        base,
        lead_blocks=0 if wave else distance,
        wave_blocks=distance if wave else 1,
        h_ring_blocks=h_ring,
        x_ring_blocks=max(2 * base.group_blocks, min(wanted, most, fits)),
    )


def _legal(plan: MegaMoePlan, given: Mapping[str, int]) -> MegaMoePlan:
    """Grows rings that an override has made too small, unless they were given too."""
    least = plan.wave_blocks if plan.schedule == 0 else plan.lead_blocks + 2 * plan.group_blocks
    if "h_ring_blocks" not in given:
        plan = dataclasses.replace(plan, h_ring_blocks=max(plan.h_ring_blocks, least))
    if "x_ring_blocks" not in given:
        x_ring = max(plan.x_ring_blocks, plan.group_blocks)
        plan = dataclasses.replace(plan, x_ring_blocks=x_ring)
    try:
        plan.bytes()
    except RuntimeError as error:
        raise PlanError(str(error)) from error
    return plan
