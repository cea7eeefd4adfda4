"""Traces megamoe calls by schedule and way to store: where the time goes, per SM.

    python benchmarks/trace_megamoe.py [--shape 0] [--arms "wave st" ...] [--out DIR]
    torchrun --nproc-per-node 2 benchmarks/trace_megamoe.py ...

Tensors and plans are those of bench_megamoe. Between GPUs, `local` (all experts on this rank) is
the control: what a schedule does to the tiles, without a link. Prints a breakdown per arm; --out
also writes Chrome/Perfetto JSON and a timeline. The trace build writes a few records per tile; its
calls are about 1% longer. `xstage trace` does the same for a layer of your own.
"""

from __future__ import annotations

import argparse
import pathlib

from _ranks import local_rank
from bench_megamoe import ARMS, SHAPES, Layer, plans_of

from xstage_ext._trace_moe import MoETensors, ranks, trace_plan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", type=int, default=0, help="line of bench_megamoe's table")
    parser.add_argument("--arms", nargs="*", choices=list(ARMS))
    parser.add_argument("--calls", type=int, default=6)
    parser.add_argument("--out", type=pathlib.Path)
    o = parser.parse_args()
    local_rank("trace_megamoe", alone=True)
    with ranks() as (rank, world):
        shape = SHAPES[o.shape]
        tensors = MoETensors(*Layer(shape, rank, world).tensors)
        names = o.arms or ["wave st", "wave bulk", "inter st", "inter paced"]
        for name, plan in plans_of(shape, world, names).items():
            result = trace_plan(tensors, plan, o.calls)
            print(f"== {name}, rank {rank} of {world}\n{result.breakdown()}", flush=True)
            if o.out is not None and rank == 0:
                o.out.mkdir(parents=True, exist_ok=True)
                result.save_chrome(o.out / f"{name.replace(' ', '_')}.json")
                result.save_picture(o.out / f"{name.replace(' ', '_')}.png")


if __name__ == "__main__":
    main()
