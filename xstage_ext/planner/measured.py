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
from typing import Literal

import torch

from .. import _env, machine
from .._json import build, dumps
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
        As the machine profile names it; `machine.gpu_key` tells kinds apart.
    layer : tuple of int
        world, num_experts, topk, hidden, intermediate.
    remote : float
        Share of the rows that cross the link.
    tokens : int
        Per rank and call.
    us : tuple of (str, float)
        Families of plans (`ranking.FAMILIES`) and their medians, the fastest first.
    source : str
        When, by which command.
    dispatch : str
        How the plans moved tokens, of `DISPATCHES`.
    """

    gpu: str
    layer: tuple[int, ...]
    remote: float
    tokens: int
    us: tuple[tuple[str, float], ...]
    source: str = ""
    dispatch: str = "pull"

    @property
    def relative(self) -> dict[str, float]:
        """Times over the fastest family's."""
        least = self.us[0][1]
        return {name: us / least for name, us in self.us}


@dataclasses.dataclass(frozen=True)
class _Line:
    """An entry as the file has it."""

    gpu: str
    world: int
    num_experts: int
    topk: int
    hidden: int
    intermediate: int
    remote_share: float
    tokens: int
    us: dict[str, float]
    source: str = ""
    dispatch: Literal["pull", "push"] = "pull"  # as all did when files had no such field


@dataclasses.dataclass(frozen=True)
class _File:
    plans: tuple[_Line, ...]


def entry(
    problem: MoEProblem, gpu: str, us: dict[str, float], source: str = "", dispatch: str = "pull"
) -> Entry:
    """From measured medians by family; PlanError for a proxy of many ranks, see `near`."""
    if problem.token_sets != 1:
        raise PlanError(f"xstage tune: token_sets: expected 1, got {problem.token_sets}")
    return Entry(gpu, *_layer_of(problem), problem.load, _fastest_first(us), source, dispatch)


def _layer_of(problem: MoEProblem) -> tuple[tuple[int, ...], float]:
    """What must be equal for an entry to count."""
    return tuple(getattr(problem, name) for name in _LAYER), round(problem.remote, 6)


def _fastest_first(us: dict[str, float]) -> tuple[tuple[str, float], ...]:
    return tuple(sorted(us.items(), key=lambda pair: pair[1]))


def near(entries: Sequence[Entry], problem: MoEProblem, gpu: str) -> tuple[Entry, ...]:
    """Entries of this layer and GPU for about as many tokens, the nearest first. Tables hold
    layers of ranks as they are, none in which few ranks stand in for many (`token_sets`)."""
    if problem.token_sets != 1:
        return ()
    layer, load = _layer_of(problem), max(problem.load, 1)
    alike = [one for one in entries if (one.layer, one.remote) == layer]
    found = [
        (abs(math.log(one.tokens / load)), one.tokens, one)
        for one in alike
        if machine.gpu_key(one.gpu) == machine.gpu_key(gpu)
    ]
    found.sort(key=lambda item: item[:2])
    return tuple(one for far, _, one in found if far <= math.log(NEAR) + 1e-9)


def asked_for() -> tuple[Entry, ...]:
    """The table that XSTAGE_PLANS names; empty without it. A GPU here takes its own entries only.

    Raises
    ------
    PlanError
        As `load`.
    """
    named = _env.get("XSTAGE_PLANS")
    if named is None:
        return ()
    path = pathlib.Path(named).expanduser()
    try:
        changed = os.stat(path).st_mtime_ns
    except OSError as error:
        raise PlanError(f"xstage: XSTAGE_PLANS: {path}: {error.strerror}") from None
    found = _read(path, changed)
    if not torch.cuda.is_available():
        return found
    here = machine.gpu_key(torch.cuda.get_device_name())
    return tuple(one for one in found if machine.gpu_key(one.gpu) == here)


@functools.lru_cache(maxsize=8)
def _read(path: pathlib.Path, changed: int) -> tuple[Entry, ...]:
    """Cached until the file changes."""
    return load(path)


def load(path: pathlib.Path) -> tuple[Entry, ...]:
    """Entries of a file.

    Raises
    ------
    PlanError
        It is none of `xstage tune`, or names families that this version does not know.
    """
    table = f"table of plans {path}"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        lines: tuple[_Line, ...] = build(_File, data, table, PlanError).plans
    except OSError as error:
        raise PlanError(f"{table}: {error.strerror}") from None
    except PlanError as error:
        raise PlanError(f"{error}; write it anew with `xstage tune`") from None
    except (ValueError, OverflowError, RecursionError) as error:
        raise PlanError(f"{table}: expected a file of `xstage tune`, got other ({error})") from None
    for line in lines:
        unknown = line.us.keys() - ranking.FAMILIES.keys()
        if unknown or not line.us or line.tokens < 1 or min(line.us.values()) <= 0.0:
            raise PlanError(
                f"{table}: expected tokens and times above 0 of plans that this version knows; "
                f"tune the layer again, got {line.tokens} tokens and {line.us}"
            )
    return tuple(
        Entry(
            gpu=line.gpu,
            layer=tuple(getattr(line, name) for name in _LAYER),
            remote=line.remote_share,
            tokens=line.tokens,
            us=_fastest_first(line.us),
            source=line.source,
            dispatch=line.dispatch,
        )
        for line in lines
    )


def save(path: pathlib.Path, entries: Sequence[Entry]) -> None:
    """Write a file, atomically: other processes may be reading it."""
    lines = [
        {"gpu": one.gpu}
        | dict(zip(_LAYER, one.layer, strict=True))
        | {"remote_share": one.remote, "tokens": one.tokens}
        | {"us": dict(one.us), "source": one.source, "dispatch": one.dispatch}
        for one in entries
    ]
    text = dumps({"plans": lines}, indent=1) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = _draft(path)
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


def add(path: pathlib.Path, new: Entry) -> None:
    """Put an entry into a file; it replaces the one of the same GPU, layer, share and tokens."""

    def key(one: Entry) -> tuple[object, ...]:
        return one.gpu, one.layer, one.remote, one.tokens

    kept = load(path) if path.exists() else ()
    save(path, [*(one for one in kept if key(one) != key(new)), new])


def check_writable(path: pathlib.Path) -> None:
    """Before a long run: what `add` would raise after it."""
    if path.exists():
        load(path)
    try_folder(path)


def try_folder(path: pathlib.Path) -> None:
    """Make the folder of a file and write there, so that an OSError comes early."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = _draft(path)
    draft.touch()
    draft.unlink()


def _draft(path: pathlib.Path) -> pathlib.Path:
    return path.with_name(f".{path.name}.{os.getpid()}")
