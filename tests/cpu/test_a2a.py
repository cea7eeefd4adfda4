"""What only the All-to-All does; test_attention.py has it in front of attention."""

from __future__ import annotations

import pytest
import torch

from xstage_ext import SymmetricWorkspace
from xstage_ext import reference_attention as reference
from xstage_ext.planner.attention import AttentionPlan, even_split, row_pad_for
from xstage_ext.ulysses import ulysses_a2a, ulysses_a2a_virtual

ops = torch.ops.xstage


@pytest.mark.parametrize(("heads", "head_dim", "pad"), [(24, 128, 128), (5, 64, 16), (4, 64, 0)])
def test_rows_with_space_between_them(heads: int, head_dim: int, pad: int) -> None:
    """Results of the way back, real and fake; nobody writes between their rows."""
    shares = even_split(33, 3)
    plan = AttentionPlan(shares, shares, even_split(heads, 3))
    back = plan.to_sequence(row_pad=pad)
    assert pad != 128 or row_pad_for(heads * head_dim * 2) == pad
    q = torch.randn(2, 33, heads, head_dim, dtype=torch.bfloat16)
    inputs = reference.to_heads(plan, q)
    nbytes = back.a2a_region_bytes(1, 2, head_dim)
    with SymmetricWorkspace(
        nbytes=nbytes, device="cpu", backend="virtual", world=3, timeout_ms=2000
    ) as workspace:
        lease = workspace.channel("c", nbytes)
        for rank in range(3):
            lease.region(rank).fill_(255)
        outs = ulysses_a2a_virtual(lease, back, inputs)
        assert all(map(torch.equal, outs, reference.shards(q, plan.rows)))
        row, pitch = heads * head_dim, heads * head_dim + pad // 2
        for out in outs:
            assert out.stride() == (out.shape[1] * pitch, pitch, head_dim, 1)
            between = 2 * out.shape[1] - 1
            gaps = out.as_strided((between, pad // 2), (pitch, 1), out.storage_offset() + row)
            assert bool((gaps.view(torch.int16) == -1).all())
        words = lease.virtual_words(1)
        with torch._subclasses.FakeTensorMode() as mode:
            fakes = [mode.from_tensor(t) for t in inputs]
            faked = ops.ulysses_a2a_virtual(fakes, back.words(), words)
        assert [t.stride() for t in faked] == [t.stride() for t in outs]
        del outs, out, gaps


def test_tensors_elsewhere_are_named() -> None:
    plan = AttentionPlan((33,), (33,), (4,))
    tensors = [torch.zeros(1, 33, 4, 64, device=device) for device in ("cpu", "meta")]
    nbytes = plan.a2a_region_bytes(2, 1, 64, 4)
    with SymmetricWorkspace(nbytes=nbytes, device="cpu") as workspace:
        lease = workspace.channel("c", nbytes)
        for exchange in (ulysses_a2a, ulysses_a2a_virtual):
            with pytest.raises(
                TypeError, match=r"tensors\[1\]: expected a tensor on cpu, got .*meta"
            ):
                exchange(lease, plan, tensors)
