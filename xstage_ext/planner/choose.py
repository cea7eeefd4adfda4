"""Chooses the plan of a megamoe layer: candidates from the problem, judged by the simulator.

The simulator walks the kernel's own schedule against the Burst-Gap law of the machine profile. Any
choice can be overridden by naming a field of the plan.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence

import torch

from .. import _env, machine
from ..errors import PlanError, ProfileError
from ..simulate import simulate_megamoe
from .megamoe import SCHEDULES, STORES, WEIGHT_LAYOUTS, MegaMoePlan
from .problem import MoEProblem

RING_BYTES = 512_000_000
"""Most bytes that the two rings of a rank take by default."""

_GROUP = 16
"""Most m-blocks of a group. Measured on H200 (docs/perf_log.md): a group reads its weights once, so
small groups, and mixing the tiles of two groups, cost up to a quarter of the time."""

_WAVE = 64
"""m-blocks of a wave. Measured: shorter and longer waves are slower."""

_X_RING = 64
"""m-blocks of tokens that are pulled ahead. Measured: more of them gain nothing."""

_INTERLEAVING_COST = 0.03
"""Measured with all rows local (docs/perf_log.md), unknown to the simulator: the wave stays unless
interleaving is predicted to gain more than this share."""


@dataclasses.dataclass(frozen=True)
class Instance:
    """What the kernel library was compiled for: one kernel."""

    block_m: int
    block_n: int
    cluster_size: int


DEFAULT_INSTANCES = (Instance(128, 256, 2),)


@dataclasses.dataclass(frozen=True)
class Floors:
    """Least times of a call on one rank, us: arithmetic, bytes leaving, reading weights once."""

    compute_us: float
    egress_us: float
    weights_us: float

    @property
    def binding(self) -> str:
        """Which of them is largest, in words."""
        by_time = {
            self.compute_us: "arithmetic",
            self.egress_us: "the link",
            self.weights_us: "reading the weights",
        }
        return by_time[max(by_time)]

    @property
    def us(self) -> float:
        """The largest."""
        return max(self.compute_us, self.egress_us, self.weights_us)


@dataclasses.dataclass(frozen=True)
class Decision:
    """A plan, and why.

    Attributes
    ----------
    action : str
        "wave" or "interleaved".
    plan : MegaMoePlan
        What the ops take (`plan.words()`).
    reason : str
        One or two sentences for people.
    predicted_us : float
        Of this plan; a prediction by the simulator from `profile`.
    alternatives : tuple of (str, float)
        Best prediction of every schedule and way to store, in us.
    floors : Floors
        What no schedule can beat.
    bytes : int
        Workspace bytes per rank.
    profile, provenance : str
        The machine profile, and whether it was measured.
    """

    action: str
    plan: MegaMoePlan
    reason: str
    predicted_us: float
    alternatives: tuple[tuple[str, float], ...]
    floors: Floors
    bytes: int
    profile: str
    provenance: str


def instances() -> tuple[Instance, ...]:
    """The kernels of the loaded library; `DEFAULT_INSTANCES` where none is loaded."""
    try:
        lines = torch.ops.xstage.megamoe_instances().split("\n")
    except (NotImplementedError, RuntimeError):
        return DEFAULT_INSTANCES
    found = [Instance(*map(int, line.split()[:3])) for line in lines if line.strip()]
    return tuple(dict.fromkeys(found)) or DEFAULT_INSTANCES


def floors(problem: MoEProblem, profile: machine.MachineProfile) -> Floors:
    """Least times of the problem on a machine."""
    rates = profile.rates
    curve = profile.mechanism("bulk").R_GBps
    # Experts without rows are not read.
    busy = min(1.0, problem.rows / problem.experts_per_rank)
    return Floors(
        compute_us=problem.flops / rates.matrix_tflops["bf16"] / 1e6,
        egress_us=problem.egress_bytes / float(curve(profile.gpu.num_sms)) / 1e3,
        weights_us=busy * problem.weight_bytes / rates.hbm_GBps / 1e3,
    )


def choose(
    problem: MoEProblem,
    profile: machine.MachineProfile | None = None,
    *,
    ring_bytes: int = RING_BYTES,
    **overrides: int,
) -> Decision:
    """Decide schedule, lead, ring sizes and the way to store.

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
        An override is no field, or makes the plan impossible.
    """
    if profile is None:
        profile = _profile_here()
    return _cached(problem, profile.to_json(), ring_bytes, tuple(sorted(overrides.items())))


def _profile_here() -> machine.MachineProfile:
    """The profile of this GPU; of a Hopper GPU that none describes, the bundled H200's."""
    try:
        return machine.load_here()
    except ProfileError:
        if _env.get("XSTAGE_PROFILE") is not None:
            raise
        return machine.load("h200x2")


