"""Exhibits for the claims: each a command, a table and a picture in docs/evidence/.

    python benchmarks/evidence.py spans        # two GPUs: store span per tile, prediction over it
    python benchmarks/evidence.py prediction   # from the sweep's results: simulator against clock
    python benchmarks/evidence.py attention    # from the attention benchmark's results

`spans` also draws how many Tensor Cores are at work over time (timeline.png); it has not run yet.
The law's validation on held-out bursts is `xstage validate`, the shadow and pacing
`benchmarks/bench_burst.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import _report
import _sweep
import matplotlib
import numpy as np
import torch
import typer
from _tile_trace import busy_share

from xstage_ext import machine, simulate

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

FOLDER = _report.ROOT / "docs" / "evidence"
SPAN_ARMS = ("wave/st", "interleaved/st", "wave", "interleaved")
app = typer.Typer(help=__doc__, no_args_is_help=True)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


def save(name: str, title: str, text: str, figure: Any) -> None:
    """Page and picture."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    figure.savefig(FOLDER / f"{name}.png", dpi=130)
    plt.close(figure)
    facts = _report.facts()
    where = f"{facts['gpu']}, driver {facts['driver']}, torch {facts['torch']}, {facts['date']}"
    origin = f"`{facts['command']}` at {facts['commit']}"
    page = f"# {title}\n\n{text}\n![{title}]({name}.png)\n\n{where}; {origin}.\n"
    (FOLDER / f"{name}.md").write_text(page, encoding="utf-8")
    typer.echo(page)


def predicted_spans(
    config: _sweep.Config, arm: str, profile: machine.MachineProfile, local: bool
) -> simulate.Simulation:
    """A traced simulation of an arm; `local` keeps every row on its own rank."""
    load = _sweep.load_of(config, config.draw())
    counts = load.counts
    if local:
        counts = np.zeros_like(counts)
        counts[load.rank] = load.counts.sum(axis=0)
    plan = _sweep.plan_of(config, arm, profile)
    return simulate.simulate_megamoe(
        plan, counts, profile, rank=load.rank, trace=True, num_tokens=config.tokens
    )


def simulated_spans_us(result: simulate.Simulation) -> np.ndarray[Any, Any]:
    """Hand-over of every Linear-2 tile: epilogue and what the stores hold up."""
    column = {name: i for i, name in enumerate(simulate.TILE_COLUMNS)}
    second = result.tiles[result.tiles[:, column["phase"]] == 2]
    span = second[:, column["end_us"]] - second[:, column["store_begin_us"]]
    return np.asarray(span + simulate.Assumptions().epilogue2_us)


@app.command()
def spans(
    index: Annotated[int, typer.Option(help="Which of the 84 configurations.")] = 23,
    calls: Annotated[int, typer.Option(help="Calls before the traced one.")] = 5,
) -> None:
    """Remote-store span per Linear-2 tile in the kernel, a local control, the prediction."""
    import _evidence_gpu

    config = _sweep.load_configs()[index]
    profile = machine.load_here()
    arms = [*SPAN_ARMS, "local control"]
    traces = _evidence_gpu.trace_arms(config, arms, profile, calls)
    rows, figure = [], plt.figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    writer = _report.ResultWriter("evidence_spans.jsonl")
    for place, arm in enumerate(arms):
        seen = traces[arm].of_phase(2).hand_over_us
        local = arm == "local control"
        result = predicted_spans(config, "wave/st" if local else arm, profile, local)
        predicted = simulated_spans_us(result)
        axes.boxplot([seen], positions=[place], widths=0.5, whis=(5, 95), showfliers=False)
        axes.plot(place, np.median(predicted), "D", color="tab:red")
        p10, p50, p90 = np.percentile(seen, [10, 50, 90])
        q50, q90 = np.percentile(predicted, [50, 90])
        cells = (p50, p10, p90, float(seen.max()), q50, q90)
        clock = float(np.median(traces[arm].clock_mhz))
        rows.append([arm, *(f"{value:.2f}" for value in cells), f"{clock:.0f}"])
        writer.write(
            _report.Row(
                "megamoe_store_span", arm, config.key, config.world, p50, p10, p90, len(seen),
                extra={"predicted_us": float(q50), "max_us": float(seen.max())},
            )
        )  # fmt: skip
    axes.set_xticks(range(len(arms)), arms)
    axes.plot([], [], "D", color="tab:red", label="predicted median")
    axes.legend()
    axes.set_ylabel("hand-over of a Linear-2 tile, us (box: quartiles, whiskers 5 to 95%)")
    head = ["arm", "median us", "p10", "p90", "max", "predicted median", "predicted p90", "MHz"]
    text = f"{config.name}, rank 0, profile {profile.name} ({profile.provenance}).\n\n"
    save("spans", "Time to hand over a Linear-2 tile", text + table(head, rows), figure)
    _draw_activity(config, traces, profile)


