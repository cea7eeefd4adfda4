"""xstage_ext.MegaMoE: several processes over shared memory, fallback, sharing, errors."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

import xstage_ext
from tests.ranks import launch
from tests.ranks.moe import ROUNDED, SHAPE
from xstage_ext import MegaMoE, MoEProblem, convert_weights_, explain, is_supported, reference
from xstage_ext.errors import PlanError, WorkspaceError

SMALL = {"num_experts": 8, "topk": 2, "hidden": 128, "intermediate": 64, "max_tokens": 32}


def small(**options: object) -> MegaMoE:
    """A layer of this process alone, with weights."""
    moe = MegaMoE(**SMALL, device="cpu", **options)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    for weight in (moe.w13, moe.w2):
        weight.data.copy_(torch.randn(weight.shape, generator=generator) / weight.shape[-1] ** 0.5)
    return moe


def tokens(count: int = 32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, SMALL["hidden"], generator=generator).bfloat16()
    scores, ids = torch.rand(count, SMALL["num_experts"], generator=generator).topk(2)
    return x, ids, scores


# --- several processes --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("impl", "dispatch"), [("native", 0), ("native", 1), ("fallback", 0)], ids=str
)
def test_two_processes_equal_the_reference(impl: str, dispatch: int) -> None:
    counts, plan = [100, 0, 114, 150, 1], {"dispatch": dispatch}
    for outcome in launch("moe.calls", 2, counts=counts, impl=impl, plan=plan):
        assert outcome.code == 0, str(outcome)
        assert outcome.facts["impl"] == impl
        assert (outcome.facts["bytes"] > 0) == (impl == "native")


def test_native_and_fallback_agree() -> None:
    for outcome in launch("moe.both_impls", 3):
        assert outcome.code == 0, str(outcome)
        assert outcome.facts["reason"] == "impl=fallback"


def test_the_fallback_refuses_what_the_native_path_refuses() -> None:
    shape = {"num_experts": 8, "topk": 2, "hidden": 128, "intermediate": 64, "max_tokens": 9}
    layer = MegaMoE(**shape, impl="fallback")  # type: ignore[arg-type]
    torch.nn.init.zeros_(layer.w13), torch.nn.init.zeros_(layer.w2)
    x, ids, weights = torch.zeros(9, 128).bfloat16(), torch.zeros(9, 2).long(), torch.ones(9, 2)
    for arguments, text in (
        ((x[:, :64], ids, weights), r"x: expected \[9, 128\], got \[9, 64\]"),
        ((x, ids[:8], weights), r"topk_idx: expected \[9, 2\], got \[8, 2\]"),
        ((x, ids, torch.ones(9, 3)), r"topk_weights: expected \[9, 2\], got \[9, 3\]"),
        ((x.repeat(2, 1), ids.repeat(2, 1), weights.repeat(2, 1)), r"at most 9 .* got 18"),
    ):
        with pytest.raises(RuntimeError, match=text):
            layer(*arguments)
    out = torch.ones(9, 128, dtype=torch.bfloat16)
    for wrong, text in (
        (out.float(), r"out: expected torch.bfloat16 \[9, 128\], got torch.float32 \[9, 128\]"),
        (out[:8], r"out: expected torch.bfloat16 \[9, 128\], got torch.bfloat16 \[8, 128\]"),
        (out.repeat(2, 1), r"got torch.bfloat16 \[18, 128\]"),
        (out.repeat(1, 2)[:, ::2], "out: expected a contiguous tensor"),
    ):
        for num_tokens in (None, 9):
            with pytest.raises(RuntimeError, match=text):
                layer(x, ids, weights, num_tokens, wrong)
    assert layer(x, ids, weights, None, out) is out and not out.any()
    layer.close()
    with pytest.raises(WorkspaceError, match="it is closed"):
        layer(x, ids, weights)


def test_all_ranks_fall_back_together() -> None:
    for outcome in launch("moe.one_rank_falls_back", 2):
        assert outcome.code == 0, str(outcome)
        assert outcome.facts["impl"] == "fallback"
        by = "" if outcome.rank == 1 else "rank 1: "
        assert outcome.facts["reason"] == f"{by}XSTAGE_IMPL=fallback"


@pytest.mark.parametrize("impl", ["native", "fallback"])
def test_one_token_too_many_raises_everywhere_and_recovers(impl: str) -> None:
    first, second = launch("moe.too_many_tokens", 2, impl=impl)
    assert first.code == second.code == 0, f"{first}\n{second}"
    most = SHAPE["max_tokens"]
    assert first.facts["error"] == "RuntimeError"
    assert f"at most {most} " in first.facts["text"]
    assert f"got {most + 1}" in first.facts["text"]
    assert second.facts["error"] == "PeerError"
    assert f"got {most + 1}" in second.facts["text"]
    assert first.facts["recovered"] and second.facts["recovered"]


@pytest.mark.parametrize("impl", ["native", "fallback"])
def test_peers_hear_of_a_refused_dtype_and_number_of_tokens(impl: str) -> None:
    first, second = launch("moe.refused", 2, impl=impl, env={"XSTAGE_TIMEOUT_MS": "8000"})
    assert first.code == second.code == 0, f"{first}\n{second}"
    texts = "x: expected torch.bfloat16, got torch.float32", "num_tokens: expected 0 to 40"
    for own, heard, text, kind in zip(
        first.facts["heard"], second.facts["heard"], texts, ("TypeError", "ValueError"), strict=True
    ):
        assert own.startswith(kind) and text in own
        assert heard.startswith("PeerError") and text in heard


def test_a_rank_without_a_plan_is_named_by_all() -> None:
    for outcome in launch("moe.bad_table", 2):
        assert outcome.facts["error"] == "PlanError", str(outcome)
        said = "rank 1 has no plan: xstage: XSTAGE_PLANS: /nowhere.json: No such file or directory"
        assert said in outcome.facts["text"]


def test_a_dead_peer_is_named() -> None:
    first, _ = launch("moe.dead_peer", 2)
    assert first.code == 7, str(first)
    assert first.facts["error"] in ("PeerTimeout", "PeerError")
    assert "rank 1" in first.facts["text"] and "dispatch counts" in first.facts["text"]
    assert first.facts["seconds"] < 12


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("max_tokens", [150, 151]),
        ("clamp", [1.0, 2.0]),
        ("plan", [{"num_sms": 8}, {"num_sms": 6}]),
    ],
)
def test_ranks_that_disagree_are_told_the_field(field: str, values: list[object]) -> None:
    for outcome in launch("moe.disagree", 2, **{field: values}):
        assert outcome.code == 7, str(outcome)
        assert outcome.facts["error"] == "WorkspaceError"
        name = "num_sms" if field == "plan" else field
        assert f"ranks disagree in {name}: rank 0 has" in outcome.facts["text"]


def test_layers_share_the_memory_of_one() -> None:
    for outcome in launch("moe.shared_layers", 2, count=6):
        assert outcome.code == 0, str(outcome)
        assert outcome.facts["bytes"] < outcome.facts["one"] + 2048


def test_layers_of_one_name_called_in_another_order_are_told_apart() -> None:
    for outcome in launch("moe.other_order", 2, shared=True):
        assert outcome.code == 7, str(outcome)
        assert outcome.facts["error"] in ("WorkspaceError", "PeerError")
    assert "differ" in outcome.facts["text"]
    for outcome, channel in zip(
        launch("moe.other_order", 2, shared=False), ("megamoe", "megamoe (2)"), strict=True
    ):
        assert outcome.code == 7, str(outcome)
        assert f"(channel {channel!r}, call 2)" in outcome.facts["text"], str(outcome)


def test_layers_side_by_side_in_one_workspace() -> None:
    for outcome in launch("moe.two_channels", 2):
        assert outcome.code == 0, str(outcome)


@pytest.mark.parametrize(
    ("world", "groups"), [(4, [[0, 2], [1, 3]]), (3, [[0, 1]])], ids=["0,2 and 1,3", "0,1 of 3"]
)
def test_subgroups_then_world(world: int, groups: list[list[int]]) -> None:
    for outcome in launch("moe.subgroups", world, groups=groups, limit_s=120):
        assert outcome.code == 0, str(outcome)


# --- one process --------------------------------------------------------------------------------


def test_calls_and_bytes() -> None:
    moe = small(count_load=True)
    assert moe.bytes() == moe.plan.bytes() > 0  # type: ignore[union-attr]
    assert (moe.impl, moe.fallback_reason) == (None, None)
    moe.prepare()
    assert moe.impl == "native"
    x, ids, scores = tokens()
    y = moe(x, ids, scores)
    expected = reference.moe_reference(x, ids, scores, moe.w13, moe.w2, rounded=True)
    torch.testing.assert_close(y.float(), expected, **ROUNDED)
    assert torch.equal(moe.expert_load, torch.bincount(ids.flatten(), minlength=8))
    out = torch.empty_like(x)
    assert moe(x, ids, scores, out=out) is out and torch.equal(out, y)
    for impl_scores in (scores.double(), scores.float()):
        assert torch.equal(moe(x, ids, impl_scores), y)
    moe.close()
    moe.close()
    with pytest.raises(WorkspaceError, match="megamoe: it is closed"):
        moe(x, ids, scores)


@pytest.mark.parametrize("impl", ["native", "fallback"])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_num_tokens(impl: str, as_tensor: bool) -> None:
    moe = small(impl=impl)
    x, ids, scores = tokens()
    whole = moe(x, ids, scores)
    part = moe(x, ids, scores, num_tokens=torch.tensor([5]) if as_tensor else 5)
    torch.testing.assert_close(part[:5], whole[:5], rtol=2e-2, atol=2e-2)
    assert torch.equal(part[5:], torch.zeros_like(part[5:]))
    if impl == "native":
        assert torch.equal(part[:5], whole[:5])
    moe.close()


@pytest.mark.parametrize("impl", ["native", "fallback"])
def test_wrong_num_tokens_are_refused_by_name(impl: str) -> None:
    moe, given = small(impl=impl), tokens()
    for wrong in (-1, 33):
        with pytest.raises(ValueError, match=f"num_tokens: expected 0 to 32 .*, got {wrong}"):
            moe(*given, num_tokens=wrong)
    for other in (3.5, "3", torch.tensor(3.0), torch.tensor([3, 3])):
        with pytest.raises(TypeError, match="num_tokens: expected"):
            moe(*given, num_tokens=other)
    assert torch.equal(moe(*given, num_tokens=np.int64(3)), moe(*given, num_tokens=3))
    with pytest.raises(RuntimeError, match=r"out: expected torch.bfloat16 \[32, 128\], got"):
        moe(*given, num_tokens=3, out=torch.empty(10, 128, dtype=torch.bfloat16))
    moe.close()


@pytest.mark.parametrize("layout", ["gate_up", "up_gate", "interleaved"])
def test_weight_layouts(layout: str) -> None:
    moe = small()
    x, ids, scores = tokens()
    expected = moe(x, ids, scores)
    other = MegaMoE(**SMALL, device="cpu", weight_layout=layout)
    other.w2.data.copy_(moe.w2)
    other.w13.data.copy_(convert_weights_(moe.w13.clone(), "gate_up", layout))
    assert torch.equal(other(x, ids, scores), expected)
    back = convert_weights_(other.w13.data.clone(), layout, "gate_up")
    assert torch.equal(back, moe.w13)
    if layout != "gate_up":  # a swapped layout is another layer, not a small difference
        wrong = MegaMoE(**SMALL, device="cpu")
        wrong.load_state_dict(other.state_dict())
        assert float((wrong(x, ids, scores) - expected).abs().max()) > 0.1


def test_compile_fullgraph() -> None:
    moe = small()
    moe.prepare()
    x, ids, scores = tokens()
    compiled = torch.compile(moe, fullgraph=True, backend="aot_eager", dynamic=True)
    for count in (32, 31, 7, 0):
        given = x[:count], ids[:count], scores[:count]
        assert torch.equal(compiled(*given), moe(*given))
    moe.close()


def test_compile_before_prepare_is_refused() -> None:
    moe = small()
    with pytest.raises(Exception, match=r"prepare\(\) on every rank"):
        torch.compile(moe, fullgraph=True, backend="eager")(*tokens())


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({0: torch.Tensor.float}, "x: expected torch.bfloat16, got torch.float32"),
        ({0: torch.Tensor.half}, "x: expected torch.bfloat16, got torch.float16"),
        ({1: torch.Tensor.short}, "topk_idx: expected torch.int32 or torch.int64, got torch.int16"),
        ({1: torch.Tensor.float}, "topk_idx: expected torch.int32 or torch.int64"),
        ({2: torch.Tensor.int}, "topk_weights: expected a floating-point dtype, got torch.int32"),
        ({0: lambda t: t.clone().requires_grad_()}, "requires grad, and there is no backward"),
        ({2: lambda t: t.clone().requires_grad_()}, "requires grad, and there is no backward"),
    ],
)
def test_types_are_refused_by_name(change: dict[int, object], text: str) -> None:
    moe = small()
    given = [change.get(i, lambda t: t)(t) for i, t in enumerate(tokens())]  # type: ignore[operator]
    with pytest.raises(TypeError, match=text):
        moe(*given)
    with torch.no_grad():
        if "grad" in text:
            moe(*given)
    moe.close()


@pytest.mark.parametrize("impl", ["native", "fallback"])
def test_weights_that_require_grad_are_refused_where_a_graph_is_built(impl: str) -> None:
    moe, given = small(impl=impl), tokens()
    expected = moe(*given)
    moe.requires_grad_(True)
    with pytest.raises(TypeError, match="w13 and w2: requires grad, and there is no backward"):
        moe(*given)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(moe(*given), expected)
    moe.close()


# --- before anything is loaded ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"world": 3}, "num_experts: expected a multiple of world .3., got 8; the next is 9"),
        ({"world": 9}, "world: expected 1 to 8, got 9"),
        ({"hidden": 100}, "hidden: expected a multiple of 64 .*, got 100; .* to 128"),
        ({"intermediate": 10}, "intermediate: .*, got 10; .* to 64"),
        ({"topk": 17}, "topk: expected 1 to 16, got 17"),
        ({"num_experts": 1032}, "num_experts: expected 2 to 256, got 1032"),
        ({"tokens": 33}, "tokens: expected 0 to max_tokens .32., got 33"),
    ],
)
def test_problems_that_cannot_be_planned(change: dict[str, int], text: str) -> None:
    with pytest.raises(PlanError, match=text):
        MoEProblem(**({"world": 2, **SMALL} | change))


def test_explain_says_what_would_run() -> None:
    problem = MoEProblem(world=8, num_experts=128, topk=4, hidden=4096, intermediate=1536,
                         max_tokens=8192)  # fmt: skip
    assert is_supported(problem, "cpu")
    text = explain(problem, "cpu")
    assert "schedule" in text and "MB of workspace" in text and "predicted" in text
    with pytest.raises(TypeError, match="expected a problem of xstage_ext"):
        is_supported(object(), "cpu")  # type: ignore[arg-type]


@pytest.mark.parametrize("capability", [(8, 0), (10, 0), (12, 0)])
def test_other_gpus_are_named(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Some GPU")
    problem = MoEProblem(world=1, **SMALL)
    assert not is_supported(problem, "cuda:0")
    text = explain(problem, "cuda:0")
    assert text.startswith("falls back: Some GPU has compute capability")
    assert f"{capability[0]}.{capability[1]}" in text
    with pytest.raises(PlanError, match="compute capability"):
        MegaMoE(**SMALL, device="cuda:0", impl="native")


def test_impl_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="impl: expected one of"):
        MegaMoE(**SMALL, device="cpu", impl="fast")
    monkeypatch.setenv("XSTAGE_IMPL", "fallback")
    moe = MegaMoE(**SMALL, device="cpu", impl="native")
    moe.prepare()
    assert (moe.impl, moe.fallback_reason) == ("fallback", "XSTAGE_IMPL=fallback")
    assert moe.bytes() == 0


def test_plan_fields_can_be_given() -> None:
    moe = small(plan={"schedule": 1, "lead_blocks": 7, "num_sms": 10})
    assert moe.plan is not None
    given = moe.plan.schedule, moe.plan.lead_blocks, moe.plan.num_sms
    assert given == (1, 7, 10)
    assert moe.plan.h_ring_blocks >= 7 + 2 * moe.plan.group_blocks
    with pytest.raises(PlanError, match="leed_blocks: not a field of MegaMoePlan"):
        small(plan={"leed_blocks": 7})
    with pytest.raises(PlanError, match="num_sms: expected a multiple of 2"):
        small(plan={"num_sms": 9, "cluster_size": 2})


@pytest.mark.parametrize(
    ("field", "value"),
    [("block_m", 0), ("block_n", 0), ("cluster_size", 0), ("num_sms", None), ("dispatch", 0.5),
     ("schedule", "1"), ("lead_blocks", -1)],
)  # fmt: skip
def test_values_of_plan_fields_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(PlanError, match=f"{field}: expected .*, got {value!r}"):
        small(plan={field: value})


@pytest.mark.parametrize(
    "field",
    ["world", "num_experts", "topk", "hidden", "intermediate", "max_tokens", "weight_layout"],
)
def test_a_plan_cannot_contradict_the_layer(field: str) -> None:
    with pytest.raises(PlanError, match=f"{field}: says what the layer is"):
        small(plan={field: 1})


def test_shared_layers_need_one_plan() -> None:
    first, other = small(), small(name="other", plan={"num_sms": 8})
    first.prepare()
    with pytest.raises(WorkspaceError, match="share: expected a prepared layer of the same plan"):
        other.prepare(share=first)
    first.close()


def test_public_names() -> None:
    for name in ("MegaMoE", "SymmetricWorkspace", "is_supported", "explain", "errors"):
        assert hasattr(xstage_ext, name)
    assert dataclasses.is_dataclass(MoEProblem)
