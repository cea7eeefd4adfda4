"""Decides how a layer's attention and its output All-to-All run: fused or one after the other.

Piggyback: the owner of a tile issues its remote stores and goes on with the next tile. It costs an
issue time per tile, a tail behind the last tile, and, where a burst's shadow reaches the next
loads, pacing. Serial: attention first, then one All-to-All kernel. Any choice can be overridden by
naming a field of the plan.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from .. import machine, model
from ..errors import PlanError
from .attention import AttentionPlan, even_split, row_pad_for

HEAD_DIMS = (64, 128)
"""Head sizes that the CUDA kernels are compiled for."""
_RATE = {128: 0.94, 64: 0.77}
"""Share of the dense matrix rate that the main loop sustains, by head size. Fitted to fa3 alone on
one H200: 17 of 18 shapes of 4,096 to 75,600 rows within 7 percent, the other 12."""
_BLOCK_M = {64: 192, 128: 128}
_BLOCK_N = {64: 128, 128: 160}
_LOADS_AHEAD = 2
_SLICE_BYTES = 8192
_MOST_SHADOW = 0.04
"""Of a tile's time: a whole tile's shadow that slices are not worth. SMs that do not start together
drift apart, and slices all the way keep the link awake, whose watts come out of the clock."""


@dataclasses.dataclass(frozen=True)
class AttentionProblem:
    """One attention layer under Ulysses sequence parallelism.

    Attributes
    ----------
    heads, kv_heads : int
        Query and key heads of the whole model; kv_heads divides heads. Both may be fewer than the
        ranks, and need not be multiples of their number.
    head_dim : int
        On CUDA 64 or 128; any size on the CPU and in the fallback.
    rows, kv_rows : tuple of int
        Query and key rows that each rank owns; kv_rows None: the same as rows. The kernels connect
        up to 8 ranks, the fallback any number.
    batch : int
    causal : bool
    dtype : torch.dtype
        bfloat16 or float16; on the CPU also float32.
    heads_per_rank : tuple of int or None
        Query heads that each rank computes; None: as even as possible, larger shares first.
    generation : str
        "fa3" or "fa4": whose pipeline.
    slots : int
        Results that stay valid at the same time.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rows: tuple[int, ...]
    kv_rows: tuple[int, ...] | None = None
    batch: int = 1
    causal: bool = False
    dtype: torch.dtype = torch.bfloat16
    heads_per_rank: tuple[int, ...] | None = None
    generation: str = "fa3"
    slots: int = 2

    def __post_init__(self) -> None:
        reason = self.why_not()
        if reason is not None:
            raise PlanError(f"xstage.AttentionProblem: {reason}")

    def why_not(self) -> str | None:
        """Why no plan exists, naming fields and values; else None."""
        world = len(self.rows)
        if world < 1:
            return "rows: expected the lengths of at least one rank, got none"
        if self.heads < 1 or self.kv_heads < 1 or self.heads % self.kv_heads:
            return (
                f"kv_heads: expected a divisor of {self.heads} heads, got {self.kv_heads} "
                f"({world} ranks share the heads)"
            )
        for name in ("kv_rows", "heads_per_rank"):
            value = getattr(self, name)
            if value is not None and len(value) != world:
                return f"{name}: expected {world} ranks as in rows, got {len(value)}"
        if sum(self.query_shares) != self.heads:
            return f"heads_per_rank: expected a sum of {self.heads}, got {self.heads_per_rank}"
        if min((*self.rows, *self.key_rows, *self.query_shares)) < 0 or self.batch < 0:
            return f"rows, kv_rows, heads_per_rank, batch: expected no negative number, got {self}"
        if self.generation not in ("fa3", "fa4"):
            return f"generation: expected fa3 or fa4, got {self.generation!r}"
        return None

    @property
    def world(self) -> int:
        """Ranks of the group."""
        return len(self.rows)

    @property
    def key_rows(self) -> tuple[int, ...]:
        """Key rows that each rank owns."""
        return self.rows if self.kv_rows is None else self.kv_rows

    @property
    def query_shares(self) -> tuple[int, ...]:
        """Query heads that each rank computes."""
        return self.heads_per_rank or even_split(self.heads, len(self.rows))

    @property
    def flops(self) -> float:
        """Of the rank with most heads."""
        pairs = sum(self.rows) * sum(self.key_rows) * (0.5 if self.causal else 1.0)
        return 4.0 * self.batch * max(self.query_shares) * pairs * self.head_dim

    @property
    def egress_bytes(self) -> float:
        """Output bytes that leave the rank with most heads; its own rows stay."""
        away = sum(self.rows) - self.rows[self.query_shares.index(max(self.query_shares))]
        return 2.0 * self.batch * max(self.query_shares) * away * self.head_dim

    def plan(self, **fields: int) -> AttentionPlan:
        """The plan with these launch fields."""
        group = self.heads // self.kv_heads
        shared: dict[str, int] = {"slots": self.slots} | fields
        return AttentionPlan(self.rows, self.key_rows, self.query_shares, group, **shared)


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


