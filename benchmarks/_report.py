"""Results of benchmarks: one JSON line per arm of a configuration, with the facts to repeat it.

Every benchmark writes through `ResultWriter`; README tables are generated from these lines.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
"""What the repository keeps; tables in pages are made from it."""
LOCAL_RESULTS = ROOT / "build" / "results"
"""Results of somebody's own run; git ignores them."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One arm of one configuration.

    Attributes
    ----------
    op, arm : str
        E.g. `"megamoe"`, `"interleaved"`.
    shape : dict
        The problem, by names that the operator uses.
    world : int
        Ranks.
    us_median, us_p10, us_p90 : float
        Over `n` iterations, each the maximum over ranks.
    n : int
        Iterations; 0 marks a prediction.
    tflops : float or None
        Useful arithmetic of one rank over `us_median`.
    egress_GBps : float or None
        Bytes that one rank sends across the link (not to itself) over `us_median`.
    ok : bool or None
        Compared with the reference in the same run; None where nothing was executed.
    extra : dict
        Further numbers, e.g. predictions; flattened into the line.
    """

    op: str
    arm: str
    shape: dict[str, Any]
    world: int
    us_median: float
    us_p10: float
    us_p90: float
    n: int
    tflops: float | None = None
    egress_GBps: float | None = None
    ok: bool | None = None
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def predicted(
        cls, op: str, arm: str, shape: dict[str, Any], world: int, us: float, **more: Any
    ):
        """A row that no machine has run: `n` is 0 and `predicted` is true."""
        extra = {"predicted": True} | more.pop("extra", {})
        return cls(op, arm, shape, world, us, us, us, 0, extra=extra, **more)

    def as_dict(self) -> dict[str, Any]:
        """Fields in order, `extra` flattened at the end."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return fields | fields.pop("extra")


@functools.cache
def facts() -> dict[str, Any]:
    """GPU, driver, torch, clock, date, commit and command of this process."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    driver, clock, power = _nvidia_smi() if gpu else (None,) * 3
    return {
        "gpu": gpu,
        "driver": driver,
        "torch": torch.__version__,
        "clock_mhz": None if clock is None else float(clock),
        "power_limit_w": None if power is None else float(power),
        "date": now(),
        "commit": commit(),
        "command": " ".join(["python", *(_relative(word) for word in sys.argv)]),
    }


def now() -> str:
    """The time as it stands in rows: they sort by it."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


@functools.cache
def commit() -> str | None:
    """Short hash of the checkout, with `+` when tracked files differ.

    Outside of git it is what a file COMMIT in the root says (`git archive` for another machine), or
    None.
    """
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        dirty = _git("status", "--porcelain", "--untracked-files=no", "--", "csrc", "xstage_ext")
    except (OSError, subprocess.CalledProcessError):
        exported = ROOT / "COMMIT"
        return exported.read_text(encoding="utf-8").strip() if exported.is_file() else None
    return head + ("+" if dirty else "")


class ResultWriter:
    """Writes rows to a JSON-lines file, each with the facts, flushed at once.

    The first row of an operator replaces what the file had of that operator: a run that fails
    before it has measured anything leaves the file as it is.

    Parameters
    ----------
    path : str or path
        File; relative names lie under benchmarks/results/.
    append : bool
        Keep what is there (for resumed and split runs).
    """

    def __init__(self, path: str | pathlib.Path, append: bool = False) -> None:
        self.path = RESULTS / path
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._append = append
        self._replaced: set[str] = set()
        self._kept = [line.get("shape") for line in read(self.path)] if append else []

    def write(self, *rows: Row) -> None:
        """Write rows, one line each, all at once: a run that is killed leaves one torn line."""
        new = {row.op for row in rows} - self._replaced
        if not self._append and new:
            rewrite(self.path, [line for line in read(self.path) if line["op"] not in new])
        self._replaced |= new
        lines = (json.dumps(_rounded(row.as_dict() | facts())) for row in rows)
        text = "".join(f"{line}\n" for line in lines).encode()
        with self.path.open("ab+") as file:
            if file.tell() > 0:
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":  # torn; what is appended to it would be lost with it
                    text = b"\n" + text
            file.write(text)

    def replace(self, *rows: Row) -> None:
        """Write rows of one shape in place of all lines, of any arm, that the file kept of it."""
        shape = rows[0].shape
        if shape in self._kept:
            rewrite(self.path, [line for line in read(self.path) if line.get("shape") != shape])
            self._kept = [kept for kept in self._kept if kept != shape]
        self.write(*rows)


def rewrite(path: pathlib.Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Make a file hold these lines; whoever is interrupted leaves the file as it was."""
    fresh = path.with_name(path.name + ".new")
    fresh.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    fresh.replace(path)


def _rounded(value: Any) -> Any:
    """Floats to six significant digits: more is noise."""
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    return float(f"{value:.6g}") if isinstance(value, float) else value


def read(path: str | pathlib.Path) -> Iterator[dict[str, Any]]:
    """Rows of a file; a torn line (a killed run) is skipped.

    Of rows with the same operator, arm, shape and ranks the last one counts: a resumed run or a
    file that was put together may hold a measurement twice. A prediction replaces no measurement.
    """
    file = RESULTS / path
    if not file.is_file():
        return
    found: dict[Any, dict[str, Any]] = {}
    for number, text in enumerate(file.read_text(encoding="utf-8").splitlines()):
        with contextlib.suppress(json.JSONDecodeError):
            row = json.loads(text)
            key = _identity(row) or number
            found.pop(key, None)
            found[key] = row
    yield from found.values()


def _identity(row: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """What no two rows of a file share; None for a line that names no problem."""
    if "shape" not in row:
        return None
    what = row.get("op"), row.get("arm"), json.dumps(row["shape"], sort_keys=True)
    return (*what, row.get("world"), bool(row.get("predicted")))


def line(row: Row) -> str:
    """One row as text, with units."""
    shape = " ".join(f"{name}={value}" for name, value in row.shape.items())
    spread = f"[{row.us_p10:.1f} {row.us_p90:.1f}] n={row.n}" if row.n else "predicted"
    parts = [f"{row.op} {shape}", row.arm, f"{row.us_median:.1f} us {spread}"]
    if row.tflops is not None:
        parts.append(f"{row.tflops:.0f} TFLOP/s")
    if row.egress_GBps is not None:
        parts.append(f"out {row.egress_GBps:.0f} GB/s")
    if row.ok is not None:
        parts.append("ok" if row.ok else "WRONG")
    return " | ".join(parts)


def _git(*arguments: str) -> str:
    result = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return result.stdout.strip()


def _nvidia_smi() -> tuple[str | None, str | None, str | None]:
    """Driver, SM clock now and power limit of the current device; by UUID, since
    CUDA_VISIBLE_DEVICES renumbers."""
    uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    query = "--query-gpu=driver_version,clocks.sm,power.limit"
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits", "-i", f"GPU-{uuid}"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        driver, clock, power = (part.strip() for part in text.strip().split(","))
        return driver, clock, power
    except (OSError, ValueError, subprocess.CalledProcessError):
        return None, None, None


def _relative(word: str) -> str:
    path = pathlib.Path(word)
    if path.is_absolute() and path.is_relative_to(ROOT):
        return str(path.relative_to(ROOT))
    return word if not path.is_absolute() else path.name
