"""Arguments that no path takes: refused by name, with the value, before anything runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensor, FakeTensorMode

import xstage_ext
from tests.cpu.test_megamoe_module import SMALL, tokens
from tests.cpu.test_megamoe_module import small as small_moe
from tests.cpu.test_ulysses import operands
from tests.ranks import launch
from xstage_ext import AttentionProblem, MegaMoE, MoEProblem, UlyssesAttention
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
    share = MoEProblem(world=2, **SMALL, remote_share=torch.tensor(0.5))  # type: ignore[arg-type]
    assert share == MoEProblem(world=2, **SMALL, remote_share=0.5)
    scaled = MegaMoE(**SMALL, clamp=torch.tensor(7.0), device="cpu")  # type: ignore[arg-type]
    assert scaled.clamp == 7.0 and isinstance(scaled.clamp, float)
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
        ({"x": np.zeros((32, 128))}, "^xstage.megamoe: x: expected a tensor, got ndarray$"),
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


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"heads": 0}, "heads: expected 1 or more, got 0"),
        ({"heads": "6"}, "heads: expected an integer, got '6'"),
        ({"kv_heads": 0}, "kv_heads: expected a divisor of 4 heads, got 0"),
        ({"head_dim": 0}, "head_dim: expected 1 or more, got 0"),
        ({"head_dim": -1}, "head_dim: expected 1 or more, got -1"),
        ({"slots": 0}, "slots: expected an integer from 1 to 16 .*, got 0"),
        ({"slots": -1}, "slots: expected an integer from 1 to 16 .*, got -1"),
        ({"dtype": torch.float64}, "dtype: expected one of .*float16.*, got torch.float64"),
        ({"dtype": torch.int8}, "dtype: expected one of .*float16.*, got torch.int8"),
        ({"dtype": "bf16"}, "dtype: expected one of .*float16.*, got 'bf16'"),
        ({"heads_per_rank": 4}, "heads_per_rank: expected one number per rank, got 4"),
        ({"heads_per_rank": ["4"]}, "heads_per_rank: expected an integer, got '4'"),
    ],
)
def test_attention_names_the_argument(change: dict[str, Any], text: str) -> None:
    with pytest.raises(PlanError, match=text):
        UlyssesAttention(**({"heads": 4, "head_dim": 64, "device": "cpu"} | change))


@pytest.mark.parametrize(
    ("rows", "kind", "text"),
    [
        (-1, ValueError, "rows: expected no negative number, got -1"),
        ((-1,), ValueError, "rows: expected no negative number, got"),
        (65.0, TypeError, "rows: expected an integer, got 65.0"),
        (("65",), TypeError, "rows: expected an integer, got '65'"),
    ],
)
def test_rows_are_named(rows: Any, kind: type[Exception], text: str) -> None:
    module = UlyssesAttention(4, 64, device="cpu")
    q, k, v = operands(66)
    for use in (
        lambda: module.prepare(rows, batch=2),
        lambda: module.prepare(66, rows, batch=2),
        lambda: module.bytes(rows),
        lambda: module(q, k, v, rows=rows),
        lambda: xstage_ext.ulysses_attention(q, k, v, rows=rows),
    ):
        with pytest.raises(kind, match=text):
            use()
    with pytest.raises(PlanError, match="batch: expected 0 or more, got -1"):
        module.prepare(66, batch=-1)


@pytest.mark.parametrize("impl", ["auto", "torch"])
def test_calls_of_attention_name_the_argument(impl: str) -> None:
    module, (q, k, v) = UlyssesAttention(4, 64, device="cpu", impl=impl), operands(66)
    mask = torch.ones(2, 66, dtype=torch.bool, device="meta")
    text = q[:, :5]
    for change, kind, told in (
        (
            {"key_segments": torch.zeros(2, 1, 2).int().to("meta")},
            TypeError,
            "key_segments: .* meta",
        ),
        ({"key_segments": 3}, TypeError, "key_segments: expected a tensor on cpu, got 3"),
        ({"key_mask": mask}, TypeError, "key_mask: expected a tensor on cpu, got one on meta"),
        ({"out": q.to("meta")}, TypeError, "out: expected a tensor on cpu, got one on meta"),
        ({"q": q.to("meta")}, TypeError, "q: expected torch.bfloat16 on cpu, got .* on meta"),
        ({"q": q[0]}, ValueError, r"q: expected \[B, rows, heads, 64\], got \[66, 4, 64\]"),
        ({"joint_rows": (5,)}, ValueError, r"joint_rows: expected None without joint, got \(5,\)"),
        ({"joint": (text, text, text), "joint_rows": (5.0,)}, TypeError, "joint_rows: .* got 5.0"),
    ):
        with pytest.raises(kind, match=told):
            module(**({"q": q, "k": k, "v": v} | change))
    assert module(q, k, v).shape == q.shape
    module.close()


def test_the_function_names_operands() -> None:
    q, k, v = operands(66)
    with pytest.raises(ValueError, match=r"k: expected \[B, rows, heads, D\], got \[66, 4, 64\]"):
        xstage_ext.ulysses_attention(q, k[0], v)
    with pytest.raises(TypeError, match="v: expected a tensor, got None"):
        xstage_ext.ulysses_attention(q, k, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("scale", ["a", True])
def test_scales_are_numbers(scale: Any) -> None:
    with pytest.raises(ValueError, match="scale: expected a positive finite number"):
        UlyssesAttention(4, 64, device="cpu", scale=scale)


def test_problems_of_attention_name_the_argument() -> None:
    for change, text in (
        ({"rows": None}, "rows: expected one number per rank, got None"),
        ({"rows": (9, 1.5)}, "rows: expected an integer, got 1.5"),
        ({"rows": (9, -9)}, r"rows: expected no negative number, got \(9, -9\)"),
        ({"kv_rows": (9, -9)}, r"kv_rows: expected no negative number, got \(9, -9\)"),
        ({"heads_per_rank": (9, -5)}, r"heads_per_rank: expected no negative .* \(9, -5\)"),
    ):
        with pytest.raises(PlanError, match=text):
            AttentionProblem(
                **({"heads": 4, "kv_heads": 4, "head_dim": 64, "rows": (9, 9)} | change)
            )
    assert AttentionProblem(4, 4, 64, np.array([9, 9])).rows == (9, 9)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "make",
    [
        lambda group: MegaMoE(**SMALL, device="cpu", group=group),
        lambda group: UlyssesAttention(4, 64, device="cpu", group=group),
        lambda group: xstage_ext.ulysses_attention(*operands(66), group=group),
    ],
)
def test_groups_without_torch_distributed_are_refused(make: Any) -> None:
    with pytest.raises(WorkspaceError, match="group: torch.distributed is not initialised, got 3"):
        make(3)


def test_under_a_fake_mode_results_are_fake() -> None:
    """torch's fake tensors tell no address, and the host page is read by address."""
    moe, ulysses = small_moe(), UlyssesAttention(4, 64, device="cpu")
    calls = ((moe, tokens()), (ulysses, tuple(torch.randn(3, 2, 66, 4, 64).bfloat16())))
    for module, arguments in calls:
        wanted = module(*arguments)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            result = module(*(mode.from_tensor(one) for one in arguments))
        assert isinstance(result, FakeTensor) and result.shape == wanted.shape
        assert torch.equal(module(*arguments), wanted)
        module.close()
