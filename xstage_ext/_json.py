"""Strict JSON: reading names the field that does not fit; nothing writes `Infinity` or `NaN`."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import sys
import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NoReturn


@dataclasses.dataclass(frozen=True)
class Within:
    """Bounds in an annotated type: numbers from `least` to `most`, both included, in a unit."""

    least: float
    most: float
    unit: str = ""

    def __contains__(self, value: float) -> bool:
        return self.least <= value <= self.most

    def __str__(self) -> str:
        return f"{self.least:g} to {self.most:g} {self.unit}".rstrip()


def build(kind: Any, value: Any, where: str, error: type[Exception]) -> Any:
    """Turn parsed JSON into `kind`, a (nested) dataclass of plain types.

    Parameters
    ----------
    kind : type
        A dataclass, Literal of strings, `X | None`, `tuple[X, ...]`, `dict[str, X]`, `float`,
        `int` or `str`; numbers also annotated with `Within`.
    value : object
        What `json.loads` returned.
    where : str
        Place in the document, for messages.
    error : type
        Exception to raise.
    """
    return _Builder(error).build(kind, value, where)


def parse(text: str, where: str, error: type[Exception]) -> Any:
    """What a JSON text holds; an error that names its place for what is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as problem:  # also too deep, or numbers too long
        raise error(f"{where}: not JSON: {problem}") from None


def dump(value: Any, indent: int = 0) -> str:
    """JSON with one field per line and lists on one line."""
    if not isinstance(value, dict) or not value:
        return json.dumps(value, allow_nan=False)
    pad = " " * (indent + 1)
    lines = [f"{pad}{json.dumps(k)}: {dump(v, indent + 1)}" for k, v in value.items()]
    return "{\n" + ",\n".join(lines) + "\n" + " " * indent + "}"


def dumps(value: Any, indent: int | None = None) -> str:
    """JSON that any parser takes: numbers that are not finite become null, others texts."""
    return json.dumps(_finite(value), indent=indent, default=str, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    """Types of a dataclass's fields; finding them takes most of the time of reading a profile."""
    return typing.get_type_hints(kind, include_extras=True)


class _Builder:
    def __init__(self, error: type[Exception]) -> None:
        self._error = error

    def build(self, kind: Any, value: Any, where: str) -> Any:
        origin, arguments = typing.get_origin(kind), typing.get_args(kind)
        if dataclasses.is_dataclass(kind):
            return self._dataclass(typing.cast(type, kind), value, where)
        if origin is Annotated:
            number, bound = self.build(arguments[0], value, where), arguments[1]
            return self._expect(number in bound, value, where, f"a number of {bound}")
        if origin is Literal:
            return self._expect(value in arguments, value, where, f"one of {', '.join(arguments)}")
        if origin in (types.UnionType, typing.Union):
            inner = next(a for a in arguments if a is not type(None))
            return None if value is None else self.build(inner, value, where)
        if origin is tuple:
            self._expect(isinstance(value, list), value, where, "a list")
            return tuple(self.build(arguments[0], v, f"{where}[{i}]") for i, v in enumerate(value))
        if origin is dict:
            self._expect(isinstance(value, Mapping), value, where, "an object")
            return {k: self.build(arguments[1], v, f"{where}.{k}") for k, v in value.items()}
        return self._scalar(kind, value, where)

    def _scalar(self, kind: Any, value: Any, where: str) -> Any:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if kind is float:
            finite = number and abs(value) <= sys.float_info.max
            return float(self._expect(finite, value, where, "a finite number"))
        if kind is int:
            whole = number and isinstance(value, int) and abs(value) < 1 << 63
            return self._expect(whole, value, where, "an integer")
        return self._expect(isinstance(value, str), value, where, "a string")

    def _dataclass(self, kind: type, value: Any, where: str) -> Any:
        self._expect(isinstance(value, Mapping), value, where, "an object")
        hints = _hints(kind)
        fields = {field.name: field for field in dataclasses.fields(kind)}
        for name in value:
            self._expect(name in fields, name, where, f"fields {', '.join(fields)}")
        arguments = {}
        for name, field in fields.items():
            if name in value:
                arguments[name] = self.build(hints[name], value[name], f"{where}: {name}")
            elif (field.default, field.default_factory) == (dataclasses.MISSING,) * 2:
                self._fail("nothing", where, f"field {name}")
        return kind(**arguments)

    def _expect(self, condition: bool, value: Any, where: str, expected: str) -> Any:
        if not condition:
            self._fail(value, where, expected)
        return value

    def _fail(self, value: Any, where: str, expected: str) -> NoReturn:
        raise self._error(f"{where}: expected {expected}, got {value!r}")
