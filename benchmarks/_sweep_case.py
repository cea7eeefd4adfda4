"""One configuration of the sweep on one rank: tensors, calls, checks, traces; see _sweep_gpu.py."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import numpy as np
import torch
import torch.distributed as dist
from _sweep import Config
from _tile_trace import decode, phases_us

from xstage_ext import SymmetricWorkspace, reference
from xstage_ext.planner import wire
from xstage_ext.planner.megamoe import MegaMoePlan
from xstage_ext.testing import WAIT_CYCLES, compare, meet, time_arms

TOLERANCE = {"rtol": 2e-2, "atol": 2e-2}
MOST_RELATIVE = 8e-3
"""Of the whole result, Frobenius: three roundings to bf16 make 3e-3."""
TRACE_RECORDS = 512
"""Tiles per math warpgroup that a trace can hold."""
DENSE = "dense"
"""Name of the dense product among the calls of a configuration; see `Case.dense`."""
DENSE_ROWS = 16384
"""It has at least so many rows: enough tiles that their last round does not count."""

Call = Callable[[], torch.Tensor]


class Stages:
    """Seconds by stage; a stage ends when the device has finished."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Count the block as `name`."""
        begin = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        took = time.perf_counter() - begin
        self.seconds[name] = self.seconds.get(name, 0.0) + took

    def __str__(self) -> str:
        parts = (f"{name} {seconds:.1f}" for name, seconds in self.seconds.items())
        return f"{', '.join(parts)} s"


class Case:
    """Tensors of this rank, and one channel per plan; `close` gives the channels back.

    Parameters
    ----------
    plans : mapping
        By name, each once; the same on every rank.
    """

    def __init__(
        self,
        config: Config,
        plans: Mapping[str, MegaMoePlan],
        rank: int,
        workspace: SymmetricWorkspace,
    ) -> None:
        self.config, self.plans, self.workspace = config, plans, workspace
        device = workspace.device
        routing = config.draw()
        self.ids = torch.from_numpy(routing.topk_idx[rank]).int().to(device)
        self.weights = torch.from_numpy(routing.topk_weights[rank]).to(device)
        generator = torch.Generator(device).manual_seed(config.seed * 16 + rank)

        def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
            values = torch.randn(*shape, generator=generator, device=device, dtype=torch.bfloat16)
            return values.mul_(scale)

        local, hidden, inner = config.local_experts, config.hidden, config.intermediate
        self.x = normal(config.tokens, hidden)
        self.w13 = normal(local, 2 * inner, hidden, scale=hidden**-0.5)
        self.w2 = normal(local, hidden, inner, scale=inner**-0.5)
        rows = max(config.tokens * config.topk, DENSE_ROWS)
        self.dense_flops = 6.0 * rows * hidden * inner
        self.dense_operands = normal(rows, hidden), normal(3 * inner, hidden)
        self.leases = {name: workspace.channel(name, plan.bytes()) for name, plan in plans.items()}

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Of every call."""
        return self.x, self.ids, self.weights, self.w13, self.w2

    def fused(self, name: str) -> Call:
        """The operator with one of the plans."""
        words, workspace = self.words(name)
        return lambda: torch.ops.xstage.megamoe(*self.tensors, words, workspace)

    def words(self, name: str) -> tuple[list[int], list[int]]:
        """Plan and workspace of a call."""
        words, lease = self.plans[name].words(), self.leases[name]
        return words, lease.words(wire.digest(name, words))

    def serial(self) -> torch.Tensor:
        """The unfused pipeline: sort, NCCL, grouped products, NCCL, weighted sum."""
        return reference.moe_unfused(*self.tensors)

    def dense(self) -> torch.Tensor:
        """One product as wide and deep as the layer's: what the GPU's arithmetic gives here."""
        rows, weights = self.dense_operands
        return rows @ weights.T

    def reference(self) -> torch.Tensor:
        """The unfused pipeline with every product and sum in fp32, from the same bf16 operands."""
        x, ids, weights, w13, w2 = self.tensors
        return reference.moe_unfused(x.float(), ids, weights, w13.float(), w2.float())

    def check(self, calls: Mapping[str, Call]) -> tuple[dict[str, bool], float]:
        """Every call against the fp32 reference, and fused ones against each other bit for bit.

        Returns
        -------
        dict, float
            Right on all ranks, by name; the largest relative error of any rank and call.
        """
        wanted = self.reference()
        right: dict[str, bool] = {}
        first: tuple[str, torch.Tensor] | None = None
        worst = 0.0
        for name, call in calls.items():
            result = call()
            if name != "serial" and first is not None:
                right[name] = right[first[0]] and bool(torch.equal(result, first[1]))
                continue
            difference = compare(result, wanted, **TOLERANCE)
            worst = max(worst, difference.relative)
            right[name] = difference.ok and difference.relative < MOST_RELATIVE
            if name != "serial":
                first = name, result
        lowest = torch.tensor([*map(float, right.values()), -worst], device=self.x.device)
        dist.all_reduce(lowest, dist.ReduceOp.MIN)
        *flags, negative = lowest.tolist()
        return {name: flag == 1.0 for name, flag in zip(right, flags, strict=True)}, -negative

    def spans(self, name: str) -> dict[str, float]:
        """What the trace build says of one call by a plan: this rank's tiles and phases, us."""
        trace = self.trace(name)
        tiles = decode(trace)
        numbers = {"kernel_clock_mhz": float(tiles.clock_mhz[0]) if len(tiles.cta) else 0.0}
        for phase in (1, 2):
            mine = tiles.of_phase(phase)
            if not len(mine.cta):
                continue
            whole = mine.end_us - mine.begin_us
            values = {
                "tile_us": whole - mine.stage_wait_us - mine.hand_over_us,
                "stage_wait_us": mine.stage_wait_us,
                "first_wait_us": mine.first_wait_us,
                "hand_over_us": mine.hand_over_us,
            }
            for key, seen in values.items():
                numbers[f"linear{phase}_{key}"] = float(seen.mean())
            p50, p90 = np.percentile(mine.hand_over_us, [50, 90])
            numbers |= {
                f"linear{phase}_span_us": float(p50),
                f"linear{phase}_span_p90_us": float(p90),
            }
        return numbers | phases_us(trace)

    def trace(self, name: str, warm_ups: int = 1) -> torch.Tensor:
        """Records of one call behind others, the ranks starting together; see `_tile_trace`."""
        words, workspace = self.words(name)

        def traced() -> torch.Tensor:
            result: torch.Tensor = torch.ops.xstage.megamoe_traced(
                *self.tensors, words, workspace, TRACE_RECORDS
            )[1]
            return result

        for _ in range(warm_ups):
            traced()
        torch.cuda._sleep(WAIT_CYCLES)  # type: ignore[no-untyped-call]
        meet()
        return traced()

    def close(self) -> None:
        """Give the channels back; all ranks, when idle."""
        for lease in self.leases.values():
            lease.release()