@dataclasses.dataclass(frozen=True)
class _Tiles:
    """Query tiles of the rank with most heads, on a machine."""

    per_sm: int
    us: float
    step_us: float
    steps: int
    bytes: int

    @classmethod
    def of(cls, problem: AttentionProblem, profile: machine.MachineProfile) -> _Tiles:
        block_m = _BLOCK_M.get(problem.head_dim, 128)
        block_n = _BLOCK_N.get(problem.head_dim, 128)
        blocks = sum(math.ceil(rows / block_m) for rows in problem.rows)
        tiles = problem.batch * max(problem.query_shares) * blocks
        keys = sum(problem.key_rows) * (0.5 if problem.causal else 1.0)
        share = _RATE.get(problem.head_dim, _RATE[64])
        rate = share * profile.rates.matrix_tflops["bf16"] * 1e6 / profile.gpu.num_sms
        steps = max(1, math.ceil(keys / block_n))
        step_us = 4.0 * block_m * block_n * problem.head_dim / rate
        return cls(
            per_sm=max(1, math.ceil(tiles / profile.gpu.num_sms)),
            us=steps * step_us + profile.rates.tile_overhead_us,
            step_us=step_us,
            steps=steps,
            bytes=2 * block_m * problem.head_dim,
        )


def decide(
    problem: AttentionProblem, profile: machine.MachineProfile | None = None, **fields: int
) -> AttentionDecision:
    """Choose for a problem; the same on every rank, since it reads nothing but its arguments.

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
    tiles = _Tiles.of(problem, profile)
    remote = 1.0 - 1.0 / problem.world
    slices, pacing = _pacing(problem, tiles, profile)
    plan = problem.plan(**({"tile_order": 2 if problem.causal else 0} | slices | fields))
    rates, mechanism = profile.rates, profile.mechanism("tma")
    attention_us = rates.launch_us + tiles.per_sm * tiles.us
    link = float(mechanism.R_GBps(profile.gpu.num_sms)) * _row_share(problem)
    drain_us = problem.egress_bytes / link / 1e3
    signal_us = mechanism.visibility_us + rates.flag_us if problem.world > 1 else 0.0
    stall_us = _stall_us(tiles, profile, remote, plan.slice_bytes)
    # Own tiles come last, so only a call of one wave ends with its remote bytes on the way.
    tail_us = drain_us if tiles.per_sm == 1 else 0.0
    fused_us = attention_us + (tiles.per_sm - 1) * stall_us + tail_us + signal_us
    serial_us = attention_us + rates.launch_us + drain_us + signal_us
    coupled_us = attention_us + tiles.per_sm * _coupled_us(tiles, profile, remote) + signal_us
    action = "piggyback" if fused_us <= serial_us else "serial"
    reason = (
        f"{tiles.per_sm} tiles of {tiles.us:.0f} us per SM send {tiles.bytes} bytes each: "
        f"{stall_us:.2f} us of stall per tile, {tail_us + signal_us:.1f} us behind the last one, "
        f"against {serial_us - attention_us:.1f} us for an All-to-All of its own; {pacing}"
    )
    predicted = {"attention": attention_us, "fused": fused_us, "serial": serial_us}
    predicted["coupled"] = coupled_us
    return AttentionDecision(action, plan, reason, predicted, profile.name, profile.provenance)


def _row_share(problem: AttentionProblem) -> float:
    """Share of the link's rate that parts of rows reach; see `row_pad_for`. Measured by a probe."""
    if problem.world == 1 or row_pad_for(2 * problem.heads * problem.head_dim) == 0:
        return 1.0
    return 0.79 if problem.world == 2 else 0.66


