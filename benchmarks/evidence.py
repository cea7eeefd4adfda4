"""Exhibits for the claims: each a command, a table and a picture in docs/evidence/.

    python benchmarks/evidence.py spans        # 1. remote-store span per tile, prediction over it
    python benchmarks/evidence.py timeline     # 2. Tensor Cores at work over time
    python benchmarks/evidence.py attention    # 3. fused attention's overhead, and a counterfactual
    python benchmarks/evidence.py pacing       # 4. the shadow, and pacing as its remedy
    xstage validate                            # 5. the law on held-out bursts
    python benchmarks/evidence.py prediction   # 6. the simulator against the clock
    python benchmarks/evidence.py regret       # what the planner's choices cost on held-out shapes
    python benchmarks/evidence.py ceiling      # what the ceilings allow, and where the time goes

Each draws what benchmarks/results/ holds. With two GPUs `--measure` measures first, by the
benchmark that makes the exhibit's results, into build/results/, and the page goes to
build/evidence/; with `--record` into the repository's own, benchmarks/results/ and docs/evidence/.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Annotated, Any

import _exhibit_ceiling
import _exhibit_tiles
import _exhibits
import _plans
import _report
import _sweep
import torch
import typer
from render_readme import markdown, origin

from xstage_ext import machine

FOLDER = _report.ROOT / "docs" / "evidence"
LOCAL_FOLDER = _report.ROOT / "build" / "evidence"
app = typer.Typer(help=__doc__, no_args_is_help=True)
Lines = list[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Source:
    """An exhibit, where its results lie, where its page goes, whose profile predicts."""

    name: str
    results: pathlib.Path
    pages: pathlib.Path
    profile: machine.MachineProfile

    def lines(self, file: str, op: str | None = None) -> Lines:
        """Measured lines of a result file; none are there when it was not written."""
        lines = [line for line in _report.read(self.results / file) if line["n"] > 0]
        return [line for line in lines if op is None or line["op"] == op]

    def needed(self, file: str, op: str | None = None) -> Lines:
        """The same; without any it ends with the command that makes them."""
        lines = self.lines(file, op)
        if not lines:
            typer.echo(
                f"no measurements in {self.results / file}; on two GPUs: python "
                f"benchmarks/evidence.py {self.name} --measure --record"
            )
            raise typer.Exit(1)
        return lines

    def save(self, title: str, exhibit: _exhibits.Exhibit, *used: Lines) -> None:
        """Page and picture; below the table stands where the results used are from."""
        import matplotlib.pyplot as plt

        self.pages.mkdir(parents=True, exist_ok=True)
        exhibit.figure.savefig(self.pages / f"{self.name}.png", dpi=110)
        plt.close(exhibit.figure)
        parts = [f"# {title}", exhibit.text]
        parts += [markdown(head, rows) for head, rows in exhibit.tables]
        command = f"python benchmarks/evidence.py {self.name}"
        parts.append(f"![{title}]({self.name}.png)")
        parts.append(f"Drawn by `{command}`, measured anew with `--measure`.")
        parts += [f"Results: {origin(lines)}" for lines in used if lines]
        page = "\n\n".join(part for part in parts if part) + "\n"
        (self.pages / f"{self.name}.md").write_text(page, encoding="utf-8")
        typer.echo(page)


FILES = {
    "spans": "tile_traces.jsonl",
    "timeline": "tile_traces.jsonl",
    "attention": "attention.jsonl",
    "pacing": "burst_loop.jsonl",
    "prediction": "sweep_84.jsonl",
    "regret": "sweep_84.jsonl",
    "ceiling": "sweep_84.jsonl",
}
"""What every exhibit is mainly drawn from, and `--measure` writes."""
USUAL = 23
"""The layer that is traced: one whose link is busy."""

Measure = Annotated[bool, typer.Option("--measure", help="Measure first; needs two GPUs.")]
Record = Annotated[
    bool, typer.Option("--record", help="Measure into benchmarks/results/ and docs/evidence/.")
]
Index = Annotated[
    int | None, typer.Option(help=f"Which of the 84 layers to trace; {USUAL} unless given.")
]


def source(name: str, measure: bool, record: bool, index: int | None = None) -> Source:
    """Where an exhibit is drawn from, measured first if wanted.

    Ends with one line: options that do not fit (status 2), no two GPUs to measure on, or a
    benchmark that failed (1).
    """
    for option, given in (("--record", record), ("--index", index is not None)):
        if given and not measure:
            raise typer.BadParameter(f"{option}: expected --measure beside it")
    last = len(_sweep.load_configs()) - 1
    if index is not None and not 0 <= index <= last:
        raise typer.BadParameter(f"--index: expected 0 to {last}, got {index}")
    if not measure:
        return Source(name, _report.RESULTS, FOLDER, machine.load("h200x2"))
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus < 2:
        typer.echo(f"{name} --measure: expected two GPUs, got {gpus}")
        raise typer.Exit(1)
    import _evidence_gpu

    results = _report.RESULTS if record else _report.LOCAL_RESULTS
    status = _evidence_gpu.measure(FILES[name], results, USUAL if index is None else index)
    if status:
        typer.echo(f"{name} --measure: the benchmark ended with status {status}")
        raise typer.Exit(1)
    return Source(name, results, FOLDER if record else LOCAL_FOLDER, machine.load_here())


@app.command()
def spans(measure: Measure = False, record: Record = False, index: Index = None) -> None:
    """1. Remote-store span per Linear-2 tile in the kernel, a local control, the prediction."""
    at = source("spans", measure, record, index)
    lines, sweep = at.needed(FILES["spans"]), at.lines("sweep_84.jsonl", _plans.TRACE_OP)
    exhibit = _exhibit_tiles.spans(lines, sweep, at.profile)
    at.save("Time to hand over a Linear-2 tile", exhibit, lines, sweep)


@app.command()
def timeline(measure: Measure = False, record: Record = False, index: Index = None) -> None:
    """2. Share of the math warpgroups that multiply, over time."""
    at = source("timeline", measure, record, index)
    lines = at.needed(FILES["timeline"])
    exhibit = _exhibit_tiles.timeline(lines, at.profile)
    at.save("Tensor Cores at work over time", exhibit, lines)


@app.command()
def attention(measure: Measure = False, record: Record = False) -> None:
    """3. Overhead of fused attention over attention alone, against the sequence length."""
    at = source("attention", measure, record)
    lines = at.needed(FILES["attention"], "attention_a2a")
    exhibit = _exhibits.attention(lines, at.profile)
    at.save("What sending its result costs attention", exhibit, lines)


@app.command()
def pacing(measure: Measure = False, record: Record = False) -> None:
    """4. A main loop that sends its tiles: bursts, staggered bursts, paced slices."""
    at = source("pacing", measure, record)
    lines = at.needed(FILES["pacing"])
    sweep = at.lines("sweep_84.jsonl", _plans.OP)
    fused = at.lines("attention.jsonl", "attention_a2a")
    at.save("How a tile should leave", _exhibits.pacing(lines, sweep, fused), lines, sweep, fused)


@app.command()
def prediction(measure: Measure = False, record: Record = False) -> None:
    """6. Kernel time by the simulator against the clock, over the measured sweep."""
    at = source("prediction", measure, record)
    lines = at.needed(FILES["prediction"], "megamoe")
    at.save("Simulator against clock", _exhibits.prediction(lines), lines)


@app.command()
def regret(measure: Measure = False, record: Record = False) -> None:
    """What the planner's choices cost against the best measured plan of every configuration."""
    at = source("regret", measure, record)
    lines = at.needed(FILES["regret"], _plans.OP)
    exhibit = _exhibits.regret(lines, at.profile)
    at.save("The planner's choice against the best measured plan", exhibit, lines)


@app.command()
def ceiling(measure: Measure = False, record: Record = False) -> None:
    """What ceilings and the best measured plan would give over the wave, and a call in parts."""
    at = source("ceiling", measure, record)
    lines = at.needed(FILES["ceiling"])
    of = {op: [line for line in lines if line["op"] == op] for op in ("megamoe", _plans.TRACE_OP)}
    fused = [line for line in of["megamoe"] if line["arm"] != "serial"]
    exhibit = _exhibit_ceiling.ceiling(fused, of[_plans.TRACE_OP], _plans.read(lines))
    at.save("What the ceilings allow, and where the time goes", exhibit, lines)


EXHIBITS: dict[str, Callable[[], None]] = {
    "spans": spans,
    "timeline": timeline,
    "attention": attention,
    "pacing": pacing,
    "prediction": prediction,
    "regret": regret,
    "ceiling": ceiling,
}


@app.command(name="all")
def draw_all() -> None:
    """Every exhibit whose results are there."""
    for name, draw in EXHIBITS.items():
        try:
            draw()
        except typer.Exit:
            typer.echo(f"left out: {name}")


if __name__ == "__main__":
    torch.set_num_threads(2)
    app()
