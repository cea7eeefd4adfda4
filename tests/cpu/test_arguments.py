"""Arguments that no path takes: refused by name, with the value, before anything runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.cpu.test_megamoe_module import SMALL, tokens
from tests.cpu.test_megamoe_module import small as small_moe
from tests.ranks import launch
from xstage_ext import MegaMoE, MoEProblem
from xstage_ext.errors import PlanError, WorkspaceError


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num_experts": "8"}, "num_experts: expected an integer, got '8'"),
        ({"hidden": None}, "hidden: expected an integer, got None"),
        ({"topk": True}, "topk: expected an integer, got True"),
        ({"tokens": 1.5}, "tokens: expected an integer, got 1.5"),
        ({"clamp": "a"}, "clamp: expected a positive number, got 'a'"),
        ({"clamp": float("nan")}, "clamp: expected a positive number, got nan"),
        (
            {"routed_scaling_factor": "a"},
            "routed_scaling_factor: expected a finite number, got 'a'",
        ),
        ({"routed_scaling_factor": None}, "routed_scaling_factor: .* got None"),
        ({"routed_scaling_factor": float("nan")}, "routed_scaling_factor: .* got nan"),
    ],
)
def test_layers_name_the_argument(change: dict[str, Any], text: str) -> None:
    with pytest.raises(PlanError, match=text):
        MegaMoE(**(SMALL | change), device="cpu")


def test_integers_of_numpy_are_integers() -> None:
    moe = MegaMoE(**{name: np.int64(value) for name, value in SMALL.items()}, device="cpu")
    assert moe.problem == MoEProblem(world=1, **SMALL)
    assert {type(value) for value in vars(moe.problem).values()} <= {int, str, type(None)}
    with pytest.raises(PlanError, match="remote_share: expected 0 to 1, got 'a'"):
        MoEProblem(world=2, **SMALL, remote_share="a")  # type: ignore[arg-type]


@pytest.mark.parametrize("impl", ["native", "fallback"])
def test_calls_of_layers_name_the_argument(impl: str) -> None:
    moe, (x, ids, weights) = small_moe(impl=impl), tokens()
    call = {"x": x, "topk_idx": ids, "topk_weights": weights}
    meta = torch.empty(32, 128, dtype=torch.bfloat16, device="meta")
    for change, text in (
        (
            {"num_tokens": torch.tensor(3, device="meta")},
            "num_tokens: expected a tensor on cpu, go",
        ),
        ({"out": meta}, "out: expected a tensor on cpu, got one on meta"),
        ({"x": meta}, "x: expected a tensor on cpu, got one on meta"),
        ({"topk_idx": ids.to("meta")}, "topk_idx: expected a tensor on cpu, got one on meta"),
        ({"topk_idx": None}, "topk_idx: expected a tensor, got None"),
        ({"out": 3}, "out: expected a tensor, got 3"),
        ({"num_tokens": True}, "num_tokens: expected an integer or a tensor of one, got True"),
    ):
        with pytest.raises(TypeError, match=text):
            moe(**(call | change))
    with pytest.raises(RuntimeError, match=r"topk_idx: expected \[32, 2\], got \[5, 2\]"):
        moe(x, ids[:5], weights, num_tokens=3)
    long = (part.repeat(2, 1) for part in (x, ids, weights))
    assert moe(*long, num_tokens=3).shape == (64, 128)  # more rows than max_tokens, few tokens
    moe.close()


@pytest.mark.parametrize("impl", ["native", "fallback"])
def test_num_tokens_on_the_device_are_cut_to_the_rows(impl: str) -> None:
    moe, given = small_moe(impl=impl), tokens()
    assert torch.equal(moe(*given, num_tokens=torch.tensor(300)), moe(*given))
    assert not moe(*given, num_tokens=torch.tensor(-4)).any()
    moe.close()


def test_weights_that_left_the_device_are_named() -> None:
    moe = small_moe()
    moe.prepare()
    with pytest.raises(TypeError, match="w13: expected a tensor on cpu, got one on meta"):
        moe.to("meta")(*tokens())
    moe.close()


def test_ranks_that_plan_for_other_loads_are_told_so() -> None:
    for outcome in launch("moe.disagree", 2, tokens=[50, 150]):
        assert outcome.facts["error"] == "WorkspaceError", str(outcome)
        assert "disagree in tokens: rank 0 has 50, rank 1 has 150" in outcome.facts["text"]


def test_groups_without_torch_distributed_are_refused() -> None:
    text = "xstage.MegaMoE: group: torch.distributed is not initialised, got 3"
    with pytest.raises(WorkspaceError, match=text):
        MegaMoE(**SMALL, device="cpu", group=3)  # type: ignore[arg-type]
