"""Loading the libraries: what is said when they are missing, too old, or built otherwise."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest
import torch

from xstage_ext import _binary
from xstage_ext.errors import BinaryError

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_floor_is_the_one_that_the_build_targets() -> None:
    sys.path.insert(0, str(ROOT / "tools"))
    import build_facts

    assert _binary.TORCH_FLOOR == build_facts.TORCH_FLOOR


@pytest.mark.parametrize("version", ["2.10.0", "2.9.1+cu128", "1.13.1"])
def test_an_old_torch_is_refused_with_both_versions(version: str) -> None:
    with pytest.raises(
        BinaryError,
        match=rf"built for torch 2\.11 or newer, found torch {version}".replace("+", r"\+"),
    ):
        _binary.check_torch(version)


@pytest.mark.parametrize("version", ["2.11.0+cu130", "2.13.0+cpu", "2.14.1", "3.0.0a0+git"])
def test_a_newer_torch_is_accepted(version: str) -> None:
    _binary.check_torch(version)


def test_kernels_of_another_cuda_major_are_named() -> None:
    text = "libcudart.so.12: cannot open shared object file: No such file or directory"
    assert _binary.explain_load_error(text, "13.0") == (
        "the kernels were built for CUDA 12, found torch built for CUDA 13.0; rebuild with "
        "`pip install -e .`"
    )
    assert "undefined symbol: x" in _binary.explain_load_error("undefined symbol: x", "13.0")


def test_kernels_are_left_out_beside_a_cpu_torch(tmp_path: pathlib.Path) -> None:
    reason = _binary.load_kernels(tmp_path / "_cuda_sm90.abi3.so", None)
    assert reason == f"torch {torch.__version__} is a CPU build"


def test_kernels_that_were_not_built_are_reported(tmp_path: pathlib.Path) -> None:
    reason = _binary.load_kernels(tmp_path / "_cuda_sm90.abi3.so", "13.0")
    assert reason is not None and "was not built" in reason


def test_a_broken_kernel_library_does_not_stop_the_import(tmp_path: pathlib.Path) -> None:
    broken = tmp_path / "_cuda_sm90.abi3.so"
    broken.write_bytes(b"not a library")
    reason = _binary.load_kernels(broken, "13.0")
    assert reason is not None and reason.startswith("the kernels do not load beside torch")


def import_with(folder: pathlib.Path) -> str:
    """Last line of stderr of `import xstage_ext` with the libraries in another folder."""
    done = subprocess.run(
        [sys.executable, "-c", "import xstage_ext"],
        env=os.environ | {"XSTAGE_LIB_DIR": str(folder), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    return done.stderr.strip().splitlines()[-1]


def test_missing_library_is_one_sentence(tmp_path: pathlib.Path) -> None:
    assert import_with(tmp_path) == (
        f"xstage_ext.errors.BinaryError: {tmp_path}/_C.abi3.so is missing; XSTAGE_LIB_DIR names "
        "that folder: rebuild into it, or unset the variable"
    )


def test_broken_library_is_one_sentence(tmp_path: pathlib.Path) -> None:
    (tmp_path / "_C.abi3.so").write_bytes(b"not a library")
    text = import_with(tmp_path)
    assert "does not load beside torch" in text and "rebuild" in text


def test_import_initialises_no_gpu_and_leaves_no_threads() -> None:
    code = (
        "import threading, torch, xstage_ext; "
        "assert not torch.cuda.is_initialized(); assert threading.active_count() == 1"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
