"""Copies of prepared modules, and calls of modules whose memory was given back."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pathlib
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch

from tests.cpu.test_megamoe_module import small as small_moe
from tests.cpu.test_megamoe_module import tokens
from tests.cpu.test_ulysses import operands
from tests.cpu.test_ulysses import small as small_attention
from tests.ranks import launch
from tests.ranks.moe import ROUNDED
from xstage_ext import MegaMoE, SymmetricWorkspace, UlyssesAttention
from xstage_ext._backends import LocalMemory
from xstage_ext.errors import PlanError, WorkspaceError

ROWS = 66


def prepared(kind: str, **options: Any) -> tuple[Any, tuple[torch.Tensor, ...]]:
    """A prepared module and what it is called with."""
    if kind == "moe":
        moe = small_moe(**options)
        moe.prepare()
        return moe, tokens()
    attention = small_attention(**options)
    attention.prepare(ROWS, batch=2)
    return attention, operands(ROWS)


def state_of(module: MegaMoE | UlyssesAttention) -> str | None:
    return module.impl if isinstance(module, MegaMoE) else module.path


@pytest.mark.parametrize("kind", ["moe", "attention"])
def test_a_deepcopy_has_memory_of_its_own(kind: str) -> None:
    module, given = prepared(kind, name="first")
    expected = module(*given).clone()
    clone = copy.deepcopy(module)
    assert state_of(clone) is None and state_of(module) is not None
    assert clone.name == "first"
    if kind == "moe":
        assert torch.equal(clone.w13, module.w13) and clone.w13 is not module.w13
        assert clone.plan == module.plan
    module.close()
    del module
    gc.collect()
    assert torch.equal(clone(*given), expected)
    assert state_of(clone) is not None
    clone.close()


_LOAD = """
import sys, torch, xstage_ext
module, given, expected = torch.load(sys.argv[1], weights_only=False)
state = module.impl if hasattr(module, "impl") else module.path
assert state is None, state
assert torch.equal(module(*given), expected)
"""


@pytest.mark.parametrize("kind", ["moe", "attention"])
def test_a_module_is_loaded_in_another_process(kind: str, tmp_path: pathlib.Path) -> None:
    module, given = prepared(kind)
    torch.save((module, given, module(*given)), tmp_path / "saved.pt")
    assert state_of(module) is not None
    loading = [sys.executable, "-c", _LOAD, str(tmp_path / "saved.pt")]
    done = subprocess.run(loading, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    module.close()


def test_a_module_that_rank_0_saved_serves_every_rank(tmp_path: pathlib.Path) -> None:
    for outcome in launch("attention.loaded_from_rank_0", 2, path=str(tmp_path / "saved.pt")):
        assert outcome.code == 0, str(outcome)


def test_a_layer_for_other_ranks_is_refused_when_prepared() -> None:
    moe = small_moe()
    moe.problem = dataclasses.replace(moe.problem, world=2)
    with pytest.raises(WorkspaceError, match="made for a group of 2 ranks, got one of 1"):
        moe.prepare()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_workspaces_and_leases_are_not_copied(copied: Any) -> None:
    with SymmetricWorkspace(nbytes=4096, device="cpu") as workspace:
        lease = workspace.channel("one", 1024)
        with pytest.raises(WorkspaceError, match="cannot be copied"):
            copied(workspace)
        if copied is not copy.copy:
            with pytest.raises(WorkspaceError, match="cannot be copied"):
                copied(lease)


# --- memory that was given back -----------------------------------------------------------------


@pytest.mark.parametrize("kind", ["moe", "attention"])
def test_modules_that_share_a_released_lease_end_too(kind: str) -> None:
    make = small_moe if kind == "moe" else small_attention
    owner, sharer, late, next_owner = (make(name=name) for name in ("a", "c", "late", "d"))
    rows = {} if kind == "moe" else {"rows": ROWS, "batch": 2}
    given = tokens() if kind == "moe" else operands(ROWS)
    size = owner.bytes(**rows) + 4096
    with SymmetricWorkspace(nbytes=size, device="cpu") as workspace:
        owner.prepare(**rows, workspace=workspace)
        sharer.prepare(**rows, share=owner)
        expected = sharer(*given).clone()
        owner.close()
        next_owner.prepare(**rows, workspace=workspace)  # the same channel and region
        for _ in range(2):
            with pytest.raises(WorkspaceError, match="channel 'a.*' was released"):
                sharer(*given)
            assert torch.equal(next_owner(*given), expected)  # nobody refused for it
        with pytest.raises(WorkspaceError):
            late.prepare(**rows, share=sharer)
            late(*given)
        sharer.close()
        sharer.prepare(**rows, share=next_owner)
        assert torch.equal(sharer(*given), expected)


def test_a_compiled_layer_that_shares_a_released_lease_raises() -> None:
    owner, sharer = small_moe(name="a"), small_moe(name="c")
    owner.prepare()
    sharer.prepare(share=owner)
    compiled = torch.compile(sharer, fullgraph=True, backend="eager")
    given = tokens()
    assert torch.equal(compiled(*given), sharer(*given))
    owner.close()
    with pytest.raises(Exception, match="was released"):
        compiled(*given)
    sharer.close()
    with pytest.raises(Exception, match="it is closed"):
        compiled(*given)


def test_a_released_lease_is_dead() -> None:
    with SymmetricWorkspace(nbytes=4096, device="cpu") as workspace:
        lease = workspace.channel("one", 1024)
        lease.release()
        for use in (lease.words, lease.region, lease.guard().__enter__):
            with pytest.raises(WorkspaceError, match="channel 'one' was released"):
                use()
        lease.refuse("nothing is told to those who have the channel now")
        workspace.check()
        lease.release()


# --- prepare that fails -------------------------------------------------------------------------


def test_a_prepare_that_failed_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    moe, given = small_moe(), tokens()
    with SymmetricWorkspace(nbytes=moe.bytes(), device="cpu") as workspace:
        with monkeypatch.context() as patch:
            patch.setattr(MegaMoE, "_launch", lambda *_: 1 // 0)
            with pytest.raises(ZeroDivisionError):
                moe.prepare(workspace)
        assert moe.impl is None
        moe.prepare(workspace)  # its channel was given back
        assert moe.impl == "native" and moe(*given).isfinite().all()
        moe.close()


def test_too_little_memory_in_one_process_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WorkspaceError, match=f"cannot allocate {1 << 60} bytes on cpu: "):
        LocalMemory(1, 1 << 60, torch.device("cpu"), "local")
    moe, given = small_moe(), tokens()
    expected = moe(*given)
    moe.close()
    with monkeypatch.context() as patch:
        patch.setattr(MegaMoE, "bytes", lambda _: 1 << 60)
        moe.prepare()
    assert moe.impl == "fallback" and "cannot allocate" in str(moe.fallback_reason)
    torch.testing.assert_close(moe(*given), expected, **ROUNDED)
    moe.close()
    moe.prepare()  # with memory again
    assert (moe.impl, moe.fallback_reason) == ("native", None)
    assert torch.equal(moe(*given), expected)
    moe.close()
    native = small_moe(impl="native")
    monkeypatch.setattr(MegaMoE, "bytes", lambda _: 1 << 60)
    with pytest.raises(PlanError, match="impl=native, but workspace: cannot allocate"):
        native.prepare()