MOST_KEPT = 6
"""So many of the fastest plans are measured on."""
RARELY = 4
"""The unfused pipeline, several times as long as the others, runs in every fourth round."""


def time_plans(
    calls: Mapping[str, Call], rounds: tuple[int, int], always: Collection[str], seed: int
) -> list[tuple[str, float]]:
    """Samples of many plans and of "serial", us, in the order of time.

    Every round runs in an order of its own: power limits act over tens of milliseconds, so that a
    plan is as fast as those before it allow.

    Parameters
    ----------
    calls : mapping
        By name, the same on every rank.
    rounds : (int, int)
        All of them; the first ones, in which every plan runs (0: in all of them). Then the fastest
        run.
    always : collection of str
        Plans that stay whatever they take.
    seed : int
        Another one for every configuration, as in `time_alone`.
    """
    sequence: list[tuple[str, float]] = []
    chosen = [name for name in calls if name != "serial"]
    for number in range(rounds[0]):
        if number == rounds[1] > 0:
            seen = {name: [us for one, us in sequence if one == name] for name in chosen}
            by_time = sorted(chosen, key=lambda name: float(np.median(seen[name])))
            kept = {*by_time[:MOST_KEPT], *always}
            chosen = [name for name in chosen if name in kept]
        rare = ["serial"] if "serial" in calls and number % RARELY == 0 else []
        order = [*chosen, *rare]
        random.Random(f"{seed} {number}").shuffle(order)  # the same on every rank
        timings = time_arms({name: calls[name] for name in order}, pairs=1, warmup=0)
        sequence += [(name, timing.samples_us[0]) for name, timing in timings.items()]
    return sequence


ALONE_PASSES = 8
"""Every plan runs by itself so many times."""
ALONE_WARM_S, ALONE_S = 0.03, 0.03
"""Each time for so long: first until clock and power have settled, then by the clock."""


def time_alone(
    calls: Mapping[str, Call], usual_us: Mapping[str, float], seed: int
) -> list[tuple[str, float]]:
    """Time per call of every plan when it follows itself, us, in the order of time.

    In turns all plans share one clock, whatever power each draws. A layer that is called again and
    again pays for its own.

    Parameters
    ----------
    calls : mapping
        By name, the same on every rank.
    usual_us : mapping
        About how long each takes, the same on every rank.
    seed : int
        Another one for every configuration: slow states of a GPU last for several plans and come
        at like times; one order for all would always hit the same.
    """
    times: list[float] = []
    names: list[str] = []
    for number in range(ALONE_PASSES):
        order = list(calls)
        random.Random(f"{seed} {number}").shuffle(order)  # the same on every rank
        for name in order:
            warm, counted = (
                max(1, round(seconds * 1e6 / usual_us[name])) for seconds in (ALONE_WARM_S, ALONE_S)
            )
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            for _ in range(warm):
                calls[name]()
            begin.record()
            for _ in range(counted):
                calls[name]()
            end.record()
            end.synchronize()
            names.append(name)
            times.append(begin.elapsed_time(end) * 1e3 / counted)
    slowest = torch.tensor(times, dtype=torch.float64, device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return list(zip(names, slowest.tolist(), strict=True))


def distinct(named: Iterable[tuple[str, MegaMoePlan]]) -> dict[str, MegaMoePlan]:
    """Each plan once, by the first of its names."""
    found: dict[MegaMoePlan, str] = {}
    for name, plan in named:
        found.setdefault(plan, name)
    return {name: plan for plan, name in found.items()}
