"""Which tests run here, and what all of them share.

The default run needs no GPU. Tests below tests/gpu and tests/dist carry their marker by their
folder, and skip with the reason where they cannot run.
"""

from __future__ import annotations

import os
import pathlib

if "PYTEST_XDIST_WORKER" in os.environ:
    # Several workers with a thread per core each would wait for one another most of the time.
    os.environ.setdefault("OMP_NUM_THREADS", "2")

import pytest
import torch

TESTS = pathlib.Path(__file__).parent
REPOSITORY = TESTS.parent


def why_no_gpu() -> str | None:
    """Why tests/gpu cannot run here; None when it can."""
    if torch.version.cuda is None:
        return f"needs a CUDA GPU: torch {torch.__version__} is a CPU build"
    if not torch.cuda.is_available():
        return "needs a CUDA GPU: none is visible"
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) != (9, 0):
        return f"needs compute capability 9.0: this GPU has {major}.{minor}"
    from xstage_ext import _binary

    if _binary.CUDA_LIBRARY_ERROR is not None:
        return f"needs the kernel library: {_binary.CUDA_LIBRARY_ERROR}"
    return None


def why_no_dist() -> str | None:
    """Why tests/dist cannot run here; None when it can."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return "needs ranks: run `torchrun --nproc-per-node 2 -m pytest tests/dist`"
    return why_no_gpu()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks tests by folder and skips what this machine cannot run."""
    reasons = {"gpu": why_no_gpu(), "dist": why_no_dist()}
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0]
        if folder not in reasons:
            continue
        item.add_marker(getattr(pytest.mark, folder))
        reason = reasons[folder]
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test starts from the same random state."""
    torch.manual_seed(20260)


@pytest.fixture(scope="session")
def level() -> int:
    """XSTAGE_TEST_LEVEL: 1 (default), 2 or 3 widens the sweeps."""
    return int(os.environ.get("XSTAGE_TEST_LEVEL", "1"))


@pytest.fixture(scope="session")
def repository() -> pathlib.Path:
    """Root of the repository."""
    return REPOSITORY
