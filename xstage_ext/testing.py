"""What tests and benchmarks share: timing, comparison with a reference, routing by a stated law."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

WAIT_CYCLES = 600_000
"""Device-side wait in front of every measured call (about 0.3 ms), longer than any launch."""


@dataclasses.dataclass(frozen=True)
class Timing:
    """Times of one arm; each sample is the maximum over ranks, in us."""

    us_median: float
    us_p10: float
    us_p90: float
    n: int
    samples_us: tuple[float, ...]

    @classmethod
    def of(cls, samples_us: npt.ArrayLike) -> Timing:
        """Summary of samples."""
        values = np.asarray(samples_us, dtype=np.float64)
        p10, median, p90 = np.percentile(values, [10, 50, 90])
        return cls(float(median), float(p10), float(p90), values.size, tuple(values.tolist()))

    def over(self, other: Timing) -> Ratio:
        """How many times as long as another arm of the same `time_arms`, round by round.

        What the arms of a round share, such as a clock at the power limit, divides out.
        """
        ratios = np.sort(np.divide(self.samples_us, other.samples_us))
        spread = 0.98 * np.sqrt(self.n)  # 1.96 standard deviations of a binomial count
        low = max(0, int(np.floor(self.n / 2 - spread)))
        high = min(self.n - 1, int(np.ceil(self.n / 2 + spread)))
        return Ratio(float(np.median(ratios)), float(ratios[low]), float(ratios[high]))


@dataclasses.dataclass(frozen=True)
class Ratio:
    """Median over rounds, and the interval that holds it with 95% (order statistics)."""

    median: float
    low: float
    high: float


def time_arms(
    arms: Mapping[str, Callable[[], object]],
    *,
    pairs: int = 20,
    warmup: int = 3,
    group: dist.ProcessGroup | None = None,
    before: Callable[[], object] | None = None,
    calls: int = 1,
) -> dict[str, Timing]:
    """Time several arms interleaved (A B A B ...) in one process per rank.

    Per sample: a device-side wait covers the launches, the ranks meet on the device, then the arm's
    calls between two events; the maximum over the ranks is the sample. Without CUDA the wall
    clock takes the place of events.

    Parameters
    ----------
    arms : mapping
        Name and callable without arguments; each launches on the current stream.
    pairs : int
        Samples per arm.
    warmup : int
        Rounds over all arms before the first sample.
    group : process group, optional
        The ranks; all call this with the same arms in the same order. None: WORLD if
        torch.distributed is initialised, else this process alone.
    before : callable, optional
        Runs before every sample, outside of the measured time, e.g. `flush_l2`.
    calls : int
        Calls per sample; the time is divided by it.

    Returns
    -------
    dict
        `Timing` by arm, equal on every rank.
    """
    for _ in range(warmup):
        for call in arms.values():
            call()
    measure = _cuda_sample if torch.cuda.is_available() else _cpu_sample
    samples = torch.zeros(len(arms), pairs, dtype=torch.float64)
    for pair in range(pairs):
        # Every arm takes every place, and none always follows the same other one: a round starts
        # with the next arm after every two, and odd rounds run backwards.
        order = list(enumerate(arms.values()))
        first = pair // 2 % len(order)
        order = order[first:] + order[:first]
        for index, call in order if pair % 2 == 0 else reversed(order):
            if before is not None:
                before()
            samples[index, pair] = measure(call, calls, group) / calls
    samples = max_over_ranks(samples, group)
    return {name: Timing.of(row.numpy()) for name, row in zip(arms, samples, strict=True)}


def graph_of(call: Callable[[], object], calls: int, *, warm_ups: int) -> Callable[[], None]:
    """Capture `calls` calls in a CUDA graph; their results are dropped at once.

    Parameters
    ----------
    call
        What to capture, on the current device.
    calls
        Calls per replay, at least 1.
    warm_ups
        Calls before the capture, on the side stream that it uses.

    Returns
    -------
    Callable
        Replays the graph on the current stream.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warm_ups):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    return graph.replay


