"""`UlyssesAttention` as users meet it: one process, several processes, refusals, fallbacks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import xstage_ext
from tests.ranks import Outcome, launch
from xstage_ext import AttentionProblem, UlyssesAttention
from xstage_ext import reference_attention as reference
from xstage_ext.errors import PlanError, WorkspaceError
from xstage_ext.key_segments import segments_from_lengths

CLOSE = {"rtol": 1e-2, "atol": 1e-2}


def operands(
    rows: int = 66, heads: int = 4, kv_heads: int = 4, head_dim: int = 64, batch: int = 2
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q = torch.randn(batch, rows, heads, head_dim).bfloat16()
    k, v = torch.randn(2, batch, rows, kv_heads, head_dim).bfloat16()
    return q, k, v


def small(**options: Any) -> UlyssesAttention:
    return UlyssesAttention(
        options.pop("heads", 4), options.pop("head_dim", 64), device="cpu", **options
    )


def assert_all_done(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        assert outcome.code == 0, str(outcome)


# --- several processes ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world", "totals", "heads", "kv_heads", "causal", "impl"),
    [
        (2, [1025, 64, 1, 333], 4, 4, False, "fa3"),
        (2, [130, 77], 28, 7, True, "fa4"),
        (4, [90, 3], 6, 2, True, "fa3"),
        (3, [101], 4, 1, False, "torch"),
        (9, [20], 4, 2, True, "torch"),
    ],
)
def test_processes_equal_the_reference(world, totals, heads, kv_heads, causal, impl) -> None:
    shape = {"totals": totals, "heads": heads, "kv_heads": kv_heads, "causal": causal}
    outcomes = launch("attention.calls", world, impl=impl, backend="gloo", limit_s=120, **shape)
    assert_all_done(outcomes)
    for outcome in outcomes:
        assert outcome.facts["path"] == ("torch" if impl == "torch" else "fused")
        assert outcome.facts["reason"] == ("impl=torch" if impl == "torch" else None)


def test_paths_agree_with_joint_text_and_padding() -> None:
    assert_all_done(launch("attention.paths_agree", 2))


def test_subgroups_beside_world() -> None:
    assert_all_done(launch("attention.functional", 4, limit_s=120))


def test_exchange_with_changing_plans() -> None:
    assert_all_done(launch("attention.exchanges", 3, count=12))


def test_all_ranks_fall_back_together() -> None:
    outcomes = launch("attention.one_rank_falls_back", 2)
    assert_all_done(outcomes)
    assert [outcome.facts["path"] for outcome in outcomes] == ["torch", "torch"]
    assert outcomes[0].facts["reason"] == "rank 1: XSTAGE_IMPL=fallback"


@pytest.mark.parametrize("prepared", [False, True])
def test_other_lengths_than_assumed_are_told(prepared: bool) -> None:
    outcomes = launch("attention.other_lengths", 2, prepared=prepared)
    for outcome in outcomes:
        assert outcome.code == 7, str(outcome)
        assert outcome.facts["error"] in ("WorkspaceError", "PeerError"), str(outcome)
    texts = " ".join(outcome.facts["text"] for outcome in outcomes)
    assert ("(500, 500)" in texts and "(525, 525)" in texts) or "differ" in texts, texts


def test_an_error_that_is_kept_holds_no_slot() -> None:
    """Its traceback has the frames of the failed call, but not their tensors."""
    outcomes = launch("attention.recovery_with_the_error_at_hand", 2)
    assert_all_done(outcomes)
    for outcome in outcomes:
        assert outcome.facts["error"] in ("WorkspaceError", "PeerError"), str(outcome)


def test_a_refused_call_raises_everywhere_and_recovers() -> None:
    first, second = launch("attention.refused_call", 2)
    assert first.code == second.code == 0, f"{first}\n{second}"
    assert first.facts["error"] == "ValueError"
    assert "expected [1, 50, 4, 64] on rank 0 of 2" in first.facts["text"]
    assert second.facts["error"] == "PeerError"
    assert first.facts["recovered"] and second.facts["recovered"]


def test_a_dead_peer_is_named() -> None:
    first, _ = launch("attention.dead_peer", 2)
    assert first.code == 7, str(first)
    assert first.facts["error"] in ("PeerTimeout", "PeerError")
    assert "rank 1" in first.facts["text"]
    assert first.facts["seconds"] < 12


@pytest.mark.parametrize(
    ("field", "values"),
    [("heads", [4, 8]), ("head_dim", [64, 128]), ("causal", [False, True]), ("scale", [None, 0.5])],
)
def test_ranks_that_disagree_are_told_the_field(field: str, values: list[object]) -> None:
    for outcome in launch("attention.disagree", 2, **{field: values}):
        assert outcome.code == 7, str(outcome)
        assert outcome.facts["error"] == "WorkspaceError"
        assert field in outcome.facts["text"] and "rank 1 has" in outcome.facts["text"]


# --- one process ----------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("impl", ["fa3", "torch"])
def test_one_rank_is_local_attention(batch: int, causal: bool, impl: str) -> None:
    q, k, v = operands(kv_heads=2, batch=batch)
    module = small(kv_heads=2, causal=causal, impl=impl)
    expected, _ = reference.attention(q, k, v, causal=causal)
    torch.testing.assert_close(module(q, k, v).float(), expected, **CLOSE)
    module.close()


@pytest.mark.parametrize("impl", ["fa3", "torch"])
def test_masks_and_scale(impl: str) -> None:
    q, k, v = operands()
    lengths = torch.tensor([31, 66])
    mask = torch.arange(66) < lengths[:, None]
    module = small(impl=impl, scale=0.2)
    segments = segments_from_lengths(lengths)
    expected, _ = reference.attention(q, k, v, segments, scale=0.2)
    k, v = (t.masked_fill(~mask[:, :, None, None], torch.nan) for t in (k, v))
    by_mask = module(q, k, v, key_mask=mask).clone()
    torch.testing.assert_close(by_mask.float(), expected, **CLOSE)
    assert torch.equal(module(q, k, v, key_segments=segments), by_mask)
    module.close()


@pytest.mark.parametrize("head_dim", [32, 40, 64, 72, 80, 96, 128, 192, 256])
def test_any_head_size_on_the_cpu(head_dim: int) -> None:
    q, k, v = operands(rows=20, head_dim=head_dim)
    module = small(head_dim=head_dim)
    expected, _ = reference.attention(q, k, v)
    torch.testing.assert_close(module(q, k, v).float(), expected, **CLOSE)
    module.close()


def test_closed_modules_refuse_calls_until_prepared_again() -> None:
    q, k, v = operands()
    module = small()
    module(q, k, v)
    module.close()
    with pytest.raises(WorkspaceError, match="ulysses: it is closed"):
        module(q, k, v)
    module.prepare(66, batch=2)
    expected, _ = reference.attention(q, k, v)
    torch.testing.assert_close(module(q, k, v).float(), expected, **CLOSE)
    module.close()


def test_out_and_lse() -> None:
    q, k, v = operands()
    module = small()
    expected, expected_lse = reference.attention(q, k, v)
    out = torch.empty_like(q)
    for _ in range(5):
        result, lse = module(q, k, v, out=out, return_lse=True)
        assert result is out
    torch.testing.assert_close(out.float(), expected, **CLOSE)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-4, atol=1e-4)
    module.close()


def test_held_results_are_an_error_with_numbers() -> None:
    q, k, v = operands()
    module = small(slots=3)
    kept = [module(q, k, v) for _ in range(3)]
    assert all(torch.equal(kept[0], other) for other in kept)
    with pytest.raises(RuntimeError, match="3 of 3 slots hold live results"):
        module(q, k, v)
    kept.clear()
    module(q, k, v)
    module.close()


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compile_fullgraph(backend: str) -> None:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = small(heads=4)
            self.out = torch.nn.Linear(256, 256, dtype=torch.bfloat16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = x.unflatten(-1, (3, 4, 64)).unbind(2)
            return self.out(self.attention(q, k, v).flatten(2))

    block = Block()
    x = torch.randn(2, 66, 768).bfloat16()
    with torch.inference_mode():
        eager = block(x)
        compiled = torch.compile(block, fullgraph=True, backend=backend)
        for _ in range(3):
            torch.testing.assert_close(compiled(x), eager, rtol=0.02, atol=0.02)
    block.attention.close()


def test_compile_keeps_up_with_head_sizes() -> None:
    """The second size makes the dimension a symbol of the compiler's."""
    for size in (64, 128, 32):
        module = UlyssesAttention(4, size, device="cpu")
        module.prepare(66, batch=2)
        q, k, v = torch.randn(3, 2, 66, 4, size).bfloat16()
        wanted = module(q, k, v)
        assert torch.equal(torch.compile(module, fullgraph=True, backend="eager")(q, k, v), wanted)
        module.close()


