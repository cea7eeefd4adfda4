"""Exhibits for the claims: each a command, a table and a picture in docs/evidence/.

    python benchmarks/evidence.py spans        # 1. remote-store span per tile, prediction over it
    python benchmarks/evidence.py timeline     # 2. Tensor Cores at work over time
    python benchmarks/evidence.py attention    # 3. fused attention's overhead, and a counterfactual
    python benchmarks/evidence.py pacing       # 4. the shadow, and pacing as its remedy
    xstage validate                            # 5. the law on held-out bursts
    python benchmarks/evidence.py prediction   # 6. the simulator against the clock
    python benchmarks/evidence.py regret       # what the planner's choices cost on held-out shapes
    python benchmarks/evidence.py ceiling      # what the ceilings allow, and where the time goes

Each draws what benchmarks/results/ holds. With two GPUs `spans --measure` and `timeline --measure`
trace the kernel first; the other files are written by sweep_84.py --record, bench_attention.py and
bench_burst.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import _exhibit_ceiling
import _exhibit_tiles
import _exhibits
import _plans
import _report
import torch
import typer
from render_readme import markdown, origin

from xstage_ext import machine

FOLDER = _report.ROOT / "docs" / "evidence"
app = typer.Typer(help=__doc__, no_args_is_help=True)


def save(
    name: str, title: str, exhibit: _exhibits.Exhibit, lines: Sequence[dict[str, Any]]
) -> None:
    """Page and picture; below the table stands where its results are from."""
    import matplotlib.pyplot as plt

    FOLDER.mkdir(parents=True, exist_ok=True)
    exhibit.figure.savefig(FOLDER / f"{name}.png", dpi=110)
    plt.close(exhibit.figure)
    parts = [f"# {title}", exhibit.text]
    parts += [markdown(head, rows) for head, rows in exhibit.tables]
    parts += [f"![{title}]({name}.png)", f"Drawn by `python benchmarks/evidence.py {name}`."]
    parts.append(f"Results: {origin(lines)}")
    page = "\n\n".join(part for part in parts if part) + "\n"
    (FOLDER / f"{name}.md").write_text(page, encoding="utf-8")
    typer.echo(page)


def lines_of(file: str, command: str, op: str | None = None) -> list[dict[str, Any]]:
    """Measured lines of a result file; without any it ends with the command that makes them."""
    lines = [line for line in _report.read(file) if line["n"] > 0]
    lines = [line for line in lines if op is None or line["op"] == op]
    if not lines:
        typer.echo(f"no measurements in benchmarks/results/{file}; on GPUs: {command}")
        raise typer.Exit(1)
    return lines


Measure = Annotated[bool, typer.Option(help="Trace first; needs two GPUs.")]
Index = Annotated[int, typer.Option(help="Which of the 84 configurations to trace.")]


def _traces(measure: bool, index: int) -> list[dict[str, Any]]:
    if measure:
        import _evidence_gpu
        import _sweep

        _evidence_gpu.write_traces(_sweep.load_configs()[index], machine.load_here(), calls=8)
    return lines_of("tile_traces.jsonl", "python benchmarks/evidence.py spans --measure")


@app.command()
def spans(measure: Measure = False, index: Index = 23) -> None:
    """1. Remote-store span per Linear-2 tile in the kernel, a local control, the prediction."""
    lines = _traces(measure, index)
    sweep = [line for line in _report.read("sweep_84.jsonl") if line["op"] == "megamoe_trace"]
    exhibit = _exhibit_tiles.spans(lines, sweep, machine.load("h200x2"))
    save("spans", "Time to hand over a Linear-2 tile", exhibit, lines)


@app.command()
def timeline(measure: Measure = False, index: Index = 23) -> None:
    """2. Share of the math warpgroups that multiply, over time."""
    lines = _traces(measure, index)
    exhibit = _exhibit_tiles.timeline(lines, machine.load("h200x2"))
    save("timeline", "Tensor Cores at work over time", exhibit, lines)


@app.command()
def attention() -> None:
    """3. Overhead of fused attention over attention alone, against the sequence length."""
    command = "torchrun --nproc-per-node 2 benchmarks/bench_attention.py"
    lines = lines_of("attention.jsonl", command, "attention_a2a")
    exhibit = _exhibits.attention(lines, machine.load("h200x2"))
    save("attention", "What sending its result costs attention", exhibit, lines)


@app.command()
def pacing() -> None:
    """4. A main loop that sends its tiles: bursts, staggered bursts, paced slices."""
    lines = lines_of("burst_loop.jsonl", "python benchmarks/bench_burst.py")
    sweep = [line for line in _report.read("sweep_84.jsonl") if line["op"] == "megamoe_plans"]
    fused = [line for line in _report.read("attention.jsonl") if line["op"] == "attention_a2a"]
    save("pacing", "How a tile should leave", _exhibits.pacing(lines, sweep, fused), lines)


@app.command()
def prediction() -> None:
    """6. Kernel time by the simulator against the clock, over the measured sweep."""
    lines = lines_of("sweep_84.jsonl", "python benchmarks/sweep_84.py --record", "megamoe")
    save("prediction", "Simulator against clock", _exhibits.prediction(lines), lines)


@app.command()
def regret() -> None:
    """What the planner's choices cost against the best measured plan of every configuration."""
    lines = lines_of("sweep_84.jsonl", "python benchmarks/sweep_84.py --record", "megamoe_plans")
    exhibit = _exhibits.regret(lines, machine.load("h200x2"))
    save("regret", "The planner's choice against the best measured plan", exhibit, lines)


@app.command()
def ceiling() -> None:
    """What ceilings and the best measured plan would give over the wave, and a call in parts."""
    lines = lines_of("sweep_84.jsonl", "python benchmarks/sweep_84.py --record")
    of = {op: [line for line in lines if line["op"] == op] for op in ("megamoe", _plans.TRACE_OP)}
    fused = [line for line in of["megamoe"] if line["arm"] != "serial"]
    exhibit = _exhibit_ceiling.ceiling(fused, of[_plans.TRACE_OP], _plans.read(lines))
    save("ceiling", "What the ceilings allow, and where the time goes", exhibit, lines)


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
