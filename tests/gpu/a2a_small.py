"""Small All-to-Alls that touch every path, for compute-sanitizer:

compute-sanitizer --tool racecheck python -m tests.gpu.a2a_small
"""

from __future__ import annotations

import torch

from xstage_ext.planner.attention import STORE_PATHS, AttentionPlan, even_split
from xstage_ext.reference_attention import shards, to_heads
from xstage_ext.ulysses import ulysses_a2a_virtual
from xstage_ext.workspace import SymmetricWorkspace, region_bytes


def there_and_back(path: int, rows: int, heads: int, head_dim: int, row_pad: int) -> None:
    """A virtual world of three: uneven shards, both directions, two calls in each slot."""
    plan = AttentionPlan(
        even_split(rows, 3), even_split(rows, 3), even_split(heads, 3), store_path=path, num_sms=6
    )
    back = plan.to_sequence(row_pad=row_pad)
    q = torch.randn(2, rows, heads, head_dim, device="cuda", dtype=torch.bfloat16)
    nbytes = max(plan.a2a_region_bytes(1, 2, head_dim), back.a2a_region_bytes(1, 2, head_dim))
    with SymmetricWorkspace(
        nbytes=region_bytes([nbytes]), device="cuda", backend="virtual", world=3
    ) as workspace:
        lease = workspace.channel("a2a", nbytes, counter_bytes=0)
        for _ in range(2):
            outs = ulysses_a2a_virtual(lease, plan, list(shards(q, plan.rows)))
            assert all(map(torch.equal, outs, to_heads(plan, q)))
            result = ulysses_a2a_virtual(lease, back, outs)
            assert all(map(torch.equal, result, shards(q, plan.rows)))
            del outs, result
        workspace.check(synchronize=True)


if __name__ == "__main__":
    for name in ("bulk", "vector"):
        there_and_back(STORE_PATHS.index(name), 215, 7, 64, row_pad=0)
        there_and_back(STORE_PATHS.index(name), 100, 6, 128, row_pad=128)
    there_and_back(STORE_PATHS.index("vector"), 50, 4, 33, row_pad=0)  # 2-byte vectors
    torch.cuda.synchronize()
    print("a2a_small: ok")