@functools.lru_cache(maxsize=256)
def _cached(
    problem: MoEProblem, profile_json: str, ring_bytes: int, overrides: tuple[tuple[str, int], ...]
) -> Decision:
    """One decision per problem and profile: the layers of a model share it."""
    return _decide(problem, machine.from_json(profile_json), ring_bytes, dict(overrides))


def _decide(
    problem: MoEProblem,
    profile: machine.MachineProfile,
    ring_bytes: int,
    overrides: Mapping[str, int],
) -> Decision:
    counts = problem.even_counts()
    best: dict[tuple[str, str], tuple[float, MegaMoePlan]] = {}
    for plan in candidates(problem, profile, ring_bytes, overrides):
        label = SCHEDULES[plan.schedule], STORES[plan.store]
        us = simulate_megamoe(plan, counts, profile, num_tokens=problem.load).total_us
        if label not in best or us < best[label][0]:
            best[label] = us, plan
    cost = {"wave": 1.0, "interleaved": 1.0 + _INTERLEAVING_COST}
    chosen, (us, plan) = min(best.items(), key=lambda item: item[1][0] * cost[item[0][0]])
    least = floors(problem, profile)
    return Decision(
        action=chosen[0],
        plan=plan,
        reason=_reason(chosen, us, best, least, plan),
        predicted_us=us,
        alternatives=tuple((" ".join(label), time) for label, (time, _) in sorted(best.items())),
        floors=least,
        bytes=plan.bytes(),
        profile=profile.name,
        provenance=profile.provenance,
    )


def _reason(
    chosen: tuple[str, str],
    us: float,
    best: Mapping[tuple[str, str], tuple[float, MegaMoePlan]],
    least: Floors,
    plan: MegaMoePlan,
) -> str:
    text = f"{least.binding} sets the floor ({least.us:.0f} us); {' '.join(chosen)} is predicted"
    text += f" at {us:.0f} us"
    others = [time for (schedule, _), (time, _) in best.items() if schedule != chosen[0]]
    if others:
        other = "interleaved" if chosen[0] == "wave" else "wave"
        text += f", the best {other} at {min(others):.0f} us"
    if plan.schedule == 1:
        text += f"; Linear-1 leads by {plan.lead_blocks} m-blocks"
    return text


def candidates(
    problem: MoEProblem,
    profile: machine.MachineProfile,
    ring_bytes: int = RING_BYTES,
    overrides: Mapping[str, int] | None = None,
) -> Iterator[MegaMoePlan]:
    """Plans worth judging; every one is possible."""
    given = dict(overrides or {})
    unknown = given.keys() - {field.name for field in dataclasses.fields(MegaMoePlan)}
    if unknown:
        raise PlanError(f"xstage.choose: {', '.join(sorted(unknown))}: not a field of MegaMoePlan")
    seen = set()
    for base in _bases(problem, profile, given):
        for schedule in (0, 1) if "schedule" not in given else (given["schedule"],):
            distances = _distances(base, problem, schedule, ring_bytes)
            for distance in distances:
                plan = _with_distance(base, problem, schedule, distance, ring_bytes)
                plan = _legal(dataclasses.replace(plan, **given), given)
                if plan not in seen:
                    seen.add(plan)
                    yield plan


