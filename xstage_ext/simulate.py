"""Predicts megamoe calls: the kernel's own schedule (schedule.h) against the Burst-Gap law.

The event loop is C++ (csrc/megamoe/simulation.h); here a machine profile becomes its numbers. What
comes out is a prediction, never a measurement.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from .errors import BinaryError, PlanError
from .machine import MachineProfile
from .model import drain_GBps
from .planner.megamoe import DISPATCHES, STORES, MegaMoePlan

MECHANISM_OF_STORE = {"st": "st", "bulk": "bulk", "paced": "bulk"}
"""The profile's mechanism behind each value of a plan's `store`."""

COUPLINGS = {"law": 0.0, "completion": 1.0, "unbounded": 2.0}
"""`law`: stores hold the issuer up as the Burst-Gap law says. `completion`: it waits until they are
visible. `unbounded`: stores never hold anybody up."""

TYPICAL_ERROR = 0.03
"""Median error over the sweep (docs/evidence/prediction.md), rounded up."""


@dataclasses.dataclass(frozen=True)
class Assumptions:
    """What the simulator needs beyond a machine profile and a plan.

    Set-up, epilogues and the combine's rate were read from the kernel's traces on H200, the others
    fitted to the sweep without its held-out shapes (`benchmarks/fit_simulator.py`).

    Attributes
    ----------
    setup_us : float
        Start of the kernel until tokens can be pulled: counting and routes.
    exchange_us : float
        The same where ranks exchange counts: what waiting for the peers' signals adds.
    epilogue1_us, epilogue2_us : float
        What a tile of 128 x 256 takes beside its main loop: accumulators to activations or to
        staged results, stores, flags. By the kernel's traces on H200; other tiles in proportion.
    copies_us : float
        What issuing the bulk copies of a Linear-2 tile, one per row, adds to its epilogue.
    sustained : float
        Share of the profile's matrix rate in a kernel that does nothing but multiply.
    power_exponent : float
        At the power limit the clock rises when tensor cores idle: the rate goes with their share
        of the time to the power of minus this. A third would be power = share x clock^3.
    idle_us : float
        Time between calls, which counts there as well: what a benchmark leaves between samples.
    most_rate : float
        The rate at the highest clock, as a multiple of the profile's matrix rate.
    combine_share : float
        Share of the profile's memory rate that the combine reaches.
    sharing_penalty : float
        By how much main loops are longer when only two clusters read a weight tile at the same
        time; an eighth of it at four. Fitted to the kernel, not explained (L2 is suspected).
    prefetch_stages : int
        Operand stages loaded ahead of the main loop; they cover the first part of a shadow.
    block_k : int
        Depth of a stage in elements.
    l2_reuse : float
        Share of L2 that operands can rely on.
    hbm_share : float
        Share of the profile's memory rate that operand streams of tiles reach.
    hbm_sm_share : float
        One SM reads at most this multiple of its even share of the memory rate.
    half_share : float
        Share of its main loop that a tile takes of whose rows at most half are there.
    local_share : float
        What pulling a row of this rank itself takes, over that of a peer's row.
    pull_rate : float
        Share of the profile's rate of pulls that the kernel's few dispatch warps reach.
    push_rate : float
        Share of the link's rate that the push warps reach.
    pull_share : float
        Share of the egress that rows of tokens get while results want it too.
    visibility_us : float or None
        Latency of the final fence and signal; None: the profile's.
    tickets : bool
        Workers draw tiles from a counter, as the kernel does; False: the static deal.
    jitter : float
        Main loops are longer or shorter by up to this share, at random but repeatably: nothing in a
        real machine keeps SMs exactly in step.
    """

    setup_us: float = 11.8
    exchange_us: float = 13.8
    epilogue1_us: float = 2.6
    epilogue2_us: float = 1.4
    copies_us: float = 1.6
    sustained: float = 0.903
    power_exponent: float = 0.342
    idle_us: float = 1050.0
    most_rate: float = 1.3
    half_share: float = 0.572
    local_share: float = 0.32
    combine_share: float = 0.76
    sharing_penalty: float = 0.0252
    prefetch_stages: int = 4
    block_k: int = 64
    l2_reuse: float = 0.725
    hbm_share: float = 0.707
    hbm_sm_share: float = 2.47
    pull_rate: float = 0.452
    push_rate: float = 0.456
    pull_share: float = 0.536
    visibility_us: float | None = None
    tickets: bool = True
    jitter: float = 0.03


@dataclasses.dataclass(frozen=True)
class Simulation:
    """A predicted call of one rank; times in us from the start of the kernel.

    Attributes
    ----------
    total_us : float
        Until this rank's result is complete: tiles, drain, signal, combine.
    tiles_us, drained_us, pulled_us : float
        Last tile done; last byte left; last row pulled.
    combine_us : float
        What the combine adds at the end.
    store_bytes, pull_bytes, memory_bytes : float
        Bytes to other ranks; bytes pulled from them; operand bytes that came from device memory.
    workers : float64 array [clusters, 7]
        Columns `WORKER_COLUMNS`.
    link : float64 array [bins, 2]
        GB/s of own stores and of tokens, pulled by peers or pushed to them.
    bin_us : float
        Width of a bin.
    tiles : float64 array [tiles, 8]
        Columns `TILE_COLUMNS`; empty unless traced.
    """

    total_us: float
    tiles_us: float
    drained_us: float
    pulled_us: float
    combine_us: float
    store_bytes: float
    pull_bytes: float
    memory_bytes: float
    workers: npt.NDArray[np.float64]
    link: npt.NDArray[np.float64]
    bin_us: float
    tiles: npt.NDArray[np.float64]

    def mean(self, column: str) -> float:
        """Mean over the workers of a column of `WORKER_COLUMNS`, in us."""
        return float(self.workers[:, WORKER_COLUMNS.index(column)].mean())

    @property
    def stall_us(self) -> float:
        """Mean over the workers: waiting for the link (back-pressure), in us."""
        return self.mean("stall_us")

    @property
    def egress_GBps(self) -> float:
        """Bytes that left the rank over the whole call."""
        return (self.store_bytes + self.pull_bytes) / self.total_us / 1e3


WORKER_COLUMNS = (
    "math_us",
    "flag_wait_us",
    "shadow_wait_us",
    "memory_wait_us",
    "issue_us",
    "stall_us",
    "end_us",
)
TILE_COLUMNS = (
    "worker",
    "phase",
    "block",
    "n",
    "wait_begin_us",
    "main_begin_us",
    "store_begin_us",
    "end_us",
)


def tile_us(
    profile: MachineProfile, plan: MegaMoePlan, depth: int, block_k: int = 64
) -> tuple[float, float]:
    """Main loop of one tile of `depth`, and of one stage of it, in us, operands in L2."""
    num_sms = profile.gpu.num_sms
    per_sm = profile.rates.matrix_tflops["bf16"] * 1e6 / num_sms
    stage_flops = 2.0 * plan.block_m * plan.block_n * block_k
    # A cluster loads its common operand once.
    rows = plan.block_m + plan.block_n / plan.cluster_size
    stage_bytes = 2.0 * rows * block_k
    l2_per_sm = profile.rates.l2_GBps * 1e3 / num_sms
    stage = max(stage_flops / per_sm, stage_bytes / l2_per_sm)
    return stage * -(-depth // block_k), stage


def sharing_slowdown(plan: MegaMoePlan, blocks_per_expert: float, penalty: float) -> float:
    """Factor on main loops for the number of clusters that read one weight tile together.

    That many are the pairs of m-blocks of a group; half of them where Linear-1 and Linear-2 tiles
    alternate, since neighbours then do not start together. At most 1.25.
    """
    blocks = min(float(plan.group_blocks), max(1.0, blocks_per_expert))
    together = blocks / plan.cluster_size * (0.5 if plan.schedule == 1 and plan.mix == 1 else 1.0)
    return 1.0 + min(0.25, penalty * (2.0 / together) ** 3)


def simulate_megamoe(
    plan: MegaMoePlan,
    counts: npt.ArrayLike,
    profile: MachineProfile,
    *,
    rank: int = 0,
    coupling: str = "law",
    assume: Assumptions = Assumptions(),  # noqa: B008 (frozen)
    trace: bool = False,
    num_tokens: int | None = None,
) -> Simulation:
    """Predict one call of `torch.ops.xstage.megamoe` on one rank.

    The other ranks are taken to do the same at the same time.

    Parameters
    ----------
    plan : MegaMoePlan
        As the operator would get it.
    counts : int array [world, experts of this rank]
        Rows that each source sends to each of this rank's experts.
    rank : int
        Which of the sources is this rank itself.
    coupling : str
        One of `COUPLINGS`.
    trace : bool
        Also record every tile.
    num_tokens : int, optional
        Tokens of a rank, for the combine and for how many of them several experts want; the plan's
        `max_tokens` without it.

    Raises
    ------
    PlanError
        These numbers have no simulation: a plan whose tiles wait for each other, rates of nothing.
    """
    tokens = plan.max_tokens if num_tokens is None else num_tokens
    rows = np.asarray(counts, dtype=np.int64)
    mechanism = profile.mechanism(MECHANISM_OF_STORE[STORES[plan.store]])
    producers = np.arange(plan.num_sms + 1, dtype=np.float64)
    rates = torch.from_numpy(drain_GBps(mechanism, producers, both_directions=True))

    def run(rate: float, trace: bool) -> tuple[torch.Tensor, ...]:
        machine = _machine(plan, profile, coupling, assume, rows.sum(axis=0), rate, tokens)
        flat = rows.reshape(-1).tolist()
        try:
            found: tuple[torch.Tensor, ...] = torch.ops.xstage.megamoe_simulate(
                plan.words(), flat, rank, machine, rates, trace
            )
        except RuntimeError as error:  # such numbers have no simulation
            raise PlanError(str(error).splitlines()[0]) from None
        return found

    rate = assume.sustained
    if assume.power_exponent > 0.0:
        summary, workers, *_ = run(rate, False)
        math_us = float(workers[:, WORKER_COLUMNS.index("math_us")].mean())
        busy = math_us / (float(summary[0, 0]) + assume.idle_us)
        rate = min(assume.most_rate, rate * max(busy, 0.1) ** -assume.power_exponent)
    summary, workers, link, tiles = run(rate, trace)
    tiles_us, drained_us, pulled_us, store_bytes, pull_bytes, memory_bytes = summary[0].tolist()
    visibility = assume.visibility_us
    signal = mechanism.visibility_us if visibility is None else visibility
    combine_us = _combine_us(plan, profile, tokens) / assume.combine_share
    last = max(tiles_us, drained_us + signal + profile.rates.flag_us)
    bin_us = _BIN_US
    return Simulation(
        total_us=last + combine_us + profile.rates.launch_us,
        tiles_us=tiles_us,
        drained_us=drained_us,
        pulled_us=pulled_us,
        combine_us=combine_us,
        store_bytes=store_bytes,
        pull_bytes=pull_bytes,
        memory_bytes=memory_bytes,
        workers=workers.numpy(),
        link=link.numpy() / (bin_us * 1e3),
        bin_us=bin_us,
        tiles=tiles.numpy(),
    )


_BIN_US = 4.0


def _rows_GBps(plan: MegaMoePlan, profile: MachineProfile, assume: Assumptions) -> float:
    """At what rate rows of tokens travel where nothing else does, pulled or pushed."""
    if DISPATCHES[plan.dispatch] == "pull":
        return assume.pull_rate * profile.rates.pull_GBps
    stores = profile.mechanism(MECHANISM_OF_STORE["st"])
    return assume.push_rate * float(drain_GBps(stores, plan.num_sms, both_directions=True))


def _machine(
    plan: MegaMoePlan,
    profile: MachineProfile,
    coupling: str,
    assume: Assumptions,
    rows: npt.NDArray[np.int64],
    rate: float,
    tokens: int,
) -> torch.Tensor:
    """The numbers of XS_SIMULATION_FIELDS, in the order that the binary names."""
    store = STORES[plan.store]
    name = MECHANISM_OF_STORE[store]
    mechanism = profile.mechanism(name)
    shadow = profile.shadow_of(name, "bulk_load")
    tile_bytes = 2.0 * plan.block_m * plan.block_n
    slice_bytes = 2.0 * plan.block_n * min(8 * plan.slice_rows, plan.block_m)
    linear1_us, stage_us = tile_us(profile, plan, plan.hidden, assume.block_k)
    linear2_us, _ = tile_us(profile, plan, plan.intermediate, assume.block_k)
    busy = rows[rows > 0]
    blocks = float((-(-busy // plan.block_m)).mean()) if len(busy) else 1.0
    slowdown = sharing_slowdown(plan, blocks, assume.sharing_penalty) / rate
    hbm_GBps = assume.hbm_share * profile.rates.hbm_GBps
    even = hbm_GBps / profile.gpu.num_sms
    k = float(plan.num_sms)
    area = plan.block_m * plan.block_n / (128.0 * 256.0)
    values = {
        "linear1_us": linear1_us * slowdown,
        "linear2_us": linear2_us * slowdown,
        "epilogue1_us": assume.epilogue1_us * area,
        "epilogue2_us": (assume.epilogue2_us + (assume.copies_us if name == "bulk" else 0.0))
        * area,
        "flag_us": profile.rates.flag_us,
        "setup_us": assume.setup_us + (assume.exchange_us if plan.world > 1 else 0.0),
        "hbm_GBps": hbm_GBps,
        "hbm_sm_GBps": even * assume.hbm_sm_share,
        "reuse_bytes": profile.gpu.l2_bytes * assume.l2_reuse,
        "pull_GBps": _rows_GBps(plan, profile, assume),
        "pull_share": assume.pull_share,
        "half_share": assume.half_share,
        "local_share": assume.local_share,
        "issue_us": float(mechanism.T0_us(k, tile_bytes)),
        "issue_slice_us": float(mechanism.T0_us(k, slice_bytes)),
        "capacity_bytes": float(mechanism.Q_bytes(k)) / k,
        "passed_bytes": float(shadow.passed_bytes(k)) / k,
        "cross_bytes": -1.0 if shadow.cross_bytes is None else shadow.cross_bytes,
        "prefetch_us": assume.prefetch_stages * stage_us * slowdown,
        "visibility_us": mechanism.visibility_us,
        "pace_us": stage_us * slowdown,
        "coupling": COUPLINGS[coupling],
        "tickets": float(assume.tickets),
        "tokens": float(tokens),
        "jitter": assume.jitter,
        "bin_us": _BIN_US,
    }
    fields = simulation_fields()
    if set(fields) != set(values):
        raise BinaryError(
            f"xstage.simulate: the binary wants {sorted(set(fields) ^ set(values))}; reinstall"
        )
    return torch.tensor([values[field] for field in fields], dtype=torch.float64)


def simulation_fields() -> list[str]:
    """Names of the simulator's numbers, in the binary's order."""
    lines: Sequence[str] = torch.ops.xstage.megamoe_simulation_fields().splitlines()
    return [line.split(" ", 1)[0] for line in lines]


def _combine_us(plan: MegaMoePlan, profile: MachineProfile, tokens: int) -> float:
    """What adding up the slots of every token costs after the last row has come.

    It reads topk rows per token and writes one, at the memory rate.
    """
    row = 2.0 * plan.hidden
    return (plan.topk + 1.0) * tokens * row / (profile.rates.hbm_GBps * 1e3)
