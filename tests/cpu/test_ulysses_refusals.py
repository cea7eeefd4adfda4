"""What `UlyssesAttention` refuses, on one rank or on all, and who is told."""

from __future__ import annotations

import pytest

from tests.ranks import launch


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
