"""The configurations of the sweep, their plans, floors, table and picture; see sweep_84.py."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from xstage_ext import machine
from xstage_ext.model import drain_GBps
from xstage_ext.planner import choose, ranking
from xstage_ext.planner.megamoe import DISPATCHES, MegaMoePlan
from xstage_ext.planner.problem import MoEProblem
from xstage_ext.simulate import Simulation, simulate_megamoe
from xstage_ext.testing import Routing, make_routing

CONFIGS = pathlib.Path(__file__).with_name("configs_84.json")

AS_IT_IS = "two ranks"
ARMS: dict[str, dict[str, int]] = {
    "wave/st": {"schedule": 0, "store": 0, "dispatch": 0},
    "interleaved/st": {"schedule": 1, "store": 0, "dispatch": 0},
    "wave": {"schedule": 0, "store": 2},
    "interleaved": {"schedule": 1, "store": 2},
    "planner": {},
    AS_IT_IS: {},
}
"""Overrides of the planner by arm. With `st` the math warps issue plain stores and the owners of
experts pull every row (the published experiment); `wave` and `interleaved` send asynchronously, in
paced slices. `two ranks` is the planner's choice for the two ranks as they are: a token that is
pushed crosses once. In all others it crosses as often as among the real layer's ranks."""
RIVALS = tuple(arm for arm in ARMS if arm != AS_IT_IS)
"""Arms that do the same; `two ranks` puts fewer bytes on the link than the real layer does."""

EXTRA_PLANS: dict[str, dict[str, int]] = {
    "wave bulk 64": {"schedule": 0, "store": 1, "wave_blocks": 64},
    "inter st 64": {"schedule": 1, "store": 0, "lead_blocks": 64},
    "inter st 128": {"schedule": 1, "store": 0, "lead_blocks": 128},
    "mixed paced 32": {"schedule": 1, "mix": 1, "store": 2, "lead_blocks": 32},
    "mixed st 16 g8": {"schedule": 1, "mix": 1, "store": 0, "lead_blocks": 16, "group_blocks": 8},
    "mixed bulk 16 g8": {"schedule": 1, "mix": 1, "store": 1, "lead_blocks": 16, "group_blocks": 8},
}
"""Measured beside the planner's families, for the record and for exhibit 4."""


def _trials() -> dict[str, dict[str, int]]:
    plans = ranking.FAMILIES | EXTRA_PLANS
    kept = {name: plans[name] for name in ("mixed st 32 g8", "mixed paced 32")}
    wave = {"wave st 64": ranking.FAMILIES["wave st 64"]}
    stores, paced = ({name: family} for name, family in kept.items())
    varied = [
        (kept, "idle_sms", (8, 16, 24)),
        (wave, "idle_sms", (16,)),
        (paced, "slice_rows", (2, 4)),
        (kept, "x_ring_blocks", (32, 128)),
        (kept, "lead_blocks", (64,)),
        (stores, "group_blocks", (4,)),
        (wave, "wave_blocks", (96,)),
    ]
    return {
        f"{name}, {field} {value}": fields | {field: value}
        for families, field, values in varied
        for name, fields in families.items()
        for value in values
    }


TRIALS = _trials()
"""Plans that vary what the families leave alone: SMs at work, slices, rings, leads, groups, waves.
Measured with `--part trials`, where the planner's families do not hold such a plan."""


