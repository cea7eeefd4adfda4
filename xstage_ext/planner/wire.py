"""Wire messages: how plans travel to C++ (csrc/common/wire.h).

    [magic, kind, version, n, field_0, ..., field_{n-1}]

C++ owns the field lists. A Python plan is a frozen dataclass of integers whose fields have the same
names in the same order; `verify` compares the two when the package is imported.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

from .. import _binary
from ..errors import BinaryError, PlanError

MAGIC = 0x58535447
VERSION = 1
KINDS = {"megamoe": 1, "attention": 2, "workspace": 3, "burst": 4, "burst_loop": 5}


def verify(kind: str, plan: type[Any]) -> None:
    """Compare a plan dataclass with the field list of the binary.

    Raises
    ------
    BinaryError
        Names the fields that differ.
    """
    ours = [field.name for field in dataclasses.fields(plan)]
    theirs = [name for name, *_ in _binary.wire_fields(kind)]
    if ours != theirs:
        differ = [f"{a} != {b}" for a, b in zip(ours, theirs, strict=False) if a != b]
        differ += ours[len(theirs) :] + theirs[len(ours) :]
        raise BinaryError(
            f"xstage: {kind} plan: the Python package and the binary differ in: "
            f"{', '.join(differ)}; reinstall xstage_ext"
        )


def pack(kind: str, plan: Any) -> list[int]:
    """The wire message of a plan.

    Raises
    ------
    PlanError
        A field is no integer of the range that the binary accepts; the text names it.
    """
    values = {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)}
    check(kind, values)
    words = [int(value) for value in values.values()]
    return [MAGIC, KINDS[kind], VERSION, len(words), *words]


def check(kind: str, values: Mapping[str, object]) -> None:
    """Raise PlanError unless every named field is an integer that the binary accepts."""
    for name, low, high, meaning in _binary.wire_fields(kind):
        value = values.get(name, low)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise PlanError(
                f"xstage: {kind} plan: {name}: expected an integer from {low} to {high} "
                f"({meaning}), got {value!r}"
            )


def digest(*parts: object) -> int:
    """63 bits that ranks compare to make sure that they mean the same call.

    Parameters
    ----------
    *parts
        Anything whose `repr` says what it is: integers, floats, strings, lists of these.
    """
    data = repr(parts).encode()
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "little") >> 1
