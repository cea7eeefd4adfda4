"""`UlyssesAttention` on one GPU: a world of one is local attention."""

from __future__ import annotations

import pytest
import torch

from xstage_ext import UlyssesAttention
from xstage_ext import reference_attention as reference

CLOSE = {"rtol": 1e-2, "atol": 1e-2}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [32, 40, 64, 72, 80, 96, 128, 192, 256])
def test_every_head_size_is_right_or_falls_back(head_dim: int, causal: bool) -> None:
    options = {"device": "cuda", "dtype": torch.bfloat16}
    q = torch.randn(2, 130, 6, head_dim, **options)
    k, v = (torch.randn(2, 257, 3, head_dim, **options) for _ in range(2))
    module = UlyssesAttention(6, head_dim, kv_heads=3, causal=causal)
    expected, _ = reference.attention(q, k, v, causal=causal)
    torch.testing.assert_close(module(q, k, v).float(), expected, **CLOSE)
    if head_dim not in (64, 128):
        assert f"head_dim {head_dim}" in str(module.fallback_reason)
    module.close()


def test_no_device_tensor_of_another_device() -> None:
    module = UlyssesAttention(4, 64)
    q, k, v = torch.randn(3, 1, 9, 4, 64).bfloat16()
    with pytest.raises(TypeError, match="expected torch.bfloat16 on cuda"):
        module(q, k, v)
