"""One attention layer of public models: ours against what a user would write otherwise.

    python benchmarks/bench_model.py wan2.2-720p                  # predictions only
    torchrun --nproc-per-node 2 benchmarks/bench_model.py flux    # measured

Several names are measured one after another.

Arms, each from sequence-sharded q, k, v to a sequence-sharded result (on GPUs a CUDA graph):
  fused      attention whose output tiles go straight to their owners, behind our All-to-All
  serial     our All-to-All, our attention, our All-to-All back
  torch      permutes, all_to_all_single and torch's attention
`--proxy-world 8` gives each rank the heads that it would have among eight. `--rows` shortens the
sequence, to try the script on a CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from _report import ResultWriter, Row, line

from xstage_ext import AttentionProblem, UlyssesAttention
from xstage_ext.planner.attention import even_split
from xstage_ext.planner.attention_choice import decide
from xstage_ext.shapes_attention import MODELS, shape
from xstage_ext.testing import graph_of, time_arms

PATHS = {"fused": "auto", "serial": "auto", "torch": "torch"}


def predict(name: str, problem: AttentionProblem) -> list[Row]:
    """The planner's figures; without the All-to-All of q, k and v, which all arms share."""
    decision = decide(problem)
    what = {"model": name, "rows": sum(problem.rows), "heads": problem.heads, "D": problem.head_dim}
    print(f"{decision.action}: {decision.reason} (profile {decision.profile})")
    return [
        Row.predicted("ulysses_attention", arm, what, problem.world, us)
        for arm, us in decision.predicted_us.items()
    ]


def module_of(arm: str, problem: AttentionProblem, device: torch.device) -> UlyssesAttention:
    """A prepared module that takes the path of an arm."""
    module = UlyssesAttention(
        problem.heads,
        problem.head_dim,
        kv_heads=problem.kv_heads,
        device=device,
        heads_per_rank=problem.heads_per_rank,
        impl=PATHS[arm],
        slots=4,  # a graph takes one half, eager calls the other
        name=arm,
    )
    module.prepare(problem.rows)
    assert module._route is not None
    if arm != "torch" and module.path != "torch":
        module._route = dataclasses.replace(module._route, path=arm)
    elif arm != "torch":
        raise SystemExit(f"no {arm} path here: {module.fallback_reason}")
    return module


def measure(name: str, problem: AttentionProblem, pairs: int) -> list[Row]:
    """All arms interleaved; each compared with the torch path in the same run."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = (1, problem.rows[rank], problem.heads, problem.head_dim)
    q, k, v = (torch.randn(size, device=device, dtype=torch.bfloat16) for _ in range(3))
    modules = {arm: module_of(arm, problem, device) for arm in PATHS}

    def call(arm: str) -> torch.Tensor:
        out: torch.Tensor = modules[arm](q, k, v, rows=problem.rows)
        return out

    arms: dict[str, Callable[[], object]] = {arm: functools.partial(call, arm) for arm in PATHS}
    wanted = call("torch").float()
    ok = {}
    for arm in PATHS:
        error = (call(arm).float() - wanted).norm()
        ok[arm] = bool(error <= 1e-2 * wanted.norm())
    if device.type == "cuda":
        arms = {arm: graph_of(functools.partial(call, arm), 1, warm_ups=2) for arm in PATHS}
    timings = time_arms(arms, pairs=pairs)
    what = {"model": name, "rows": sum(problem.rows), "heads": problem.heads, "D": problem.head_dim}
    rows = [
        Row(
            op="ulysses_attention",
            arm=arm,
            shape=what,
            world=problem.world,
            us_median=timing.us_median,
            us_p10=timing.us_p10,
            us_p90=timing.us_p90,
            n=timing.n,
            tflops=problem.flops / timing.us_median / 1e6,
            ok=ok[arm],
            extra={"device": device.type},
        )
        for arm, timing in timings.items()
    ]
    for module in modules.values():
        module.check(synchronize=True)
        module.close()
    return rows


def problem_of(name: str, world: int, args: argparse.Namespace) -> AttentionProblem:
    """The model's layer, as the command line changes it."""
    problem = shape(name).problem(world, proxy_world=args.proxy_world)
    if args.rows is not None:
        problem = dataclasses.replace(problem, rows=even_split(args.rows, world))
    return problem


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="+", choices=sorted(MODELS))
    parser.add_argument("--world", type=int, default=8, help="ranks, for predictions")
    parser.add_argument("--proxy-world", type=int, help="heads as among so many ranks")
    parser.add_argument("--rows", type=int, help="another length of the sequence")
    parser.add_argument("--pairs", type=int, default=20, help="samples per arm")
    parser.add_argument("--out", help="file below benchmarks/results/; none by default")
    args = parser.parse_args()
    launched = "RANK" in os.environ
    if launched:
        on_gpu = torch.cuda.is_available()
        if on_gpu:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if on_gpu else "gloo")
    world = dist.get_world_size() if launched else args.world
    leads = not launched or dist.get_rank() == 0
    writer = ResultWriter(args.out) if args.out and leads else None
    wrong = False
    for name in args.model:
        problem = problem_of(name, world, args)
        with torch.inference_mode():
            rows = measure(name, problem, args.pairs) if launched else predict(name, problem)
        wrong |= any(row.ok is False for row in rows)
        for row in rows if leads else []:
            print(line(row), flush=True)
            if writer is not None:
                writer.write(row)
    if launched:
        dist.destroy_process_group()
    if wrong:
        raise SystemExit("an arm is wrong")


if __name__ == "__main__":
    main()
