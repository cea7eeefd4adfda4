"""84 mixture-of-experts layers: wave against interleaved, predicted and, with GPUs, measured.

    python benchmarks/sweep_84.py                  # no GPU: predictions, and one small real layer
    python benchmarks/sweep_84.py --quick          # every seventh configuration
    python benchmarks/sweep_84.py --part 1/4       # with two GPUs: measure a quarter
    python benchmarks/sweep_84.py --part merge     # one report from all parts

Every figure without a GPU is a prediction by the simulator and marked as such. Results are JSON
lines under build/results/ (with --record those of the repository, benchmarks/results/); a report as
text and a picture are made from them and lie beside them. An interrupted run goes on where it
stopped with --resume, which keeps what was measured at this commit, with this profile, rightly and
often enough.

Exit status: 1 when results were wrong; 2 for arguments that do not fit; 3 when configurations are
left, since the time budget ended or a part was cut short (torchrun makes 1 of it).
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import time
from collections.abc import Sequence
from typing import Annotated, Any

import _plans
import _report
import _sweep
import _sweep_report
import torch
import typer
from _sweep import ARMS, Config
from _sweep_report import Wanted, by_config, console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from xstage_ext import machine

FACTS = (
    "held_out", "load_max_over_mean", "remote_share_drawn", "least_bytes", "flops", "ceiling_us",
    "ceiling_by", "compute_floor_us", "link_floor_us", "weights_floor_us", "real_link_floor_us",
    "profile", "provenance",
)  # fmt: skip
"""What holds for every arm of a configuration; see `config_facts`."""
PLAN_FIELDS = (
    *("schedule", "store", "dispatch", "lead_blocks", "wave_blocks", "group_blocks"),
    "slice_rows",
)  # fmt: skip
EXIT_LEFT = 3
"""Exit status of a run that leaves configurations."""


def predicted_rows(config: Config, profile: machine.MachineProfile) -> list[_report.Row]:
    """One row per arm, from the simulator."""
    load = _sweep.load_of(config, config.draw())
    rows = []
    for arm in ARMS:
        facts = config_facts(config, load.of(arm), profile)
        plan, result = _sweep.predict(config, load, arm, profile)
        rows.append(
            _report.Row.predicted(
                "megamoe",
                arm,
                config.key,
                config.world,
                result.total_us,
                tflops=load.flops / result.total_us / 1e6,
                egress_GBps=load.egress_bytes(plan) / result.total_us / 1e3,
                extra=facts
                | {
                    "egress_bytes": load.egress_bytes(plan),
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
    """What holds for every arm of a configuration, but for the bytes that `two ranks` must send."""
    return {
        "held_out": config.held_out,
        "load_max_over_mean": load.load_max_over_mean,
        "remote_share_drawn": load.remote_share,
        "least_bytes": load.least_bytes,
        "flops": load.flops,
        **ceiling_facts(load, profile),
        "real_link_floor_us": _sweep.real_link_us(config, profile),
        "profile": profile.name,
        "provenance": profile.provenance,
    }


def ceiling_facts(
    load: _sweep.Load, profile: machine.MachineProfile, matrix_tflops: float | None = None
) -> dict[str, Any]:
    """The ceiling's part of them; see `_sweep.ceiling_of`."""
    ceiling = _sweep.ceiling_of(load, profile, matrix_tflops)
    return {
        "ceiling_us": ceiling.us,
        "ceiling_by": ceiling.binding,
        "compute_floor_us": ceiling.compute_us,
        "link_floor_us": ceiling.link_us,
        "weights_floor_us": ceiling.weights_us,
    }


def run_predictions(
    configs: list[Config], profile: machine.MachineProfile, path: pathlib.Path, resume: bool
) -> None:
    """Simulate every arm of every configuration that the file lacks."""
    wanted = Wanted(0, profile.name)
    done = by_config(_report.read(path)) if resume else {}
    writer = _report.ResultWriter(path, append=resume)
    with progress_bar() as progress:
        task = progress.add_task("predicting", total=len(configs))
        for config in configs:
            progress.update(task, description=f"predicting {config.name}")
            if not wanted.are_met(done.get(json.dumps(config.key))):
                writer.replace(*predicted_rows(config, profile))
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
    """Those whose numbers `only` lists, each once; all of them for None and "predict"."""
    if only in (None, "predict"):
        return configs
    numbers = [int(word) if word.strip().isdecimal() else -1 for word in str(only).split(",")]
    if not all(0 <= number < len(configs) for number in numbers):
        expected = f"predict or numbers of 0 to {len(configs) - 1}"
        raise typer.BadParameter(f"only: expected {expected}, got {only}")
    return [configs[number] for number in dict.fromkeys(numbers)]


def file_name(name: str, part: str | None, only: str | None) -> str:
    """Of a run's results: what measures a choice of configurations replaces no others' results."""
    if part is not None:
        name += ".trials" if part == "trials" else f".part-{part.replace('/', '-of-')}"
    if only not in (None, "predict"):
        name += ".only-" + "-".join(word.strip() for word in str(only).split(","))
    return name + ".jsonl"


def parts_of(name: str, folder: pathlib.Path) -> dict[int, pathlib.Path]:
    """Files of a run's parts by number; BadParameter where some are missing or of another n."""
    parts: dict[int, dict[int, pathlib.Path]] = {}
    for path in sorted(folder.glob(f"{name}.part-*.jsonl")):
        match = re.fullmatch(r"\.part-(\d+)-of-(\d+)\.jsonl", path.name.removeprefix(name))
        if match:
            parts.setdefault(int(match[2]), {})[int(match[1])] = path
    if len(parts) > 1:
        counts = " and ".join(map(str, sorted(parts)))
        raise typer.BadParameter(
            f"merge: expected parts of one n, got parts of {counts} ({name}.part-* in {folder})"
        )
    for count, found in parts.items():
        missing = [f"{i}/{count}" for i in range(1, count + 1) if i not in found]
        if missing:
            raise typer.BadParameter(f"merge: {name} in {folder} lacks part {', '.join(missing)}")
    return parts.popitem()[1] if parts else {}


def merge(names: Sequence[str], folder: pathlib.Path) -> pathlib.Path:
    """Put the parts of a run into one file: of the first name that has parts."""
    for name in names:
        lines = [line for part in parts_of(name, folder).values() for line in _report.read(part)]
        if not lines:
            continue
        profiles = {str(line["profile"]) for line in lines if "profile" in line}
        if len(profiles) > 1:
            raise typer.BadParameter(
                f"merge: expected parts of one profile, got {', '.join(sorted(profiles))}"
            )
        path = folder / f"{name}.jsonl"
        _report.rewrite(path, lines)
        return path
    raise typer.BadParameter(f"merge: no parts {' or '.join(names)}.part-i-of-n.jsonl in {folder}")


def relabel(path: pathlib.Path, profile: machine.MachineProfile) -> pathlib.Path:
    """Rewrite a file of measurements with the planner and the simulator as they are now."""
    import _label

    lines = list(_report.read(path))
    if not any(line["op"] == _plans.OP for line in lines):
        raise typer.BadParameter(f"label: expected measured plans, got none in {path}")
    _report.rewrite(path, _label.relabel(lines, profile))
    return path


def finish(path: pathlib.Path, shown: list[Config], run: list[Config], wanted: Wanted) -> None:
    """Report a file, then end with the status of the run's configurations."""
    _sweep_report.report(path, shown)
    found = by_config(_report.read(path))
    mine = [(config.name, found.get(json.dumps(config.key))) for config in run]
    wrong = [name for name, one in mine if one is not None and one.wrong]
    left = [name for name, one in mine if not wanted.are_met(one) and name not in wrong]
    if left:
        console.print(f"{len(left)} of {len(run)} configurations are left: go on with --resume")
    if wrong:
        console.print(f"WRONG results in {len(wrong)} configurations: {'; '.join(wrong)}")
    if wrong or left:
        raise typer.Exit(1 if wrong else EXIT_LEFT)


def profile_of(name: str | None, measure: bool) -> machine.MachineProfile:
    """The profile that is asked for: of this machine where it measures."""
    try:
        return machine.load_here(name) if measure else machine.load(name)
    except machine.ProfileError as error:
        raise typer.BadParameter(str(error)) from None


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


def samples(pairs: tuple[int, int]) -> tuple[int, int]:
    """`--pairs`: without a sample nothing is measured."""
    if pairs[0] < 1 or pairs[1] < 0:
        raise typer.BadParameter(
            f"expected 1 or more samples and 0 or more rounds, got {pairs[0]} {pairs[1]}"
        )
    return pairs


def seconds(budget_s: float) -> float:
    """`--budget-s`; `inf` is no limit."""
    if not budget_s >= 0.0:
        raise typer.BadParameter(f"expected 0 seconds or more, got {budget_s}")
    return budget_s


Pairs = Annotated[
    tuple[int, int],
    typer.Option(
        help="Samples per arm; rounds with every plan of the grid (0: none).", callback=samples
    ),
]
Seconds = Annotated[
    float, typer.Option(help="Begin no configuration after so long.", callback=seconds)
]


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
    pairs: Pairs = (20, 3),
    budget_s: Seconds = 600,
) -> None:
    """Run the sweep; see the text at the top of this file."""
    configs = _sweep.load_configs()
    wanted = configs_named(configs, only)
    two_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= 2
    measure = two_gpus and only != "predict"
    folder = _report.RESULTS if record else _report.LOCAL_RESULTS
    used = profile_of(profile, measure)
    names = ["sweep_84_quick"] if quick else ["sweep_84"]
    names = [f"{names[0]}_predicted"] if only == "predict" else [*names, f"{names[0]}_predicted"]
    if part in ("merge", "label"):
        whole = folder / f"{names[0]}.jsonl"
        path = merge(names, folder) if part == "merge" else relabel(whole, used)
        kind = Wanted(0 if path.stem.endswith("_predicted") else 1)
        finish(path, configs, select(configs, quick, None), kind)
        return
    chosen = select(wanted, quick, part)
    path = folder / file_name(names[0 if measure else -1], part, only)
    console.print(
        f"profile {used.name} ({used.provenance}): {used.source}", style="dim", highlight=False
    )
    if measure:
        import _sweep_gpu

        job = _sweep_gpu.Job(chosen, used, path, resume, *pairs, budget_s, part == "trials")
        needed = dataclasses.replace(job.wanted, since="" if resume else _report.now())
        _sweep_gpu.launch(job)
        finish(path, configs, chosen, needed)
        return
    console.print("No pair of GPUs: every time below is PREDICTED by the simulator.")
    run_predictions(chosen, used, path, resume)
    ok = only is not None or _real_layer()
    finish(path, configs, chosen, Wanted(0, used.name))
    if not ok:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
