"""Every operator by name and schema.

Headers of torch before 2.13 drop a bad schema without a word: the library loads and the operator is
missing. tests/data/schemas.txt is the list that must be there. After an intended change:

    python tests/cpu/test_registration.py > tests/data/schemas.txt
"""

from __future__ import annotations

import pathlib
import re

import pytest
import torch

import xstage_ext
from xstage_ext import _binary

ROOT = pathlib.Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "data" / "schemas.txt"


def registered() -> list[str]:
    """Schemas that the loaded libraries registered, sorted."""
    schemas = torch._C._jit_get_all_schemas()
    return sorted(str(schema) for schema in schemas if schema.name.startswith("xstage::"))


def declared() -> set[str]:
    """Operator names that csrc/registration.cpp declares."""
    text = (ROOT / "csrc" / "registration.cpp").read_text()
    return set(re.findall(r'm\.def\(\s*"(\w+)\(', text))


def names(schemas: list[str]) -> set[str]:
    """Operator names of schemas."""
    return {schema.split("(")[0].removeprefix("xstage::") for schema in schemas}


def test_schemas_match_the_golden_list() -> None:
    assert xstage_ext.__version__
    assert registered() == GOLDEN.read_text().splitlines()


def test_every_declared_operator_is_registered() -> None:
    assert names(registered()) == declared()


def gpu_only(name: str) -> bool:
    """Operators that the kernel library alone implements: they measure or describe its kernels."""
    return name.startswith("burst_") or name in ("megamoe_instances", "megamoe_traced")


@pytest.mark.parametrize("name", sorted(declared()))
def test_operator_is_implemented(name: str) -> None:
    keys = ["CPU", "CompositeExplicitAutograd"]
    kernels_loaded = _binary.CUDA_LIBRARY_ERROR is None
    if gpu_only(name):
        keys.append("CUDA")
    has = [torch._C._dispatch_has_kernel_for_dispatch_key(f"xstage::{name}", key) for key in keys]
    assert any(has) == (kernels_loaded or not gpu_only(name))


if __name__ == "__main__":
    print("\n".join(registered()))
