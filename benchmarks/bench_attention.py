"""Attention, and attention with the output All-to-All of Ulysses: fused against serial.

    python benchmarks/bench_attention.py                              # attention alone, one GPU
    torchrun --nproc-per-node 2 benchmarks/bench_attention.py         # with the All-to-All

Every rank holds all rows of its heads, as behind the first All-to-All. Arms, each a CUDA graph:
  fa3, cudnn, fa4       attention alone: ours, torch's cuDNN, flash-attn-4 where it is installed
  fused                 fa3_a2a by the planner's plan; the time is receiver-ready (it ends when this
                        rank has everything), `sender_us` is the attention kernel alone
  fused burst           the same, output tiles sent at once instead of in slices
  fused coupled         the counterfactual: at once, and every tile waits until it is visible
  fa3 + a2a             ours, then our direct-store All-to-All
  fa3 + nccl            ours, then copy, all_to_all_single, copy
  cudnn + nccl          what users run today
Arms are interleaved, each sample is the maximum over ranks, and results are compared before timing.
`over_fa3` is the median over rounds of an arm's time over that of `fa3` in the same round, with
its 95% interval; for `fused` and `fused burst` of a measurement of its own, in which only these and
`fa3` take turns (`_alternate.py`).
`predicted_us` is the planner's, from the profile of this machine.
With two ranks half of the rows are remote; in a group of eight it would be 7/8.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.metadata
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from _alternate import over_base
from _ranks import local_rank
from _report import ResultWriter, Row, line
from torch.nn.attention import SDPBackend, sdpa_kernel

from xstage_ext.planner.attention import AttentionPlan, even_split
from xstage_ext.planner.attention_choice import AttentionProblem, decide
from xstage_ext.reference_attention import attention as reference
from xstage_ext.testing import Ratio, Timing, graph_of, max_over_ranks, time_arms
from xstage_ext.workspace import SymmetricWorkspace, region_bytes

Call = Callable[[], torch.Tensor]
PREDICTED = {
    "fa3": "attention",
    "fused": "fused",
    "fused coupled": "coupled",
    "fa3 + a2a": "serial",
}
"""What the planner calls an arm."""
CLOSE = ("fa3", "fused", "fused burst")
"""Arms that differ by a percent."""
CLOSE_SECONDS = 6.0


@dataclasses.dataclass(frozen=True)
class Problem:
    """One rank's attention."""

    name: str
    rows: int
    heads: int  # of one rank
    head_dim: int
    causal: bool = False

    def flops(self) -> float:
        return 4.0 * self.heads * self.rows**2 * self.head_dim * (0.5 if self.causal else 1.0)


def grid(head_dim: int, causal: bool) -> list[Problem]:
    """12 heads at the lengths that other kernels were measured at."""
    kind = "causal" if causal else "full"
    return [
        Problem(f"{kind}-{rows}", rows, 12, head_dim, causal) for rows in (4096, 8192, 16384, 32768)
    ]


ALONE = [*grid(128, False), *grid(128, True), *grid(64, False), *grid(64, True)] + [
    Problem("wan-720p", 75_600, 5, 128),
    Problem("cogvideox", 17_776, 6, 64),
]
# Heads of one rank among eight, and of one among two where that is the smaller problem.
MODELS = [
    Problem("s512", 512, 12, 128),
    Problem("s1024", 1024, 12, 128),
    Problem("flux-1024", 4608, 3, 128),
    Problem("s4096", 4096, 12, 128),
    Problem("sd3.5-l", 4429, 19, 64),
    Problem("qwen-image", 7000, 3, 128),
    Problem("s8192", 8192, 12, 128),
    Problem("s16384", 16_384, 12, 128),
    Problem("cogvideox", 17_776, 6, 64),
    Problem("wan-480p", 32_760, 5, 128),
    Problem("wan-720p", 75_600, 5, 128),
    Problem("hunyuan", 118_800, 3, 128),
]