def proxy_sets(ranks: int, world: int, local: int) -> int:
    """`token_sets` of a proxy: so many ranks does each of its other ones stand for, as far as its
    `local` experts go; 1 in a world of one."""
    return min((ranks - 1) // (world - 1), local) if world > 1 else 1


@dataclasses.dataclass(frozen=True)
class Config:
    """One of the 84.

    Attributes
    ----------
    index : int
        Position in the list, 0 to 83.
    world, num_experts : int
        Of the proxy: `world` ranks with as many experts each as one of `ranks` GPUs has.
    ranks, experts : int
        Of the real layer.
    """

    index: int
    model: str
    held_out: bool
    hidden: int
    intermediate: int
    topk: int
    tokens: int
    remote_share: float
    routing: str
    law: str
    exponent: float
    world: int
    num_experts: int
    ranks: int
    experts: int
    seed: int

    def at_home(self) -> Config:
        """One of its ranks for itself: as many rows and experts, none of them elsewhere."""
        local = self.local_experts
        return dataclasses.replace(
            self, world=1, num_experts=local, ranks=1, experts=local, remote_share=0.0
        )

    @property
    def name(self) -> str:
        """Short and unique."""
        return f"{self.model} T={self.tokens} remote={self.remote_share:g} {self.routing}"

    @property
    def local_experts(self) -> int:
        """Experts of one rank."""
        return self.num_experts // self.world

    @property
    def key(self) -> dict[str, Any]:
        """What identifies it in result lines."""
        fields = ("model", "tokens", "hidden", "intermediate", "num_experts", "topk")
        rest = ("remote_share", "routing", "seed")
        return {name: getattr(self, name) for name in fields + rest}

    @property
    def problem(self) -> MoEProblem:
        """What the planner is told: not the actual routing."""
        return MoEProblem(
            world=self.world,
            num_experts=self.num_experts,
            topk=self.topk,
            hidden=self.hidden,
            intermediate=self.intermediate,
            max_tokens=self.tokens,
            remote_share=self.remote_share,
            token_sets=self.token_sets,
        )

    @property
    def real_problem(self) -> MoEProblem:
        """The layer that it stands for, on all its ranks with even routing."""
        return dataclasses.replace(
            self.problem,
            world=self.ranks,
            num_experts=self.experts,
            remote_share=None,
            token_sets=1,
        )

    @property
    def token_sets(self) -> int:
        """Of the proxy: each of its other ranks stands for so many of the real layer's."""
        return proxy_sets(self.ranks, self.world, self.local_experts)

    @property
    def law_text(self) -> str:
        """How experts are drawn."""
        if self.law == "balanced":
            return "all experts of a rank alike"
        return f"{self.law} of exponent {self.exponent:g} over each rank's experts"

    def draw(self) -> Routing:
        """Expert choices of all ranks, the same for every arm."""
        return make_routing(
            self.world,
            self.tokens,
            self.num_experts,
            self.topk,
            law=self.law,
            exponent=self.exponent,
            remote_share=self.remote_share,
            distinct=False,
            seed=self.seed,
        )


def load_configs(path: pathlib.Path = CONFIGS) -> list[Config]:
    """All configurations of a data file."""
    data = json.loads(path.read_text(encoding="utf-8"))
    configs: list[Config] = []
    for shape in data["shapes"]:
        for share in data["remote_shares"]:
            for routing in data["routings"]:
                for tokens in data["tokens"]:
                    per_rank = shape["experts"] // data["ranks"]
                    configs.append(
                        Config(
                            index=len(configs),
                            model=shape["name"],
                            held_out=shape["name"] in data["held_out"],
                            hidden=shape["hidden"],
                            intermediate=shape["intermediate"],
                            topk=shape["topk"],
                            tokens=tokens,
                            remote_share=share,
                            routing=routing["name"],
                            law=routing["law"],
                            exponent=routing["exponent"],
                            world=data["world"],
                            num_experts=per_rank * data["world"],
                            ranks=data["ranks"],
                            experts=shape["experts"],
                            seed=data["seed"] + len(configs),
                        )
                    )
    return configs


@dataclasses.dataclass(frozen=True)
class Load:
    """What one rank has to do in a configuration, from the routing that was drawn.

    Attributes
    ----------
    rank : int
        The rank with most rows; it decides the time of the group.
    counts : int array [world, experts per rank]
        Rows by source and expert of that rank.
    result_bytes, row_bytes : float
        Leaving that rank: its results to other ranks; its tokens, a row per choice.
    token_bytes : mapping of int to float
        Its tokens where it pushes, by `token_sets`.
    token_sets : int
        Of the proxy.
    """

    rank: int
    counts: npt.NDArray[np.int64]
    flops: float
    result_bytes: float
    row_bytes: float
    token_bytes: Mapping[int, float]
    token_sets: int
    weight_bytes: float
    load_max_over_mean: float
    remote_share: float

    @property
    def least_bytes(self) -> float:
        """Bytes that must leave the rank, as among the real layer's ranks."""
        return self.result_bytes + self.token_bytes[self.token_sets]

    def of(self, arm: str) -> Load:
        """As an arm sees it: two ranks as they are send a token once."""
        return dataclasses.replace(self, token_sets=1) if arm == AS_IT_IS else self

    def egress_bytes(self, plan: MegaMoePlan) -> float:
        """Bytes that leave the rank by a plan."""
        pulled = DISPATCHES[plan.dispatch] == "pull"
        return self.result_bytes + (self.row_bytes if pulled else self.token_bytes[plan.token_sets])


def load_of(config: Config, routing: Routing) -> Load:
    """The heaviest rank's part."""
    local = config.local_experts
    counts = routing.counts(config.num_experts).reshape(config.world, config.world, local)
    rank = int(counts.sum(axis=(0, 2)).argmax())
    rows = counts[:, rank]
    remote_rows = rows.sum() - rows[rank].sum()
    row_bytes = 2.0 * config.hidden
    busy = int((rows.sum(axis=0) > 0).sum())
    return Load(
        rank=rank,
        counts=rows,
        flops=6.0 * rows.sum() * config.hidden * config.intermediate,
        result_bytes=row_bytes * float(remote_rows),
        row_bytes=row_bytes * float(counts[rank].sum() - counts[rank, rank].sum()),
        token_bytes={
            sets: row_bytes * sent_tokens(routing.topk_idx[rank], rank, local, sets)
            for sets in (1, config.token_sets)
        },
        token_sets=config.token_sets,
        weight_bytes=6.0 * busy * config.hidden * config.intermediate,
        load_max_over_mean=routing.load_max_over_mean,
        remote_share=routing.remote_share,
    )


def sent_tokens(ids: npt.NDArray[np.integer[Any]], rank: int, local: int, sets: int) -> int:
    """How many tokens a rank pushes: each once for every set of a peer's experts that wants it.

    Parameters
    ----------
    ids : int array [tokens, topk]
        Experts, `local` of them per rank.
    sets : int
        Of a rank's experts.
    """
    owner, expert = ids // local, ids % local
    token = np.arange(len(ids)).reshape(-1, 1)
    wanted = (token << 32 | owner * sets + expert * sets // local)[owner != rank]
    return len(np.unique(wanted))


@dataclasses.dataclass(frozen=True)
class Ceiling:
    """Times in us that no schedule can beat: arithmetic, link (dispatch included), weights."""

    compute_us: float
    link_us: float
    weights_us: float

    @property
    def us(self) -> float:
        """The largest of the three: everything else overlapped perfectly."""
        return max(self.compute_us, self.link_us, self.weights_us)

    @property
    def binding(self) -> str:
        """Its name."""
        named = {"compute": self.compute_us, "link": self.link_us, "weights": self.weights_us}
        return max(named, key=lambda name: named[name])


def ceiling_of(
    load: Load, profile: machine.MachineProfile, matrix_tflops: float | None = None
) -> Ceiling:
    """Of the proxied layer on this machine.

    Parameters
    ----------
    matrix_tflops : float, optional
        What a large bf16 product reached beside the measurements. Default: the profile's rate,
        which holds for some tens of milliseconds, until a GPU meets its power limit.
    """
    return Ceiling(
        compute_us=load.flops / (matrix_tflops or profile.rates.matrix_tflops["bf16"]) / 1e6,
        link_us=_link_us(load.least_bytes, profile),
        weights_us=load.weight_bytes / profile.rates.hbm_GBps / 1e3,
    )


def real_link_us(config: Config, profile: machine.MachineProfile) -> float:
    """Link floor of the real layer on `ranks` GPUs with even routing, in us.

    There a token travels once to each rank that holds at least one of its experts.
    """
    return _link_us(config.real_problem.egress_bytes("push"), profile)


def _link_us(egress_bytes: float, profile: machine.MachineProfile) -> float:
    """Of so many bytes by bulk stores of all SMs, the other direction as busy."""
    rate = drain_GBps(profile.mechanism("bulk"), profile.gpu.num_sms, both_directions=True)
    return egress_bytes / float(rate) / 1e3


def plan_of(config: Config, arm: str, profile: machine.MachineProfile) -> MegaMoePlan:
    """The plan of an arm: the planner's choice under the arm's overrides."""
    problem = config.problem
    if arm == AS_IT_IS:
        problem = dataclasses.replace(problem, token_sets=1)
    return choose.choose(problem, profile, **ARMS[arm]).plan


def grid_plans(
    config: Config, profile: machine.MachineProfile, trials: bool = False
) -> dict[str, MegaMoePlan]:
    """The plans that are measured beside the arms: every family of the planner, and others."""
    plans = {}
    for name, fields in (ranking.FAMILIES | (TRIALS if trials else EXTRA_PLANS)).items():
        plans[name] = choose.family_plan(config.problem, profile, ranking.DEFAULTS | fields)
    for arm in ("planner", AS_IT_IS):
        chosen = plan_of(config, arm, profile)
        plans[f"{arm}, other dispatch"] = dataclasses.replace(chosen, dispatch=1 - chosen.dispatch)
    return plans


def predict(
    config: Config, load: Load, arm: str, profile: machine.MachineProfile
) -> tuple[MegaMoePlan, Simulation]:
    """Simulate an arm with the routing that was drawn."""
    plan = plan_of(config, arm, profile)
    result = simulate_megamoe(plan, load.counts, profile, rank=load.rank, num_tokens=config.tokens)
    return plan, result


def geometric_mean(values: Iterable[float]) -> float:
    """Of positive numbers; NaN when there are none."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan
