"""84 mixture-of-experts layers: wave against interleaved, predicted and, with GPUs, measured.

    python benchmarks/sweep_84.py                  # no GPU: predictions, and one small real layer
    python benchmarks/sweep_84.py --quick          # every seventh configuration
    python benchmarks/sweep_84.py --part 1/4       # with two GPUs: measure a quarter
    python benchmarks/sweep_84.py --part merge     # one report from all parts

Every figure without a GPU is a prediction by the simulator and marked as such. Results are JSON
lines under build/results/ (with --record those of the repository, benchmarks/results/), tables and
pictures are made from them. An interrupted run goes on where it stopped with --resume.
"""

from __future__ import annotations

import json
import pathlib
import sys
import time
from collections.abc import Iterable
from typing import Annotated, Any

import _report
import _sweep
import torch
import typer
from _sweep import ARMS, Config
from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from xstage_ext import machine

BASELINE = "wave/st"
FACTS = (
    "held_out", "load_max_over_mean", "remote_share_drawn", "egress_bytes", "flops", "ceiling_us",
    "ceiling_by", "compute_floor_us", "link_floor_us", "weights_floor_us", "real_link_floor_us",
    "profile", "provenance",
)  # fmt: skip
"""What holds for every arm of a configuration; see `config_facts`."""
PLAN_FIELDS = ("schedule", "store", "lead_blocks", "wave_blocks", "group_blocks", "slice_rows")

console = Console(width=150 if not sys.stdout.isatty() else None)


def predicted_rows(config: Config, profile: machine.MachineProfile) -> list[_report.Row]:
    """One row per arm, from the simulator."""
    load = _sweep.load_of(config, config.draw())
    facts = config_facts(config, load, profile)
    rows = []
    for arm in ARMS:
        plan, result = _sweep.predict(config, load, arm, profile)
        rows.append(
            _report.Row.predicted(
                "megamoe",
                arm,
                config.key,
                config.world,
                result.total_us,
                tflops=load.flops / result.total_us / 1e6,
                egress_GBps=load.egress_bytes / result.total_us / 1e3,
                extra=facts
                | {
                    "predicted_us": result.total_us,
                    "predicted_stall_us": result.stall_us,
                    "predicted_shadow_us": result.mean("shadow_wait_us"),
                    "plan": {name: getattr(plan, name) for name in PLAN_FIELDS},
                },
            )
        )
    return rows


def config_facts(
    config: Config, load: _sweep.Load, profile: machine.MachineProfile
) -> dict[str, Any]:
    """What holds for every arm of a configuration."""
    return {
        "held_out": config.held_out,
        "load_max_over_mean": load.load_max_over_mean,
        "remote_share_drawn": load.remote_share,
        "egress_bytes": load.egress_bytes,
        "flops": load.flops,
        **ceiling_facts(_sweep.ceiling_of(load, profile)),
        "real_link_floor_us": _sweep.real_link_us(config, profile),
        "profile": profile.name,
        "provenance": profile.provenance,
    }


def ceiling_facts(ceiling: _sweep.Ceiling) -> dict[str, Any]:
    """The ceiling's part of them."""
    return {
        "ceiling_us": ceiling.us,
        "ceiling_by": ceiling.binding,
        "compute_floor_us": ceiling.compute_us,
        "link_floor_us": ceiling.link_us,
        "weights_floor_us": ceiling.weights_us,
    }


