"""Loads the compiled libraries, and checks that they speak the same wire format as this package."""

from __future__ import annotations

import pathlib

import torch

from . import _env
from .errors import BinaryError

CUDA_LIBRARY_ERROR: str | None = None
"""Why the kernel library is not loaded; None when it is."""


def _folder() -> pathlib.Path:
    override = _env.get("XSTAGE_LIB_DIR")
    return pathlib.Path(override) if override else pathlib.Path(__file__).parent


def load() -> None:
    """Load `_C` always, and the kernels where torch is a CUDA build."""
    global CUDA_LIBRARY_ERROR
    registration = _folder() / "_C.abi3.so"
    if not registration.is_file():
        raise BinaryError(f"{registration} is missing; run `pip install -e .` in the repository")
    torch.ops.load_library(str(registration))
    kernels = _folder() / "_cuda_sm90.abi3.so"
    if torch.version.cuda is None:
        CUDA_LIBRARY_ERROR = f"torch {torch.__version__} is a CPU build"
    elif not kernels.is_file():
        CUDA_LIBRARY_ERROR = f"{kernels} was not built; install nvcc and reinstall xstage_ext"
    else:
        torch.ops.load_library(str(kernels))


def wire_fields(kind: str) -> list[tuple[str, int, int, str]]:
    """(name, min, max, meaning) of every field of a wire message, as the binary defines it."""
    fields = []
    for line in torch.ops.xstage.plan_fields(kind).splitlines():
        name, low, high, meaning = line.split(" ", 3)
        fields.append((name, int(low), int(high), meaning))
    return fields