def _draw_activity(
    config: _sweep.Config, traces: dict[str, Any], profile: machine.MachineProfile
) -> None:
    figure, panels = plt.subplots(
        len(SPAN_ARMS), 1, figsize=(10, 8), sharex=True, layout="constrained"
    )
    column = {name: i for i, name in enumerate(simulate.TILE_COLUMNS)}
    rows, width = [], 10.0
    for axes, arm in zip(panels, SPAN_ARMS, strict=True):
        seen = traces[arm].activity(width)
        result = predicted_spans(config, arm, profile, local=False)
        begin, end = (result.tiles[:, column[c]] for c in ("main_begin_us", "store_begin_us"))
        start = float(begin.min())
        predicted = busy_share(begin - start, end - start, len(result.workers), width)
        axes.fill_between(np.arange(len(seen)) * width, seen, step="post", alpha=0.6)
        axes.step(np.arange(len(predicted)) * width, predicted, where="post", color="tab:red")
        axes.set_ylabel(arm)
        axes.set_ylim(0, 1.05)
        low = float((seen[:-1] < 0.5).mean()) if len(seen) > 1 else 0.0
        rows.append([arm, f"{seen.mean():.0%}", f"{low:.0%}", f"{predicted.mean():.0%}"])
    panels[-1].set_xlabel("us since the first tile; red: predicted")
    head = ["arm", "in a main loop", "time below one half", "predicted in a main loop"]
    title = "Math warpgroups inside a main loop over time"
    save("timeline", title, f"{config.name}.\n\n{table(head, rows)}", figure)


@app.command()
def prediction() -> None:
    """Kernel time by the simulator against the clock, over the measured sweep."""
    lines = [
        line
        for line in _report.read("sweep_84.jsonl")
        if line["n"] > 0 and line["arm"] in _sweep.ARMS
    ]
    if not lines:
        typer.echo("no measurements in benchmarks/results/sweep_84.jsonl; run the sweep on GPUs")
        raise typer.Exit(1)
    figure = plt.figure(figsize=(6.5, 6), layout="constrained")
    axes = figure.subplots()
    rows = []
    for arm in _sweep.ARMS:
        mine = [line for line in lines if line["arm"] == arm]
        seen = np.array([line["us_median"] for line in mine])
        ratio = np.array([line["predicted_us"] for line in mine]) / seen
        axes.plot(seen, ratio, "o", markersize=4, label=arm)
        error = np.abs(ratio - 1.0)
        cells = (np.median(error), np.percentile(error, 95), np.median(ratio) - 1.0)
        rows.append([arm, str(len(mine)), *(f"{value:.1%}" for value in cells)])
    axes.axhline(1.0, color="0.3", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xlabel("measured, us")
    axes.set_ylabel("predicted / measured")
    axes.legend(fontsize=8)
    head = ["arm", "configurations", "median error", "95%", "bias"]
    save("prediction", "Simulator against clock", table(head, rows), figure)


@app.command()
def attention(
    results: Annotated[str, typer.Option(help="File in benchmarks/results/.")] = "attention.jsonl",
) -> None:
    """Overhead of fused attention over attention alone, against the sequence length."""
    lines = [line for line in _report.read(results) if line["n"] > 0]
    by_shape: dict[str, dict[str, dict[str, Any]]] = {}
    for line in lines:
        by_shape.setdefault(str(line["shape"]), {})[line["arm"]] = line
    complete = [arms for arms in by_shape.values() if {"attention", "serial", "fused"} <= set(arms)]
    if not complete:
        typer.echo(
            f"no shape with arms attention, serial and fused in benchmarks/results/{results}"
        )
        raise typer.Exit(1)
    figure = plt.figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    rows = []
    for arm in ("serial", "fused"):
        x = [arms[arm]["shape"].get("sequence", i) for i, arms in enumerate(complete)]
        y = [arms[arm]["us_median"] / arms["attention"]["us_median"] for arms in complete]
        axes.plot(x, y, "o-", label=arm)
    for arms in complete:
        times = [arms[arm]["us_median"] for arm in ("attention", "serial", "fused")]
        shape = " ".join(f"{k}={v}" for k, v in arms["fused"]["shape"].items())
        rows.append([shape, *(f"{us:.1f}" for us in times), f"{times[1] / times[2]:.3f}x"])
    axes.axhline(1.0, color="0.3", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("sequence")
    axes.set_ylabel("time over attention alone")
    axes.legend()
    head = ["shape", "attention us", "serial us", "fused us", "serial / fused"]
    save("attention", "Fused attention against serial", table(head, rows), figure)


if __name__ == "__main__":
    torch.set_num_threads(2)
    app()