def test_compile_before_the_first_call_is_refused() -> None:
    module = small()
    with pytest.raises(Exception, match=r"prepare\(\) and then the module once"):
        torch.compile(module, fullgraph=True, backend="eager")(*operands())


def test_autocast_and_inference_mode() -> None:
    q, k, v = operands()
    module = small()
    expected = module(q, k, v).clone()
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(module(q, k, v), expected)
    module.close()


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        ({"q": torch.zeros(2, 66, 4, 64)}, TypeError, "q: expected torch.bfloat16"),
        ({"q": torch.zeros(2, 66, 4, 32)}, ValueError, r"expected \[B, rows, heads, 64\]"),
        ({"k": torch.zeros(2, 66, 3, 64).bfloat16()}, ValueError, "4 query and 4 key heads"),
        ({"attn_mask": torch.zeros(66, 66)}, NotImplementedError, "key_mask"),
        ({"dropout_p": 0.1}, NotImplementedError, "dropout_p: expected 0, got 0.1"),
        ({"rows": (66, 66)}, ValueError, "one length for each of 1 ranks"),
        ({"rows": 65}, ValueError, r"expected \[2, 65, 4, 64\]"),
        ({"key_mask": torch.zeros(2, 1, 66, 66)}, TypeError, r"expected bool \[B, Sk\]"),
        ({"key_mask": torch.ones(2, 5, dtype=torch.bool)}, ValueError, r"got \[2, 5\]"),
        (
            {"out": torch.zeros(3, 2, 66, 4, 64)},
            ValueError,
            r"out: expected torch.bfloat16",
        ),
    ],
)
def test_refused_by_name_and_the_next_call_works(change, kind, text) -> None:
    module = small()
    names = dict(zip("qkv", operands(), strict=True))
    with pytest.raises(kind, match=text):
        module(**(names | change))
    assert module(**names).shape == (2, 66, 4, 64)
    module.close()


