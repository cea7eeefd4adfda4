"""What `UlyssesAttention` refuses, on one rank or on all, and who is told."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ranks import launch
from xstage_ext import UlyssesAttention


def operands(rows: int = 24, heads: int = 4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = torch.randn(3, 2, rows, heads, 64).bfloat16()
    return q, k, v


def small(**options: Any) -> UlyssesAttention:
    return UlyssesAttention(4, 64, device="cpu", **options)


@pytest.mark.parametrize("prepared", [False, True])
def test_whatever_ends_a_call_before_its_launch_is_announced(prepared: bool) -> None:
    """Also twice in a row: the peer meets neither the next call nor the one behind it."""
    outcomes = launch(
        "attention.refused_calls", 2, prepared=prepared, env={"XSTAGE_TIMEOUT_MS": "9000"}
    )
    assert [outcome.code for outcome in outcomes] == [0, 0], "\n".join(map(str, outcomes))
    told, own = (outcome.facts["errors"] for outcome in outcomes)
    assert "ValueError: xstage.UlyssesAttention: joint q: expected [1, 10, 4, 64]" in own[0]
    assert "joint q: expected torch.bfloat16" in own[1] and "float32" in own[1]
    assert "joint v: expected a tensor, got None" in own[2]
    for text, reason in zip(told, own, strict=True):
        assert text.startswith("PeerError") and "rank 1" in text, told
        assert reason.split(": expected")[0].split(": ")[-1] in text, told


def test_compiled_calls_of_a_closed_module_say_so() -> None:
    module = small()
    with torch.inference_mode():
        module(*operands())
        compiled = torch.compile(module, fullgraph=True, backend="eager")
        compiled(*operands())
        module.close()
        with pytest.raises(Exception, match=r"ulysses: it is closed; call prepare\(\)"):
            compiled(*operands())
