"""Facts that a build needs, for CMake: torch headers; CUTLASS headers; TORCH_TARGET_VERSION."""

from __future__ import annotations

import importlib.util
import os
import pathlib

TORCH_TARGET_VERSION = "0x020b000000000000"  # 2.11, the oldest torch that the binaries load under


def package_dir(name: str) -> pathlib.Path | None:
    """Folder of an installed package, without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        return None
    return pathlib.Path(next(iter(spec.submodule_search_locations)))


def torch_include() -> pathlib.Path:
    """torch's header folder; only the stable headers below it are used."""
    root = package_dir("torch")
    if root is None:
        raise SystemExit("xstage build: torch is not installed; run `pip install torch` first")
    return root / "include"


def cutlass_include() -> pathlib.Path:
    """CUTLASS and CuTe headers: XSTAGE_CUTLASS, else the nvidia-cutlass package."""
    override = os.environ.get("XSTAGE_CUTLASS")
    if override:
        candidate = pathlib.Path(override)
        if (candidate / "include" / "cute").is_dir():
            candidate = candidate / "include"
    else:
        root = package_dir("cutlass_library")
        if root is None:
            raise SystemExit(
                "xstage build: CUTLASS headers not found; run `pip install nvidia-cutlass` "
                "or set XSTAGE_CUTLASS to a CUTLASS checkout"
            )
        candidate = root / "source" / "include"
    if not (candidate / "cute" / "tensor.hpp").is_file():
        raise SystemExit(f"xstage build: no cute/tensor.hpp below {candidate}")
    return candidate


if __name__ == "__main__":
    print(";".join([str(torch_include()), str(cutlass_include()), TORCH_TARGET_VERSION]), end="")
