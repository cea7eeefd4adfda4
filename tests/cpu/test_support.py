"""What is said about devices before anything is made."""

from __future__ import annotations

import pytest
import torch

import xstage_ext
from xstage_ext import AttentionProblem, MegaMoE, SymmetricWorkspace, UlyssesAttention
from xstage_ext.errors import PlanError

NONE_SEEN = "torch sees no CUDA GPU"


@pytest.fixture(params=["cuda", "cuda:0", 0, torch.device("cuda")])
def absent(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return request.param


def test_questions_about_an_absent_gpu_are_answered(absent) -> None:
    problem = AttentionProblem(4, 4, 64, (10, 10))
    assert not xstage_ext.is_supported(problem, absent)
    text = xstage_ext.explain(problem, absent)
    assert text.startswith("falls back: device cuda") and NONE_SEEN in text


def test_nothing_is_made_on_an_absent_gpu(absent) -> None:
    layer = {"num_experts": 4, "topk": 1, "hidden": 64, "intermediate": 64, "max_tokens": 1}
    makers = [
        lambda: UlyssesAttention(4, 64, device=absent),
        lambda: MegaMoE(**layer, device=absent),
        lambda: SymmetricWorkspace(None, 1 << 16, device=absent),
    ]
    for make in makers:
        with pytest.raises(PlanError, match=f"device cuda.*{NONE_SEEN}; device=.cpu. runs without"):
            make()


def test_more_ranks_than_the_kernels_connect_fall_back() -> None:
    problem = AttentionProblem(18, 9, 64, (10,) * 9)
    assert not xstage_ext.is_supported(problem, "cpu")
    assert "falls back: 9 ranks: the kernels connect up to 8" in xstage_ext.explain(problem, "cpu")


def test_what_is_no_problem_is_named() -> None:
    for ask in (xstage_ext.explain, xstage_ext.is_supported):
        with pytest.raises(TypeError, match=r"xstage: problem: expected .*MoEProblem.*, got None"):
            ask(None)


@pytest.mark.parametrize(
    "name", ["PlanError", "WorkspaceError", "PeerError", "PeerTimeout", "RoutingError"]
)
def test_errors_that_callers_catch_are_at_the_top(name: str) -> None:
    assert getattr(xstage_ext, name) is getattr(xstage_ext.errors, name)
    assert issubclass(getattr(xstage_ext, name), xstage_ext.XStageError)