def test_no_backward() -> None:
    q, k, v = operands()
    module = small()
    with pytest.raises(NotImplementedError, match="no backward"):
        module(q.requires_grad_(), k, v)
    with torch.no_grad():
        module(q, k, v)
    module.close()


def test_larger_than_prepared() -> None:
    module = small()
    module.prepare(50, batch=2)
    with pytest.raises(WorkspaceError, match=r"prepared are .*; prepare\(\) for the largest"):
        module(*operands(rows=66))
    module.prepare(66, batch=2)
    assert module(*operands(rows=66)).shape == (2, 66, 4, 64)
    module.close()


def test_bytes_before_anything() -> None:
    module = small(slots=2)
    assert module.bytes(1000, batch=2) >= 2 * 2 * 1000 * 4 * 64 * 2
    module.prepare(1000, batch=2)
    assert module._memory.workspace is not None
    assert module._memory.workspace.nbytes == module.bytes(1000, batch=2)
    module.close()


def test_layers_share_memory() -> None:
    q, k, v = operands()
    first, second = small(), small(causal=True, name="second")
    first.prepare(66, batch=2)
    second.prepare(66, batch=2, share=first)
    for module in (first, second, first):
        expected, _ = reference.attention(q, k, v, causal=module.causal)
        torch.testing.assert_close(module(q, k, v).float(), expected, **CLOSE)
    third = small(heads=8)
    with pytest.raises(WorkspaceError, match="prepare it for the largest|for the largest shape"):
        third.prepare(66, batch=2, share=first)
    first.close()


