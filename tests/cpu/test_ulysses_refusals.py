"""What `UlyssesAttention` refuses, on one rank or on all, and who is told."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ranks import launch
from xstage_ext import SymmetricWorkspace, UlyssesAttention
from xstage_ext.errors import PlanError


def operands(rows: int = 24, heads: int = 4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = torch.randn(3, 2, rows, heads, 64).bfloat16()
    return q, k, v


def small(**options: Any) -> UlyssesAttention:
    return UlyssesAttention(4, 64, device="cpu", **options)


@pytest.mark.parametrize("impl", ["auto", "torch"])
@pytest.mark.parametrize("prepared", [False, True])
def test_whatever_ends_a_call_before_its_launch_is_announced(prepared: bool, impl: str) -> None:
    """Also twice in a row: the peer meets neither the next call nor the one behind it."""
    outcomes = launch(
        "attention.refused_calls",
        2,
        prepared=prepared,
        impl=impl,
        env={"XSTAGE_TIMEOUT_MS": "9000"},
    )
    assert [outcome.code for outcome in outcomes] == [0, 0], "\n".join(map(str, outcomes))
    told, own = (outcome.facts["errors"] for outcome in outcomes)
    assert "ValueError: xstage.UlyssesAttention: joint q: expected [1, 10, 4, 64]" in own[0]
    assert "joint q: expected torch.bfloat16" in own[1] and "float32" in own[1]
    assert "joint v: expected a tensor, got None" in own[2]
    for text, reason in zip(told, own, strict=True):
        assert text.startswith("PeerError") and "rank 1" in text, told
        assert reason.split(": expected")[0].split(": ")[-1] in text, told


def test_peers_hear_of_refusals_where_torch_carries_the_calls() -> None:
    told, own = (outcome.facts["errors"] for outcome in launch("attention.log_sum_exp_by_torch", 2))
    assert own[0].startswith("NotImplementedError") and len(own) == 1
    assert "rank 1 refused a call of ulysses: NotImplementedError: xstage.Ulysses" in told[0]
    assert "rank 1 has closed its workspace or module" in told[1]


def test_a_rank_without_a_plan_is_named_by_all() -> None:
    told, own = (outcome.facts for outcome in launch("attention.bad_profile", 2))
    assert own["error"] == "ProfileError" and "/nowhere.json" in own["text"]
    assert told["error"] == "PeerError"
    assert "rank 1 of 2 refused the call: machine profile: expected a JSON file" in told["text"]


def test_compiled_calls_of_a_closed_module_say_so() -> None:
    module = small()
    with torch.inference_mode():
        module(*operands())
        compiled = torch.compile(module, fullgraph=True, backend="eager")
        compiled(*operands())
        module.close()
        with pytest.raises(Exception, match=r"ulysses: it is closed; call prepare\(\)"):
            compiled(*operands())


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        ({"blocks": 1}, "expected fields of block_m, .*, got 'blocks'"),
        ({"slots": 3}, "expected fields of block_m, .*, got 'slots'"),
        ({"num_sms": 1.5}, r"num_sms: expected an integer from 0 to 1024 \(SMs .*\), got 1.5"),
        ({"tile_order": "1"}, "tile_order: expected an integer from 0 to 2 .*, got '1'"),
        ({"completion": True}, "completion: expected an integer"),
        ({"block_m": -1}, "block_m: expected an integer from 0 .*, got -1"),
    ],
)
def test_plans_that_are_given_are_checked_at_once(plan: dict[str, Any], text: str) -> None:
    with pytest.raises(PlanError, match=text):
        small(plan=plan)


def test_plans_that_are_given_are_used() -> None:
    module = small(plan={"block_m": 8, "tile_order": 1})
    module.prepare(24, batch=2)
    assert module.decision is not None
    assert (module.decision.plan.block_m, module.decision.plan.tile_order) == (8, 1)
    module.close()


def test_memory_that_its_owner_gave_back_is_used_by_nobody() -> None:
    owner, guest, late = small(name="owner"), small(name="guest"), small(name="late")
    q, k, v = operands()
    with SymmetricWorkspace(None, 1 << 20, device="cpu") as workspace, torch.inference_mode():
        owner.prepare(24, batch=2, workspace=workspace)
        guest.prepare(24, batch=2, share=owner)
        guest(q, k, v)
        compiled = torch.compile(guest, fullgraph=True, backend="eager")
        compiled(q, k, v)
        owner.close()
        uses = [
            lambda: guest(q, k, v),
            lambda: compiled(q, k, v),
            lambda: late.prepare(24, batch=2, share=guest),
        ]
        for use in uses:
            with pytest.raises(Exception, match="channel 'owner outputs' was released"):
                use()


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan")])
def test_scales_are_positive_and_finite(scale: float) -> None:
    with pytest.raises(ValueError, match="scale: expected a positive finite number"):
        small(scale=scale)
