"""One small mixture-of-experts layer, really computed: two CPU processes against the reference."""

from __future__ import annotations

import dataclasses
import pathlib
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from xstage_ext import MegaMoE, reference
from xstage_ext.testing import Difference, compare, make_routing

WORLD = 2
SHAPE = {"num_experts": 16, "topk": 4, "hidden": 512, "intermediate": 256}
TOKENS = 160
TOLERANCE = {"rtol": 2e-2, "atol": 2e-2}
"""bf16 results of unit size: two roundings of 2^-8 each, and the order of additions."""


@dataclasses.dataclass(frozen=True)
class LayerCheck:
    """What came out, over both ranks.

    Attributes
    ----------
    difference : Difference
        Against the reference with the kernel's roundings, the worse rank.
    same_bits : bool
        Wave and interleaved agree bit for bit.
    backend : str
        Of the workspace.
    """

    difference: Difference
    same_bits: bool
    backend: str

    @property
    def ok(self) -> bool:
        """Everything agrees."""
        return self.difference.ok and self.same_bits


def check_layer() -> LayerCheck:
    """Start two processes, compute the layer in both schedules, compare."""
    with tempfile.TemporaryDirectory() as folder:
        store = pathlib.Path(folder) / "store"
        mp.spawn(_rank, args=(str(store), folder), nprocs=WORLD, join=True)
        results: list[dict[str, Any]] = [
            torch.load(pathlib.Path(folder) / f"{rank}.pt", weights_only=True)
            for rank in range(WORLD)
        ]
    differences = [compare(r["y"], r["reference"], **TOLERANCE) for r in results]
    worst = max(differences, key=lambda d: (not d.ok, d.relative))
    return LayerCheck(worst, all(r["same_bits"] for r in results), results[0]["backend"])


def _rank(rank: int, store: str, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    routing = make_routing(WORLD, TOKENS, SHAPE["num_experts"], SHAPE["topk"], law="zipf", seed=7)
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(WORLD, TOKENS, SHAPE["hidden"], generator=generator).bfloat16()
    experts, hidden, inner = (SHAPE[k] for k in ("num_experts", "hidden", "intermediate"))
    w13 = (torch.randn(experts, 2 * inner, hidden, generator=generator) / hidden**0.5).bfloat16()
    w2 = (torch.randn(experts, hidden, inner, generator=generator) / inner**0.5).bfloat16()
    ids = torch.from_numpy(routing.topk_idx[rank])
    weights = torch.from_numpy(routing.topk_weights[rank])
    local = slice(rank * experts // WORLD, (rank + 1) * experts // WORLD)
    results = []
    for schedule in (0, 1):
        layer = MegaMoE(
            **SHAPE, max_tokens=TOKENS, device="cpu", impl="native", plan={"schedule": schedule}
        )
        layer.w13.data.copy_(w13[local])
        layer.w2.data.copy_(w2[local])
        layer.prepare()
        results.append(layer(x[rank], ids, weights).clone())
        backend = layer._lease.workspace.backend if layer._lease else ""
        layer.close()
    wanted = reference.moe_reference(x[rank], ids, weights, w13, w2, rounded=True)
    torch.save(
        {
            "y": results[0],
            "reference": wanted,
            "same_bits": bool(torch.equal(*results)),
            "backend": backend,
        },
        pathlib.Path(folder) / f"{rank}.pt",
    )
    dist.destroy_process_group()