def kernel_us(replay: Callable[[], None], name: str) -> float:
    """Median duration of the kernels whose name holds `name`, by the profiler; the slowest rank."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(3):
            replay()
        torch.cuda.synchronize()
    spans = sorted(
        float(event.device_time_total) for event in profile.events() if name in event.name
    )
    own = spans[len(spans) // 2] if spans else 0.0
    return float(max_over_ranks(torch.tensor([own]))[0])


class Bench:
    """One problem: operands, arms, checks, rows of the report."""

    def __init__(self, problem: Problem, workspace: SymmetricWorkspace | None) -> None:
        self.problem = problem
        self.workspace = workspace
        self.world = 1 if workspace is None else workspace.world
        self.rank = 0 if workspace is None else workspace.rank
        shape = (1, problem.rows, problem.heads, problem.head_dim)
        self.q, self.k, self.v = (
            torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3)
        )
        self.calls = max(1, min(8, round(2e12 / problem.flops())))
        self.leases: list[Any] = []
        shares = even_split(problem.rows, self.world)
        layer = AttentionProblem(
            heads=problem.heads * self.world,
            kv_heads=problem.heads * self.world,
            head_dim=problem.head_dim,
            rows=shares,
            causal=problem.causal,
            slots=4,  # graphs take one half, eager calls the other
        )
        self.decision = decide(layer)
        self.plan: AttentionPlan = self.decision.plan

    # Arms.

    def fa3(self) -> torch.Tensor:
        return torch.ops.xstage.fa3(self.q, self.k, self.v, causal=self.problem.causal)[0]

    def cudnn(self) -> torch.Tensor:
        q, k, v = (tensor.transpose(1, 2) for tensor in (self.q, self.k, self.v))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=self.problem.causal
            )
        return out.transpose(1, 2)

    def by_nccl(self, attention: Call) -> torch.Tensor:
        out = attention()
        blocks = out.unflatten(1, (self.world, -1)).permute(1, 0, 2, 3, 4).contiguous()
        received = torch.empty_like(blocks)
        dist.all_to_all_single(received, blocks)
        return received.permute(1, 2, 0, 3, 4).reshape(
            1, -1, self.world * out.shape[2], out.shape[3]
        )

    def fused(self, **changes: int) -> Call:
        plan = dataclasses.replace(self.plan, **changes)
        lease = self.lease(plan.region_bytes(1, self.problem.head_dim))
        return lambda: torch.ops.xstage.fa3_a2a(
            self.q,
            self.k,
            self.v,
            None,
            None,
            self.problem.causal,
            False,
            plan.words(),
            lease.words(),
        )[0]

    def serial(self) -> Call:
        plan = self.plan.to_sequence()
        lease = self.lease(plan.a2a_region_bytes(1, 1, self.problem.head_dim))
        return lambda: torch.ops.xstage.ulysses_a2a([self.fa3()], plan.words(), lease.words())[0]

    def lease(self, nbytes: int) -> Any:
        assert self.workspace is not None
        lease = self.workspace.channel(f"c{len(self.leases)}", nbytes, counter_bytes=0)
        self.leases.append(lease)
        return lease

    def arms(self, coupled: bool) -> dict[str, Call]:
        arms: dict[str, Call] = {"fa3": self.fa3, "cudnn": self.cudnn}
        other = flash_attention_4()
        if self.world == 1:
            if other is not None:
                arms["fa4"] = lambda: other(self.q, self.k, self.v, self.problem.causal)
            return arms
        arms["fused"] = self.fused()
        arms["fused burst"] = self.fused(slice_bytes=0)
        if coupled:
            arms["fused coupled"] = self.fused(slice_bytes=0, completion=1)
        arms["fa3 + a2a"] = self.serial()
        if self.problem.rows % self.world == 0:
            arms["fa3 + nccl"] = functools.partial(self.by_nccl, self.fa3)
            arms["cudnn + nccl"] = functools.partial(self.by_nccl, self.cudnn)
        return arms

    # Checks.

    def check(self, arms: dict[str, Call]) -> dict[str, bool]:
        """Attention against float32 on the last rows of two heads; the rest against attention."""
        tail = slice(self.problem.rows - min(64, self.problem.rows), self.problem.rows)
        heads = slice(self.problem.heads - min(2, self.problem.heads), self.problem.heads)
        wanted, _ = reference(
            self.q[:, tail, heads],
            self.k[:, :, heads],
            self.v[:, :, heads],
            causal=self.problem.causal,
        )
        ok = {}
        for name in ("fa3", "cudnn", "fa4"):
            if name in arms:
                got = arms[name]()[:, tail, heads].float()
                ok[name] = bool((got - wanted).norm() / wanted.norm() < 5e-3)
        gathered = self.gathered() if self.world > 1 else None
        # In the same order on every rank: these calls meet.
        for name in [name for name in arms if name not in ok]:
            if name == "cudnn + nccl":
                ok[name] = ok["cudnn"]
            else:
                ok[name] = ok["fa3"] and torch.equal(arms[name](), gathered)
        return ok

    def gathered(self) -> torch.Tensor:
        """This rank's rows of every rank's heads, by plain collectives on attention alone."""
        out = self.fa3().contiguous()
        everyone = [torch.empty_like(out) for _ in range(self.world)]
        dist.all_gather(everyone, out)
        begin = sum(self.plan.rows[: self.rank])
        rows = slice(begin, begin + self.plan.rows[self.rank])
        return torch.cat([tensor[:, rows] for tensor in everyone], 2)

    # Report.

    def run(self, pairs: int, coupled: bool) -> list[Row]:
        arms = self.arms(coupled)
        ok = self.check(arms)
        replays = {name: graph_of(call, self.calls, warm_ups=2) for name, call in arms.items()}
        timings = time_arms(replays, pairs=pairs)
        ratios = self.ratios(replays, timings)
        sender = {name: kernel_us(replays[name], "fa3_kernel") for name in arms if "fused" in name}
        torch.cuda.synchronize()
        if self.workspace is not None:
            self.workspace.check()
        for lease in self.leases:
            lease.release()
        return [self.row(name, timings, ratios, ok[name], sender.get(name)) for name in arms]

    def ratios(
        self, replays: dict[str, Callable[[], None]], timings: dict[str, Timing]
    ) -> dict[str, tuple[Ratio, int]]:
        """Times over `fa3`, and the number of rounds or blocks behind each."""
        base = timings["fa3"]
        ratios = {name: (timing.over(base), timing.n) for name, timing in timings.items()}
        if self.world > 1:
            close = {name: replays[name] for name in CLOSE}
            round_us = sum(timings[name].us_median for name in CLOSE)
            found, blocks = over_base(close, "fa3", round_us, CLOSE_SECONDS)
            ratios |= {name: (ratio, blocks) for name, ratio in found.items()}
        return ratios

    def row(
        self,
        name: str,
        timings: dict[str, Timing],
        ratios: dict[str, tuple[Ratio, int]],
        ok: bool,
        sender_us: float | None,
    ) -> Row:
        problem = self.problem
        timing = timings[name]
        us = timing.us_median / self.calls
        remote = (problem.rows - self.plan.rows[self.rank]) * problem.heads * problem.head_dim * 2
        extra: dict[str, float | str] = {}
        if name != "fa3":
            over, number = ratios[name]
            extra |= {"over_fa3": over.median, "over_low": over.low, "over_high": over.high}
            extra["over_n"] = number
        if sender_us is not None:
            extra["sender_us"] = round(sender_us, 2)
        step = PREDICTED.get(name)
        if step is not None and self.world > 1:
            extra["predicted_us"] = round(self.decision.predicted_us[step], 1)
        if name == "fa4":
            extra["version"] = importlib.metadata.version("flash-attn-4")
        if name == "fused":
            plan = self.plan
            extra |= {"slice_bytes": plan.slice_bytes, "slice_steps": plan.slice_steps}
        return Row(
            op="attention" if self.world == 1 else "attention_a2a",
            arm=name,
            shape=dataclasses.asdict(problem),
            world=self.world,
            us_median=us,
            us_p10=timing.us_p10 / self.calls,
            us_p90=timing.us_p90 / self.calls,
            n=timing.n,
            tflops=problem.flops() / us / 1e6,
            egress_GBps=remote / us / 1e3 if "fused" in name else None,
            ok=ok,
            extra=extra,
        )


@functools.cache
def flash_attention_4() -> Callable[..., torch.Tensor] | None:
    """flash-attn-4, or None where it is not installed or does not run."""
    try:
        from flash_attn.cute import flash_attn_func
    except Exception:  # noqa: BLE001 - a rival that does not import is no rival here
        return None
    return lambda q, k, v, causal: flash_attn_func(q, k, v, causal=causal)[0]


def select(problems: list[Problem], names: list[str] | None) -> list[Problem]:
    return [p for p in problems if names is None or any(name in p.name for name in names)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", help="problems whose name holds one of these")
    parser.add_argument("--pairs", type=int, default=20, help="samples per arm")
    parser.add_argument("--head-dim", type=int, help="only this head size")
    parser.add_argument("--no-coupled", action="store_true", help="leave out the counterfactual")
    parser.add_argument("--out", default="attention.jsonl", help="file below benchmarks/results/")
    args = parser.parse_args()
    world = int(os.environ.get("WORLD_SIZE", 1))
    torch.cuda.set_device(local_rank("bench_attention", alone=True))
    problems = select(ALONE if world == 1 else MODELS, args.only)
    if args.head_dim is not None:
        problems = [p for p in problems if p.head_dim == args.head_dim]
    workspace = None
    if world > 1:
        dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
        largest = max(p.rows * p.heads * p.head_dim * 2 for p in problems)
        # Four arms with rings of four slots each.
        workspace = SymmetricWorkspace(nbytes=region_bytes([4 * largest + (1 << 20)] * 4))
    writer = ResultWriter(args.out) if world == 1 or dist.get_rank() == 0 else None
    for problem in problems:
        for row in Bench(problem, workspace).run(args.pairs, not args.no_coupled):
            if writer is not None:
                print(line(row), flush=True)
                writer.write(row)
    if workspace is not None:
        workspace.close()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
