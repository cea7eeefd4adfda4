"""Arguments of the megamoe ops: what is accepted, and how the rest is refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.virtual_moe import Layer, batch, plan_of


class Single:
    """One rank, world 1, by the plain op."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        x, ids, scores = batch(layer.plan, [40])
        self.arguments = {
            "x": x[0], "topk_idx": ids[0], "topk_weights": scores[0], "w13": layer.w13,
            "w2": layer.w2, "plan": layer.plan.words(),
        }  # fmt: skip

    def __call__(self, **changes: object) -> torch.Tensor:
        arguments = {**self.arguments, "workspace": self.layer.lease.words(), **changes}
        y: torch.Tensor = torch.ops.xstage.megamoe(**arguments)
        return y


@pytest.fixture
def single() -> Iterator[Single]:
    layer = Layer.make(plan_of(1))
    yield Single(layer)
    layer.workspace.close()


def test_out_and_num_tokens(single: Single) -> None:
    expected = single()
    out = torch.full_like(expected, float("nan"))
    torch.ops.xstage.megamoe_out(out, **single.arguments, workspace=single.layer.lease.words())
    assert torch.equal(out, expected)
    for dtype in (torch.int32, torch.int64):
        part = single(num_tokens=torch.tensor([13], dtype=dtype))
        assert torch.equal(part[:13], expected[:13])
        assert torch.equal(part[13:], torch.zeros_like(part[13:]))


def test_expert_load_counts_rows(single: Single) -> None:
    load = torch.zeros(4, dtype=torch.int64)
    single(expert_load=load)
    single(expert_load=load)
    assert torch.equal(
        load, 2 * torch.bincount(single.arguments["topk_idx"].flatten(), minlength=4)
    )


def test_strided_tokens_and_both_index_types(single: Single) -> None:
    expected = single()
    x, ids, scores = (single.arguments[name] for name in ("x", "topk_idx", "topk_weights"))
    for change in [
        {"x": x.T.contiguous().T},
        {"x": torch.cat([x, x], 1)[:, : x.shape[1]]},
        {"topk_idx": ids.int()},
        {"topk_idx": ids.T.contiguous().T, "topk_weights": scores.T.contiguous().T},
    ]:
        assert torch.equal(single(**change), expected)


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("x", lambda t: t[:, :64], r"x: expected shape \[\*, 192\], got \[40, 64\]"),
        ("x", lambda t: t.float(), "x: expected bfloat16, got float32"),
        ("x", lambda t: t.repeat(8, 1), "at most 300 tokens .max_tokens of the plan., got 320"),
        ("topk_idx", lambda t: t[:, 0], r"topk_idx: expected shape \[40, 2\], got \[40\]"),
        ("topk_idx", lambda t: t.short(), "topk_idx: expected int32 or int64"),
        ("topk_weights", lambda t: t[:, :1], r"topk_weights: expected shape \[40, 2\]"),
        ("topk_weights", lambda t: t.bfloat16(), "topk_weights: expected float32, got bfloat16"),
        ("w13", lambda t: t[:2], r"w13: expected shape \[4, 128, 192\], got \[2, 128, 192\]"),
        ("w13", lambda t: t.half(), "w13: expected bfloat16, got float16"),
        ("w2", lambda t: t.transpose(1, 2).contiguous().transpose(1, 2), "w2: expected a contig"),
    ],
)
def test_arguments_are_refused_by_name(
    single: Single, name: str, change: object, text: str
) -> None:
    with pytest.raises(RuntimeError, match=text):
        single(**{name: change(single.arguments[name])})  # type: ignore[operator]
    single()  # nothing was left behind


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"clamp": 0.0}, "clamp: expected a positive number, got 0"),
        ({"clamp": float("nan")}, "clamp: expected a positive number"),
        ({"num_tokens": torch.zeros(2, dtype=torch.int32)}, "num_tokens: expected one element"),
        ({"num_tokens": torch.zeros(1)}, "num_tokens: expected int32 or int64"),
        ({"expert_load": torch.zeros(4, dtype=torch.int32)}, "expert_load: expected int64"),
        ({"plan": plan_of(2).words()}, "plan: expected world 1 like the workspace, got 2"),
        ({"plan": plan_of(1, max_tokens=9000).words()}, "needs .* bytes of its channel's region"),
    ],
)
def test_options_are_refused_by_name(single: Single, changes: dict[str, object], text: str) -> None:
    with pytest.raises(RuntimeError, match=text):
        single(**changes)


# --- torch.compile ------------------------------------------------------------------------------


def test_opcheck(single: Single) -> None:
    arguments = {**single.arguments, "workspace": single.layer.lease.words()}
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    ops = torch.ops.xstage
    load = torch.zeros(4, dtype=torch.int64)
    torch.library.opcheck(ops.megamoe.default, (), arguments, test_utils=tests)
    torch.library.opcheck(
        ops.megamoe.default, (), {**arguments, "expert_load": load, "clamp": 3.0}, test_utils=tests
    )
    out = torch.empty_like(single.arguments["x"])
    torch.library.opcheck(ops.megamoe_out.default, (out,), arguments, test_utils=tests)
    lists = {k: [arguments[k]] for k in ("x", "topk_idx", "topk_weights", "w13", "w2")}
    torch.library.opcheck(
        ops.megamoe_virtual.default,
        (),
        {**lists, "plan": arguments["plan"], "workspaces": arguments["workspace"]},
        test_utils=tests,
    )
