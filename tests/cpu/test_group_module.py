"""Copies of prepared modules, and calls of modules whose memory was given back."""

from __future__ import annotations

import copy
import gc
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import torch

from tests.cpu.test_megamoe_module import small as small_moe
from tests.cpu.test_megamoe_module import tokens
from tests.cpu.test_ulysses import operands
from tests.cpu.test_ulysses import small as small_attention
from xstage_ext import MegaMoE, UlyssesAttention

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
