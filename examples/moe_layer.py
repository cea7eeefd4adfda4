"""One mixture-of-experts layer over all ranks, against the slow reference.

python examples/moe_layer.py                              # one process, GPU or CPU
torchrun --nproc-per-node 2 examples/moe_layer.py         # two ranks
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

import xstage_ext
from xstage_ext import reference

EXPERTS, TOPK, HIDDEN, INTERMEDIATE, TOKENS = 8, 2, 256, 128, 96


def start() -> torch.device:
    """Joins the launcher's ranks, if there is a launcher; returns this rank's device."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", local % gpus) if gpus else torch.device("cpu")
    if "RANK" in os.environ:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device


def main() -> None:
    """Plans, runs one step, and compares with fp32 arithmetic on every rank."""
    device = start()
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    layer = xstage_ext.MegaMoE(
        num_experts=EXPERTS,
        topk=TOPK,
        hidden=HIDDEN,
        intermediate=INTERMEDIATE,
        max_tokens=TOKENS,
        device=device,
    )
    # Every rank draws all weights and keeps its experts, so that each can check the result alone.
    torch.manual_seed(1)
    w13 = torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN).mul_(HIDDEN**-0.5).bfloat16()
    w2 = torch.randn(EXPERTS, HIDDEN, INTERMEDIATE).mul_(INTERMEDIATE**-0.5).bfloat16()
    mine = slice(rank * EXPERTS // world, (rank + 1) * EXPERTS // world)
    layer.w13.copy_(w13[mine])
    layer.w2.copy_(w2[mine])
    layer.prepare()

    torch.manual_seed(100 + rank)  # ranks have tokens of their own
    x = torch.randn(TOKENS, HIDDEN).bfloat16()
    weights, experts = torch.rand(TOKENS, EXPERTS).softmax(-1).topk(TOPK)
    y = layer(x.to(device), experts.to(device), weights.to(device))

    expected = reference.moe_reference(x, experts, weights, w13, w2)
    error = (y.float().cpu() - expected.float()).abs().max().item()
    how = layer.impl if layer.fallback_reason is None else f"fallback: {layer.fallback_reason}"
    told = f"rank {rank} of {world}: {how}; largest difference from the reference {error:.4f}\n"
    print(told, end="", flush=True)  # in one piece: ranks share the terminal
    layer.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    if error > 0.05:
        raise SystemExit("wrong result")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
