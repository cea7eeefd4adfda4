"""Plans that were timed on this machine: what `xstage tune` writes and the planner reads.

The ranking that the package ships was fitted to two H200 (`ranking.py`). Elsewhere, and where a
percent counts, a table of measurements decides: one entry per layer and number of tokens, with the
times of the planner's families. Every rank must read the same file; `prepare` compares the plans.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from .. import _env
from ..errors import PlanError
from . import ranking
from .problem import MoEProblem

NEAR = math.sqrt(2.0)
"""An entry counts for at most so many times as many tokens as it was measured with, or as few."""

_LAYER = ("world", "num_experts", "topk", "hidden", "intermediate")


@dataclasses.dataclass(frozen=True)
class Entry:
    """Times of one layer on one kind of GPU.

    Attributes
    ----------
    gpu : str
        As torch names it.
    layer : tuple of int
        world, num_experts, topk, hidden, intermediate.
    tokens : int
        Per rank and call.
    us : tuple of (str, float)
        Families of plans (`ranking.FAMILIES`) and their medians, the fastest first.
    source : str
        When, by which command.
    """

    gpu: str
    layer: tuple[int, ...]
    tokens: int
    us: tuple[tuple[str, float], ...]
    source: str = ""

    @property
    def relative(self) -> dict[str, float]:
        """Times over the fastest family's."""
        least = self.us[0][1]
        return {name: us / least for name, us in self.us}


def layer_of(problem: MoEProblem) -> tuple[int, ...]:
    """What must be equal for an entry to count."""
    return tuple(getattr(problem, name) for name in _LAYER)


def entry(problem: MoEProblem, gpu: str, us: dict[str, float], source: str = "") -> Entry:
    """From measured medians by family."""
    ordered = tuple(sorted(us.items(), key=lambda pair: pair[1]))
    return Entry(gpu, layer_of(problem), problem.load, ordered, source)


def find(entries: Sequence[Entry], problem: MoEProblem, gpu: str) -> Entry | None:
    """The entry of this layer and GPU with the nearest number of tokens, if one is near."""
    layer, load = layer_of(problem), max(problem.load, 1)
    alike = [one for one in entries if (one.gpu, one.layer) == (gpu, layer)]
    near = [(abs(math.log(one.tokens / load)), one.tokens, one) for one in alike]
    near = [found for found in near if found[0] <= math.log(NEAR) + 1e-9]
    return min(near)[2] if near else None


def asked_for() -> tuple[Entry, ...]:
    """The table that XSTAGE_PLANS names; empty without it."""
    path = _env.get("XSTAGE_PLANS")
    if path is None:
        return ()
    try:
        changed = os.stat(path).st_mtime_ns
    except OSError as error:
        raise PlanError(f"xstage: XSTAGE_PLANS: {path}: {error.strerror}") from None
    return _read(path, changed)


@functools.lru_cache(maxsize=8)
def _read(path: str, changed: int) -> tuple[Entry, ...]:
    """Cached until the file changes."""
    return load(pathlib.Path(path))


def load(path: pathlib.Path) -> tuple[Entry, ...]:
    """Entries of a file.

    Raises
    ------
    PlanError
        It is none of `xstage tune`, or names families that this version does not know.
    """
    expected = f"{path}: expected a file of `xstage tune`"
    try:
        lines: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["plans"]
        found = tuple(
            Entry(
                gpu=str(line["gpu"]),
                layer=tuple(int(line[name]) for name in _LAYER),
                tokens=int(line["tokens"]),
                us=tuple(sorted(line["us"].items(), key=lambda pair: float(pair[1]))),
                source=str(line.get("source", "")),
            )
            for line in lines
        )
    except OSError as error:
        raise PlanError(f"{expected}; {error.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise PlanError(f"{expected}, got something else ({error})") from None
    for one in found:
        unknown = dict(one.us).keys() - ranking.FAMILIES.keys()
        if unknown or not one.us or one.tokens < 1 or not one.us[0][1] > 0:
            raise PlanError(f"{path}: {one.layer}: tune it again, got {dict(one.us)}")
    return found


def save(path: pathlib.Path, entries: Sequence[Entry]) -> None:
    """Write a file, atomically: other processes may be reading it."""
    lines = [
        {"gpu": one.gpu}
        | dict(zip(_LAYER, one.layer, strict=True))
        | {"tokens": one.tokens, "us": dict(one.us), "source": one.source}
        for one in entries
    ]
    text = json.dumps({"plans": lines}, indent=1) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


def add(path: pathlib.Path, new: Entry) -> None:
    """Put an entry into a file; it replaces the one of the same GPU, layer and tokens."""
    key = new.gpu, new.layer, new.tokens
    kept = load(path) if path.exists() else ()
    save(path, [*(one for one in kept if (one.gpu, one.layer, one.tokens) != key), new])