def _bases(
    problem: MoEProblem, profile: machine.MachineProfile, given: Mapping[str, int]
) -> Iterator[MegaMoePlan]:
    """Shape, tile and stores; schedule and rings follow."""
    per_expert = problem.rows / problem.experts_per_rank
    instance = _tile(per_expert, instances())
    cluster = given.get("cluster_size", instance.cluster_size)
    block_m = given.get("block_m", instance.block_m)
    blocks = max(1, -(-round(per_expert) // block_m))
    for store in (2, 1) if "store" not in given else (given["store"],):
        yield MegaMoePlan(
            world=problem.world,
            num_experts=problem.num_experts,
            topk=problem.topk,
            hidden=problem.hidden,
            intermediate=problem.intermediate,
            max_tokens=problem.max_tokens,
            block_m=block_m,
            block_n=given.get("block_n", instance.block_n),
            cluster_size=cluster,
            num_sms=given.get("num_sms", profile.gpu.num_sms // cluster * cluster),
            group_blocks=given.get("group_blocks", min(_GROUP, max(cluster, blocks))),
            mix=0,
            store=store,
            weight_layout=WEIGHT_LAYOUTS.index(problem.weight_layout),
        )


def _tile(per_expert: float, compiled: Sequence[Instance]) -> Instance:
    """The smallest tile height that holds an expert's rows, else the tallest."""
    by_height = sorted(compiled, key=lambda instance: (instance.block_m, -instance.cluster_size))
    return next((one for one in by_height if per_expert <= one.block_m), by_height[-1])


def _load_blocks(plan: MegaMoePlan, problem: MoEProblem) -> int:
    """m-blocks of a rank when the load is even."""
    counts = problem.even_counts().sum(axis=0)
    return max(1, int((-(-counts // plan.block_m)).sum()))


def _max_blocks(plan: MegaMoePlan) -> int:
    rows = plan.world * plan.max_tokens * plan.topk
    return min(rows // plan.block_m + plan.experts_per_rank, rows)


def _distances(plan: MegaMoePlan, problem: MoEProblem, schedule: int, ring_bytes: int) -> list[int]:
    """Leads (interleaved) or wave sizes to try, in m-blocks."""
    blocks = _load_blocks(plan, problem)
    # Blocks whose Linear-1 keeps all SMs busy for one round.
    round_blocks = max(plan.group_blocks, -(-plan.num_sms // plan.linear1_tiles))
    most = max(round_blocks, ring_bytes // 2 // (2 * plan.block_m * plan.intermediate))
    if schedule == 0:
        wanted = [min(blocks, _WAVE)]
    else:
        wanted = [max(round_blocks, groups * plan.group_blocks) for groups in (1, 2, 3, 4)]
    return sorted({max(1, min(distance, blocks, most)) for distance in wanted})


def _with_distance(
    base: MegaMoePlan, problem: MoEProblem, schedule: int, distance: int, ring_bytes: int
) -> MegaMoePlan:
    """Rings from the schedule: what it needs, and a round of tiles more so that nobody waits."""
    most = _max_blocks(base)
    spare = base.group_blocks + -(-base.num_sms // base.linear2_tiles)
    least = distance if schedule == 0 else distance + 2 * base.group_blocks
    h_ring = max(least, min(least + spare, most))
    room = ring_bytes - 2 * h_ring * base.block_m * base.intermediate
    fits = room // (2 * base.block_m * base.hidden)
    wanted = min(_X_RING, _load_blocks(base, problem) * 5 // 4)
    return dataclasses.replace(
        base,
        schedule=schedule,
        lead_blocks=distance if schedule == 1 else 0,
        wave_blocks=distance if schedule == 0 else 1,
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