def test_modules_of_one_name_called_in_another_order_are_told_apart() -> None:
    for outcome in launch("attention.other_order", 2):
        assert outcome.facts["error"] in ("WorkspaceError", "PeerError"), str(outcome)
        assert "made different calls" in outcome.facts["text"] or "gave up" in outcome.facts["text"]


def test_impl_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="impl: expected one of"):
        small(impl="fa2")
    monkeypatch.setenv("XSTAGE_IMPL", "fallback")
    module = small()
    module(*operands())
    assert (module.path, module.fallback_reason) == ("torch", "XSTAGE_IMPL=fallback")
    monkeypatch.setenv("XSTAGE_IMPL", "both")
    with pytest.raises(ValueError, match="expected native or fallback"):
        small()


@pytest.mark.parametrize("capability", [(8, 0), (10, 0), (12, 0)])
def test_other_gpus_are_named(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Some GPU")
    problem = AttentionProblem(8, 8, 128, (100, 100))
    assert not xstage_ext.is_supported(problem, "cuda:0")
    major, minor = capability
    assert f"compute capability {major}.{minor}" in xstage_ext.explain(problem, "cuda:0")
    with pytest.raises(PlanError, match=f"{major}.{minor}"):
        UlyssesAttention(8, 128, device="cuda:0", impl="fa3")


@pytest.mark.parametrize("head_dim", [32, 72, 96, 256])
def test_head_sizes_of_the_kernels_are_listed(
    monkeypatch: pytest.MonkeyPatch, head_dim: int
) -> None:
    monkeypatch.setattr("xstage_ext._attention_setup.device_reason", lambda device: None)
    problem = AttentionProblem(8, 8, head_dim, (100, 100))
    text = xstage_ext.explain(problem, "cuda:0")
    assert f"head_dim {head_dim}: the kernels are compiled for 64 and 128" in text


def test_explain_on_the_cpu() -> None:
    text = xstage_ext.explain(AttentionProblem(8, 2, 128, (100, 101)), "cpu")
    assert text.startswith("runs natively") and "MB of workspace" in text
    assert "on the CPU, slow and exact; all that follows is of GPUs" in text
    odd = xstage_ext.explain(AttentionProblem(8, 2, 96, (100, 101)), "cpu")
    assert "GPUs have no kernel for head size 96" in odd and "piggyback" not in odd
    with pytest.raises(PlanError, match=r"rows: expected one number per rank, got 75600"):
        AttentionProblem(8, 2, 128, 75600)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"kv_heads": 3}, r"kv_heads: expected a divisor of 8 heads, got 3 \(2 ranks share"),
        ({"rows": ()}, "rows: expected the lengths of at least one rank"),
        ({"kv_rows": (1, 2, 3)}, "kv_rows: expected 2 ranks"),
        ({"heads_per_rank": (1, 2)}, "heads_per_rank: expected a sum of 8"),
        ({"generation": "fa5"}, "generation: expected fa3 or fa4"),
    ],
)
def test_problems_without_a_plan(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(PlanError, match=text):
        AttentionProblem(**({"heads": 8, "kv_heads": 8, "head_dim": 64, "rows": (9, 9)} | fields))