def by_config(lines: Iterable[dict[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Result lines by configuration and arm; a later line replaces an earlier one."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for line in lines:
        if line.get("op") == "megamoe":
            found.setdefault(json.dumps(line["shape"]), {})[line["arm"]] = line
    return found


def is_complete(arms: dict[str, dict[str, Any]], measured: bool) -> bool:
    """All arms are there, of the wanted kind."""
    return set(ARMS) <= arms.keys() and all(
        (line["n"] > 0) == measured for name, line in arms.items() if name in ARMS
    )


def report(path: pathlib.Path, configs: list[Config], title: str) -> None:
    """Table, summary and picture from a result file."""
    found = by_config(_report.read(path))
    shown = [(c, found[json.dumps(c.key)]) for c in configs if json.dumps(c.key) in found]
    shown = [(c, arms) for c, arms in shown if set(ARMS) <= arms.keys()]
    if not shown:
        console.print("no complete configuration in", str(path))
        raise typer.Exit(1)
    measured = all(arms[BASELINE]["n"] > 0 for _, arms in shown)
    console.print(_table(shown, measured))
    _print_summary(shown, measured)
    picture = path.with_suffix(".png")
    rows = [
        {
            "flop_per_byte": arms[BASELINE]["flops"] / arms[BASELINE]["egress_bytes"],
            "speedup": arms[BASELINE]["us_median"] / arms["planner"]["us_median"],
            "ceiling": arms[BASELINE]["us_median"] / arms[BASELINE]["ceiling_us"],
            "model": config.model,
        }
        for config, arms in shown
    ]
    _sweep.picture(rows, title, picture, lambda row: str(row["model"]))
    console.print(f"results {path}\npicture {picture}")


def _table(shown: list[tuple[Config, dict[str, dict[str, Any]]]], measured: bool) -> Table:
    kind = "measured (predicted)" if measured else "predicted"
    title = f"MegaMoE on {shown[0][0].world} ranks, us, {kind}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("model", no_wrap=True)
    for name in ("T", "remote", "routing", "max/\nmean"):
        table.add_column(name, justify="right")
    for arm in ARMS:
        table.add_column(arm.replace("interleaved", "interl.").replace("/", "\n"), justify="right")
    for name in (
        "wave st/\ninterl. st",
        "wave st/\nplanner",
        "ceiling\nus",
        "by",
        "ceiling/\nplanner",
    ):
        table.add_column(name, justify="right")
    for config, arms in shown:
        base, best = arms[BASELINE], arms["planner"]
        cells = [config.model, str(config.tokens), f"{config.remote_share:g}", config.routing]
        cells.append(f"{base['load_max_over_mean']:.1f}")
        for arm in ARMS:
            text = f"{arms[arm]['us_median']:.0f}"
            cells.append(f"{text} ({arms[arm]['predicted_us']:.0f})" if measured else text)
        cells += [
            f"{base['us_median'] / arms['interleaved/st']['us_median']:.2f}x",
            f"{base['us_median'] / best['us_median']:.2f}x",
            f"{base['ceiling_us']:.0f}",
            base["ceiling_by"],
            f"{base['ceiling_us'] / best['us_median']:.0%}",
        ]
        wrong = measured and not all(arms[arm]["ok"] for arm in ARMS)
        table.add_row(*cells, style="red" if wrong else None)
    return table


def _print_summary(shown: list[tuple[Config, dict[str, dict[str, Any]]]], measured: bool) -> None:
    kind = "measured" if measured else "predicted, not measured"
    names = [config.name for config, _ in shown]
    times = [{arm: arms[arm]["us_median"] for arm in arms} for _, arms in shown]
    first = shown[0][1][BASELINE]
    laws = sorted({f"{config.routing}: {config.law_text}" for config, _ in shown})
    console.print(
        f"{len(shown)} configurations, {kind}; "
        f"the machine's rates: profile {first['profile']} ({first['provenance']}).\n"
        f"  routing is drawn, not recorded from a model; {'; '.join(laws)}"
    )
    comparisons = [(BASELINE, arm) for arm in ARMS if arm != BASELINE] + [("wave", "interleaved")]
    if all("serial" in row for row in times):
        comparisons.append(("serial", "planner"))
    for baseline, arm in comparisons:
        result = _sweep.summarise(times, names, baseline, arm)
        console.print(
            f"  {arm} over {baseline}: geometric mean {result.mean:.3f}x, "
            f"best {result.best[0]:.2f}x ({result.best[1]}), "
            f"worst {result.worst[0]:.2f}x ({result.worst[1]}), {len(result.regressions)} below 1"
        )
        if arm == "planner" and measured:
            for ratio, name in result.regressions:
                console.print(f"    regression {ratio:.3f}x {name}")
    alone = [{arm: arms[arm].get("alone_us") for arm in ARMS} for _, arms in shown]
    both = [(row, name) for row, name in zip(alone, names, strict=True) if None not in row.values()]
    if both:
        result = _sweep.summarise(*zip(*both, strict=True), BASELINE, "planner")
        console.print(
            f"  each following itself, planner over {BASELINE}: geometric mean {result.mean:.3f}x, "
            f"worst {result.worst[0]:.2f}x ({result.worst[1]}), {len(result.regressions)} below 1"
        )
    for label, chosen in (("all", shown), ("held-out", [s for s in shown if s[0].held_out])):
        if chosen:
            console.print(f"  planner's regret, {label}: {_regret_text(chosen)}")
    attained = sorted(
        arms[BASELINE]["ceiling_us"] / arms["planner"]["us_median"] for _, arms in shown
    )
    console.print(
        f"  planner's choice reaches {attained[len(attained) // 2]:.0%} of the ceiling (median)"
    )
    if measured:
        errors = sorted(
            abs(a["predicted_us"] / a["us_median"] - 1.0)
            for _, arms in shown
            for name, a in arms.items()
            if name in ARMS
        )
        console.print(f"  prediction error {errors[len(errors) // 2]:.1%} (median)")


def _regret_text(shown: list[tuple[Config, dict[str, dict[str, Any]]]]) -> str:
    """How much longer the planner's choice takes than the best arm of each configuration."""
    regrets = sorted(
        (arms["planner"]["us_median"] / min(arms[arm]["us_median"] for arm in ARMS) - 1.0, c.name)
        for c, arms in shown
    )
    worst, name = regrets[-1]
    return f"median {regrets[len(regrets) // 2][0]:.1%}, worst {worst:.1%} ({name})"


def run_predictions(
    configs: list[Config], profile: machine.MachineProfile, path: pathlib.Path, resume: bool
) -> None:
    """Simulate every arm of every configuration that the file lacks."""
    done = by_config(_report.read(path)) if resume else {}
    writer = _report.ResultWriter(path, append=resume)
    with progress_bar() as progress:
        task = progress.add_task("predicting", total=len(configs))
        for config in configs:
            progress.update(task, description=f"predicting {config.name}")
            if not is_complete(done.get(json.dumps(config.key), {}), measured=False):
                for row in predicted_rows(config, profile):
                    writer.write(row)
            progress.advance(task)


def progress_bar() -> Progress:
    """Progress with time left."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
    )


def select(configs: list[Config], quick: bool, part: str | None) -> list[Config]:
    """Configurations of this run."""
    chosen = configs[::7] if quick else configs
    if part in (None, "trials"):
        return chosen
    try:
        index, count = (int(word) for word in part.split("/"))
    except ValueError:
        raise typer.BadParameter(f"expected i/n, e.g. 1/4, got {part}") from None
    if not 1 <= index <= count:
        raise typer.BadParameter(f"expected 1 <= i <= n, got {part}")
    return chosen[index - 1 :: count]


def configs_named(configs: list[Config], only: str | None) -> list[Config]:
    """Those whose numbers `only` lists; all of them for None and "predict"."""
    if only in (None, "predict"):
        return configs
    try:
        return [configs[int(number)] for number in only.split(",")]
    except (ValueError, IndexError):
        expected = f"predict or numbers of 0 to {len(configs) - 1}"
        raise typer.BadParameter(f"only: expected {expected}, got {only}") from None


def merge(name: str, folder: pathlib.Path) -> pathlib.Path:
    """Concatenate the parts of a run into one file."""
    parts = sorted(folder.glob(f"{name}.part-*.jsonl"))
    if not parts:
        raise typer.BadParameter(f"no parts {name}.part-*.jsonl in {folder}")
    path = folder / f"{name}.jsonl"
    path.write_text("".join(p.read_text(encoding="utf-8") for p in parts), encoding="utf-8")
    return path


def relabel(path: pathlib.Path, profile: machine.MachineProfile) -> pathlib.Path:
    """Rewrite a file of measurements with the planner and the simulator as they are now."""
    import _label

    lines = _label.relabel(list(_report.read(path)), profile)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def _real_layer() -> bool:
    import _layer

    start = time.perf_counter()
    console.print(
        f"one small real layer on the CPU, {_layer.WORLD} processes, {_layer.SHAPE}, "
        f"{_layer.TOKENS} tokens per rank ..."
    )
    check = _layer.check_layer()
    console.print(
        f"  against the reference: {check.difference}; wave and interleaved "
        f"{'agree bit for bit' if check.same_bits else 'DIFFER'}; workspace {check.backend}, "
        f"{time.perf_counter() - start:.1f} s"
    )
    return check.ok


def main(
    quick: Annotated[bool, typer.Option(help="Every seventh configuration only.")] = False,
    part: Annotated[
        str | None,
        typer.Option(
            help="i/n: the i-th of n parts. merge: report from all parts. label: report with the "
            "planner and the simulator as they are now. trials: with plans beside the planner's."
        ),
    ] = None,
    resume: Annotated[bool, typer.Option(help="Keep what the result file has.")] = False,
    only: Annotated[
        str | None,
        typer.Option(
            help="predict: no GPU even where there is one, no real layer. Or numbers of "
            "configurations, e.g. 3,17."
        ),
    ] = None,
    record: Annotated[
        bool, typer.Option(help="Write to benchmarks/results/ instead of build/results/.")
    ] = False,
    profile: Annotated[str | None, typer.Option(help="Profile name or JSON file.")] = None,
    pairs: Annotated[
        tuple[int, int],
        typer.Option(help="Samples per arm; rounds with every plan of the grid (0: none)."),
    ] = (20, 3),
    budget_s: Annotated[float, typer.Option(help="Stop before a configuration after this.")] = 480,
) -> None:
    """Run the sweep; see the text at the top of this file."""
    configs = _sweep.load_configs()
    wanted = configs_named(configs, only)
    two_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= 2
    measure = two_gpus and only != "predict"
    folder = _report.RESULTS if record else _report.LOCAL_RESULTS
    used = machine.load_here(profile) if measure else machine.load(profile)
    name = "sweep_84_quick" if quick else "sweep_84"
    if not measure:
        name += "_predicted"
    if part in ("merge", "label"):
        path = merge(name, folder) if part == "merge" else relabel(folder / "sweep_84.jsonl", used)
        report(path, configs, f"{path.stem}: planner over wave with plain stores")
        return
    suffix = {None: "", "trials": ".trials"}.get(part, f".part-{str(part).replace('/', '-of-')}")
    path = folder / f"{name}{suffix}.jsonl"
    chosen = select(wanted, quick, part)
    console.print(
        f"profile {used.name} ({used.provenance}): {used.source}", style="dim", highlight=False
    )
    if measure:
        import _sweep_gpu

        job = _sweep_gpu.Job(chosen, used, path, resume, *pairs, budget_s, part == "trials")
        _sweep_gpu.launch(job)
    else:
        console.print("No pair of GPUs: every time below is PREDICTED by the simulator.")
        run_predictions(chosen, used, path, resume)
    ok = measure or only is not None or _real_layer()
    kind = "measured" if measure else f"PREDICTED, profile {used.name} ({used.provenance})"
    report(path, configs, f"planner's choice over Expert-Wave with plain stores, {kind}")
    if not ok:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
