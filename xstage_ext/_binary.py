"""Loads the compiled libraries, and checks that they speak the same wire format as this package."""

from __future__ import annotations

import functools
import pathlib
import re
import sys

import torch

from . import _env
from .errors import BinaryError

TORCH_FLOOR = (2, 11)
"""The oldest torch that the libraries load under (TORCH_TARGET_VERSION of the build)."""

CUDA_LIBRARY_ERROR: str | None = None
"""Why the kernel library is not loaded; None when it is."""


def library_folder() -> pathlib.Path:
    """Where the libraries are: XSTAGE_LIB_DIR, else this package's folder."""
    override = _env.get("XSTAGE_LIB_DIR")
    return pathlib.Path(override) if override else pathlib.Path(__file__).parent


def _remedy() -> str:
    if _env.get("XSTAGE_LIB_DIR") is None:
        return "run `pip install -e .` in the repository"
    return "XSTAGE_LIB_DIR names that folder: rebuild into it, or unset the variable"


def asked_by_command() -> bool:
    """Whether the `xstage` command imports the package: its errors are one line, no traceback."""
    running = pathlib.Path(sys.argv[0]).name if sys.argv else ""
    names = ("xstage_ext", "xstage_ext.cli")
    words = {*names, *(f"-m{name}" for name in names)}
    return running == "xstage" or (running == "-m" and not words.isdisjoint(sys.orig_argv))


def load() -> None:
    """Loads `_C` always, and the kernels where torch is a CUDA build.

    Raises
    ------
    BinaryError
        torch is too old, or `_C` is missing or does not load. A kernel library that does not load
        is no error here: the CPU path and the planner work without it. CUDA_LIBRARY_ERROR says why.
    """
    global CUDA_LIBRARY_ERROR
    check_torch(torch.__version__)
    registration = library_folder() / "_C.abi3.so"
    if not registration.is_file():
        raise BinaryError(f"{registration} is missing; {_remedy()}")
    try:
        torch.ops.load_library(str(registration))
    except OSError as error:
        raise BinaryError(
            f"{registration} does not load beside torch {torch.__version__}: {error}; {_remedy()}"
        ) from error
    CUDA_LIBRARY_ERROR = load_kernels(library_folder() / "_cuda_sm90.abi3.so", torch.version.cuda)


def check_torch(version: str) -> None:
    """Refuses a torch that lacks symbols which the libraries need."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    found = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
    if found < TORCH_FLOOR:
        raise BinaryError(
            f"xstage_ext was built for torch {TORCH_FLOOR[0]}.{TORCH_FLOOR[1]} or newer, found "
            f"torch {version}; run `pip install -U torch`"
        )


def load_kernels(path: pathlib.Path, torch_cuda: str | None) -> str | None:
    """Loads the kernel library; returns why not, or None."""
    if torch_cuda is None:
        return f"torch {torch.__version__} is a CPU build"
    if not path.is_file():
        return f"{path} was not built; install nvcc and reinstall xstage_ext"
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        return explain_load_error(str(error), torch_cuda)
    return None


def explain_load_error(text: str, torch_cuda: str) -> str:
    """A loader's message in words: another CUDA major is the usual cause."""
    runtime = re.search(r"libcudart\.so\.(\d+)", text)
    if runtime is not None and runtime[1] != torch_cuda.split(".")[0]:
        return (
            f"the kernels were built for CUDA {runtime[1]}, found torch built for CUDA "
            f"{torch_cuda}; rebuild with `pip install -e .`"
        )
    return f"the kernels do not load beside torch {torch.__version__}: {text}"


@functools.cache
def wire_fields(kind: str) -> tuple[tuple[str, int, int, str], ...]:
    """(name, min, max, meaning) of every field of a wire message, as the binary defines it."""
    fields = []
    for line in torch.ops.xstage.plan_fields(kind).splitlines():
        name, low, high, meaning = line.split(" ", 3)
        fields.append((name, int(low), int(high), meaning))
    return tuple(fields)