def max_over_ranks(values: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Element-wise maximum over the ranks, as a CPU tensor."""
    if not dist.is_available() or not dist.is_initialized():
        return values.cpu()
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    moved = values.to(device)
    dist.all_reduce(moved, dist.ReduceOp.MAX, group)
    return moved.cpu()


def meet(group: dist.ProcessGroup | None = None) -> None:
    """Let the ranks meet: on the device with NCCL (no host wait), else on the host."""
    if not dist.is_available() or not dist.is_initialized():
        return
    if dist.get_backend(group) == "nccl":
        dist.all_reduce(torch.zeros(1, device="cuda"), group=group)
    else:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        dist.barrier(group)


def _cuda_sample(call: Callable[[], object], calls: int, group: dist.ProcessGroup | None) -> float:
    cuda: Any = torch.cuda
    start, end = (cuda.Event(enable_timing=True) for _ in range(2))
    # The wait covers the launches. The ranks meet behind it: GPUs whose clocks differ by 5 percent
    # would leave a wait of 0.2 ms 10 us apart, and the first would wait for the last in the call.
    on_device = dist.is_available() and dist.is_initialized() and dist.get_backend(group) == "nccl"
    if not on_device:
        meet(group)
    cuda._sleep(WAIT_CYCLES)
    if on_device:
        meet(group)
    start.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3


def _cpu_sample(call: Callable[[], object], calls: int, group: dist.ProcessGroup | None) -> float:
    meet(group)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) * 1e6


_flush: dict[int, torch.Tensor] = {}


def flush_l2() -> None:
    """Overwrite twice the L2 of the current device, so that the next call starts cold."""
    device = torch.cuda.current_device()
    if device not in _flush:
        size = 2 * torch.cuda.get_device_properties(device).L2_cache_size
        _flush[device] = torch.empty(size, dtype=torch.uint8, device="cuda")
    _flush[device].zero_()


@dataclasses.dataclass(frozen=True)
class Difference:
    """How far a result is from its reference; see `compare`."""

    max_abs: float
    relative: float
    wrong: int
    first_wrong: tuple[int, ...] | None
    ok: bool

    def __str__(self) -> str:
        state = "ok" if self.ok else f"WRONG: {self.wrong} elements, first at {self.first_wrong}"
        return f"max |difference| {self.max_abs:.3g}, relative {self.relative:.3g}: {state}"


def compare(result: torch.Tensor, reference: torch.Tensor, rtol: float, atol: float) -> Difference:
    """Compare in float64, on the result's device; NaN where the reference is finite is wrong.

    `relative` is the Frobenius norm of the difference over that of the reference.
    """
    if result.shape != reference.shape:
        raise ValueError(f"compare: expected shape {reference.shape}, got {result.shape}")
    got = result.detach().double()
    wanted = reference.detach().to(got.device).double()
    if wanted.numel() == 0:
        return Difference(0.0, 0.0, 0, None, True)
    error = (got - wanted).abs()
    bad = ~(error <= atol + rtol * wanted.abs())
    wrong = int(bad.sum())
    first = tuple(int(i) for i in bad.nonzero()[0]) if wrong else None
    scale = float(wanted.norm())
    relative = float((got - wanted).norm()) / scale if scale else float(error.max())
    return Difference(float(error.max()), relative, wrong, first, wrong == 0)


RoutingLaw = Literal["balanced", "zipf", "dirichlet"]
LAWS: tuple[RoutingLaw, ...] = ("balanced", "zipf", "dirichlet")


@dataclasses.dataclass(frozen=True)
class Routing:
    """Expert choices of all ranks.

    Attributes
    ----------
    topk_idx : int64 array [world, tokens, topk]
        Global expert ids, distinct within a token.
    topk_weights : float32 array [world, tokens, topk]
        Positive, summing to 1 per token.
    remote_share : float
        Share of the choices that fall on an expert of another rank.
    load_max_over_mean : float
        Over experts: most choices over the mean.
    rank_max_over_mean : float
        The same over ranks (where the experts live).
    """

    topk_idx: npt.NDArray[np.int64]
    topk_weights: npt.NDArray[np.float32]
    remote_share: float
    load_max_over_mean: float
    rank_max_over_mean: float

    def counts(self, num_experts: int) -> npt.NDArray[np.int64]:
        """Choices by [source rank, expert]."""
        flat = self.topk_idx.reshape(self.topk_idx.shape[0], -1)
        return np.stack([np.bincount(row, minlength=num_experts) for row in flat])


def make_routing(
    world: int,
    tokens: int,
    num_experts: int,
    topk: int,
    *,
    law: RoutingLaw = "balanced",
    exponent: float = 0.8,
    remote_share: float | None = None,
    distinct: bool = True,
    seed: int = 0,
) -> Routing:
    """Draw expert choices by a stated law.

    Every expert gets a popularity; a token draws `topk` distinct experts in proportion (Gumbel
    top-k). Popularities are equal (`balanced`), proportional to 1/(i+1)^exponent over a random
    order of each rank's experts (`zipf`), or one Dirichlet(1/exponent) draw per rank (`dirichlet`).
    Popularities are normalised per rank, so that skew falls on experts and `remote_share` on ranks.

    Parameters
    ----------
    world, tokens, num_experts, topk : int
        Ranks, tokens per rank, experts of all ranks together (a multiple of `world`), choices.
    remote_share : float, optional
        Expected share of choices on other ranks' experts; None leaves it to the law
        ((world - 1)/world). Distinctness pulls it towards that when topk nears the number of
        experts of a rank; `Routing.remote_share` reports what came out.
    distinct : bool
        False: every slot is drawn for itself, so two slots of a token may name one expert. It keeps
        shares and loads exact where few ranks stand in for many.
    seed : int
        Seed of everything random here.
    """
    if num_experts % world:
        raise ValueError(f"make_routing: expected experts divisible by {world}, got {num_experts}")
    if not 0 < topk <= num_experts:
        raise ValueError(f"make_routing: topk: expected 1 to {num_experts}, got {topk}")
    rng = np.random.default_rng(seed)
    local = num_experts // world
    weight = np.stack([_popularity(local, law, exponent, rng) for _ in range(world)])
    owner = np.repeat(np.arange(world), local)
    indices, weights = [], []
    for rank in range(world):
        share = np.full(world, 1.0)
        if remote_share is not None and world > 1:
            share = np.full(world, remote_share / (world - 1))
            share[rank] = 1.0 - remote_share
        with np.errstate(divide="ignore"):
            logits = np.log(weight * share[:, None]).reshape(-1)
        if distinct:
            scores = logits + rng.gumbel(size=(tokens, num_experts))
            chosen = np.argsort(-scores, axis=1, kind="stable")[:, :topk].astype(np.int64)
        else:
            cumulative = np.cumsum(np.exp(logits - logits.max()))
            draws = rng.random((tokens, topk)) * cumulative[-1]
            chosen = np.searchsorted(cumulative, draws, side="right").astype(np.int64)
        gate = rng.random((tokens, topk)) + 0.1
        indices.append(chosen)
        weights.append((gate / gate.sum(axis=1, keepdims=True)).astype(np.float32))
    topk_idx = np.stack(indices)
    owners = owner[topk_idx]
    remote = owners != np.arange(world)[:, None, None]
    load = np.bincount(topk_idx.reshape(-1), minlength=num_experts)
    by_rank = np.bincount(owners.reshape(-1), minlength=world)
    empty = topk_idx.size == 0
    return Routing(
        topk_idx,
        np.stack(weights),
        0.0 if empty else float(remote.mean()),
        1.0 if empty else float(load.max() / load.mean()),
        1.0 if empty else float(by_rank.max() / by_rank.mean()),
    )


def _popularity(
    count: int, law: RoutingLaw, exponent: float, rng: np.random.Generator
) -> npt.NDArray[np.float64]:
    if law == "balanced":
        values = np.ones(count)
    elif law == "zipf":
        values = rng.permutation(1.0 / np.arange(1, count + 1) ** exponent)
    elif law == "dirichlet":
        values = rng.dirichlet(np.full(count, 1.0 / exponent)) + 1e-12
    else:
        raise ValueError(f"make_routing: law: expected balanced, zipf or dirichlet, got {law}")
    return np.asarray(values / values.sum())