def _stall_us(
    tiles: _Tiles, profile: machine.MachineProfile, remote: float, slice_bytes: int
) -> float:
    """Time that one tile's stores take from the main loop, beyond their issue."""
    sms = profile.gpu.num_sms
    if slice_bytes == 0:
        return float(_whole_tiles(tiles, profile, remote).stall(tiles.us))
    law, gap_us = model.paced(
        profile, "tma", sms, tiles.bytes, tiles.us, slice_bytes, remote_share=remote
    )
    return float(law.stall(gap_us)) * math.ceil(tiles.bytes / slice_bytes)


def _coupled_us(tiles: _Tiles, profile: machine.MachineProfile, remote: float) -> float:
    """Time that a tile takes from the main loop when its owner waits for visibility."""
    if remote == 0.0:
        return 0.0
    return float(_whole_tiles(tiles, profile, remote).completion_coupled(tiles.us))


def _whole_tiles(tiles: _Tiles, profile: machine.MachineProfile, remote: float) -> model.BurstGap:
    return model.BurstGap.of(
        profile.mechanism("tma"),
        profile.gpu.num_sms,
        tiles.bytes,
        remote_share=remote,
        both_directions=True,
    )


def _pacing(
    problem: AttentionProblem, tiles: _Tiles, profile: machine.MachineProfile
) -> tuple[dict[str, int], str]:
    """Slices when the shadow of a whole tile outlasts the loads in flight before it, and is more
    than a little beside the tile.

    Measured on 2 x H200 (docs/perf_log.md), whole tiles over slices: 1.063, 1.017 and 0.997 at
    4,096, 8,192 and 16,384 rows and head size 128, 0.993, 0.991 and 0.985 at 32,760, 75,600 and
    118,800; 1.002 at 17,776 rows and head size 64.
    """
    if tiles.per_sm == 1:
        return {}, "whole tiles, behind which no other follows"
    remote = 1.0 - 1.0 / problem.world
    sms = profile.gpu.num_sms
    shadow_us = float(model.burst_shadow(profile, "tma", "tma_load", sms, tiles.bytes * remote))
    slack_us = _LOADS_AHEAD * tiles.step_us
    if remote == 0.0 or shadow_us <= slack_us:
        return {}, f"whole tiles, whose shadow ({shadow_us:.1f} us) the loads in flight cover"
    if shadow_us <= _MOST_SHADOW * tiles.us:
        return {}, f"whole tiles, whose shadow is {shadow_us:.1f} us of {tiles.us:.0f}"
    slices = math.ceil(tiles.bytes / _SLICE_BYTES)
    steps = max(1, int(0.9 * tiles.steps / slices))
    return (
        {"slice_bytes": _SLICE_BYTES, "slice_steps": steps},
        f"paced in slices of {_SLICE_BYTES} bytes every {steps} steps, since a whole tile's shadow "
        f"({shadow_us:.1f} us) outlasts the loads in flight ({slack_us:.1f} us)",
    )
