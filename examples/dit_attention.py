"""Ulysses attention of a diffusion transformer: every rank owns a run of the sequence.

python examples/dit_attention.py                          # one process, GPU or CPU
torchrun --nproc-per-node 2 examples/dit_attention.py     # two ranks, uneven shards
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from moe_layer import start

import xstage_ext

HEADS, HEAD_DIM, SEQUENCE = 6, 64, 1001  # no rank count divides 1001 rows evenly


def main() -> None:
    """Runs one attention and compares with torch on the whole sequence."""
    device = start()
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    rows = [SEQUENCE // world + (r < SEQUENCE % world) for r in range(world)]
    attention = xstage_ext.UlyssesAttention(HEADS, HEAD_DIM, device=device)
    attention.prepare(rows)

    torch.manual_seed(7)  # the whole sequence on every rank, so that each can check its rows
    whole = torch.randn(3, 1, SEQUENCE, HEADS, HEAD_DIM).bfloat16()
    first = sum(rows[:rank])
    q, k, v = whole[:, :, first : first + rows[rank]].to(device)
    out = attention(q, k, v, rows=rows)

    heads_first = whole.float().transpose(2, 3)
    expected = torch.nn.functional.scaled_dot_product_attention(*heads_first).transpose(1, 2)
    error = (out.float().cpu() - expected[:, first : first + rows[rank]]).abs().max().item()
    told = (
        f"rank {rank} of {world}: {rows[rank]} rows, path {attention.path}"
        f"{'' if attention.fallback_reason is None else ' (' + attention.fallback_reason + ')'}; "
        f"largest difference from torch {error:.4f}\n"
    )
    print(told, end="", flush=True)  # in one piece: ranks share the terminal
    attention.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    if error > 0.02:
        raise SystemExit("wrong result")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
