"""Small calls of fa3 and fa3_a2a that touch every path, for compute-sanitizer:

compute-sanitizer --tool racecheck python -m tests.gpu.fa3_small
"""

from __future__ import annotations

import torch

from xstage_ext.planner.attention import AttentionPlan
from xstage_ext.reference_attention import attention, to_heads
from xstage_ext.workspace import SymmetricWorkspace, region_bytes


def alone(head_dim: int, causal: bool, **launch: int) -> None:
    """Two batch entries, partial tiles, runs of valid keys."""
    q, k, v = (
        torch.randn(2, rows, 2, head_dim, device="cuda", dtype=torch.bfloat16)
        for rows in (300, 400, 400)
    )
    plan = AttentionPlan((300,), (400,), (2,), slots=1, num_sms=2, **launch)
    runs = [[[0, 100], [130, 390]], [[5, 400], [0, 0]]]
    for segments in (None, torch.tensor(runs, dtype=torch.int32, device="cuda")):
        out, _ = torch.ops.xstage.fa3(q, k, v, segments, None, causal, True, 0, plan.words())
        wanted, _ = attention(q, k, v, segments, causal=causal)
        assert float((out.float() - wanted).norm() / wanted.norm()) < 5e-3


def to_owners() -> None:
    """A virtual world of three with uneven rows and heads."""
    plan = AttentionPlan(
        (150, 64, 1), (100, 100, 15), (2, 1, 1), num_sms=2, slice_bytes=4096, slice_steps=1
    )
    q, k, v = (torch.randn(1, 215, 4, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    nbytes = plan.region_bytes(1, 128)
    with SymmetricWorkspace(
        nbytes=region_bytes([nbytes]), device="cuda", backend="virtual", world=3
    ) as workspace:
        lease = workspace.channel("out", nbytes, counter_bytes=0)
        outs, _ = torch.ops.xstage.fa3_a2a_virtual(
            *(to_heads(plan, tensor) for tensor in (q, k, v)),
            None,
            None,
            False,
            True,
            plan.words(),
            lease.virtual_words(),
        )
        wanted, _ = attention(q, k, v)
        assert float((torch.cat(outs, 1).float() - wanted).norm() / wanted.norm()) < 5e-3
        workspace.check(synchronize=True)
        del outs


if __name__ == "__main__":
    for head_dim in (64, 128):
        alone(head_dim, causal=False)
        alone(head_dim, causal=True, slice_bytes=2048, slice_steps=1)
    to_owners()
    torch.cuda.synchronize()
    print("fa3_small: ok")
