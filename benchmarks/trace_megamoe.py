"""Traces one megamoe call per schedule on one GPU: Chrome/Perfetto JSON, a timeline, span tables.

    python benchmarks/trace_megamoe.py [--out DIR] [--tokens 8192 --hidden 4096 ...]

All rows are local (a world of one), which is the control of the remote case: what the schedules do
to the tiles, without a link. The trace build writes a few records per tile; its calls are about 1%
longer.
"""

from __future__ import annotations

import argparse
import pathlib

import torch

from xstage_ext import SymmetricWorkspace
from xstage_ext.planner import choose
from xstage_ext.planner.problem import MoEProblem
from xstage_ext.testing import make_routing
from xstage_ext.trace import MegaMoETrace
from xstage_ext.workspace import region_bytes

ARMS = {
    "wave_st": {"schedule": 0, "store": 0},
    "wave_bulk": {"schedule": 0, "store": 1},
    "interleaved_st": {"schedule": 1, "store": 0},
    "interleaved_paced": {"schedule": 1, "store": 2, "slice_rows": 1},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("traces"))
    sizes = {"tokens": 8192, "hidden": 4096, "intermediate": 1536, "experts": 16, "topk": 4}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    o = parser.parse_args()
    o.out.mkdir(parents=True, exist_ok=True)
    problem = MoEProblem(
        world=1,
        num_experts=o.experts,
        topk=o.topk,
        hidden=o.hidden,
        intermediate=o.intermediate,
        max_tokens=o.tokens,
    )
    routing = make_routing(1, o.tokens, o.experts, o.topk, seed=1)
    ids = torch.from_numpy(routing.topk_idx[0]).int().cuda()
    weights = torch.from_numpy(routing.topk_weights[0]).cuda()
    x = torch.randn(o.tokens, o.hidden, device="cuda").bfloat16()
    w13 = torch.randn(o.experts, 2 * o.intermediate, o.hidden, device="cuda", dtype=x.dtype)
    w2 = torch.randn(o.experts, o.hidden, o.intermediate, device="cuda", dtype=x.dtype)
    w13 *= o.hidden**-0.5
    w2 *= o.intermediate**-0.5
    for name, fields in ARMS.items():
        plan = choose.choose(problem, None, **fields).plan
        nbytes = region_bytes([plan.bytes()])
        with SymmetricWorkspace(nbytes=nbytes, backend="virtual", world=1) as workspace:
            words = workspace.channel(name, plan.bytes()).words()
            for _ in range(4):
                _, records = torch.ops.xstage.megamoe_traced(
                    x, ids, weights, w13, w2, plan.words(), words, 512
                )
            workspace.check(synchronize=True)
            trace = MegaMoETrace.read(records)
        trace.save_chrome(o.out / f"{name}.json")
        trace.save_picture(o.out / f"{name}.png")
        print(f"== {name}\n{trace.summary()}", flush=True)


if __name__ == "__main__":
    main()
