"""The `xstage` command: what would you do with this layer here, and why? What is this machine?"""

from __future__ import annotations

import pathlib
import platform
import runpy
import sys
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from . import _binary, _env, machine, simulate
from ._attention_report import AttentionReport
from ._burst_report import beyond_measurement
from ._cli_words import (
    MOST,
    SHAPE_HELP,
    finite,
    head_counts,
    heaviest_rank,
    moe_problem,
    needs_gpu,
    png,
    ranked_moe_problem,
    writable,
)
from ._json import dumps
from ._plan_report import PlanReport, plan_report
from .errors import XStageError
from .model import BurstGap, Regime, burst_shadow
from .planner.attention import MAX_RANKS, even_split
from .planner.attention_problem import AttentionProblem
from .planner.choose import choose
from .planner.dispatch import dispatch_of
from .planner.megamoe import SCHEDULES, STORES
from .version import __version__

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
plan_app = typer.Typer(
    help="What would be done with a layer on a machine, and why.", no_args_is_help=True
)
app.add_typer(plan_app, name="plan")
console = Console()

Profile = Annotated[str | None, typer.Option(help="Name or JSON file of a machine profile.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Picture = Annotated[pathlib.Path | None, typer.Option(help="Write a picture (PNG).", callback=png)]


def _version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit()


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print and end.")
    ] = False,
) -> None:
    """Fused communication and computation on NVLink nodes: plan, predict, measure."""


def _profile(name: str | None) -> machine.MachineProfile:
    """The profile asked for, the one of this GPU, or (without a GPU) the default one."""
    if name is not None:
        return machine.load(name)
    return machine.load_here()


def _print_json(value: Any) -> None:
    typer.echo(dumps(value, indent=1))


def _show(
    report: PlanReport | AttentionReport, as_json: bool, picture: pathlib.Path | None
) -> None:
    if as_json:
        _print_json(report.as_dict())
    else:
        typer.echo(report.text())
    if picture is not None:
        report.picture(picture)
        typer.echo(f"picture {picture}", err=True)


@plan_app.command("moe")
def plan_moe(
    shape: Annotated[str, typer.Argument(help=SHAPE_HELP)],
    tokens: Annotated[int, typer.Option(help="Tokens per rank and call.")],
    world: Annotated[int, typer.Option(help="Ranks of the group.")] = 8,
    remote_share: Annotated[float | None, typer.Option(help="Rows that cross the link.")] = None,
    profile: Profile = None,
    as_json: AsJson = False,
    picture: Picture = None,
) -> None:
    """Plan a mixture-of-experts layer."""
    problem = moe_problem(shape, tokens, world, remote_share)
    _show(plan_report(problem, _profile(profile)), as_json, picture)


@plan_app.command("attention")
def plan_attention(
    heads: Annotated[str, typer.Argument(help="Query heads, or query/key heads, e.g. 40/8.")],
    *,
    head_dim: Annotated[int, typer.Option(min=1, max=MOST, help="Size of a head.")],
    sequence: Annotated[int, typer.Option(max=MOST, help="Rows of the whole sequence.")],
    world: Annotated[int, typer.Option(min=1, max=MAX_RANKS, help="Ranks of the group.")] = 8,
    batch: Annotated[int, typer.Option(min=1, max=MOST, help="Sequences.")] = 1,
    causal: Annotated[bool, typer.Option(help="Causal mask.")] = False,
    profile: Profile = None,
    as_json: AsJson = False,
    picture: Picture = None,
) -> None:
    """Plan attention with its output All-to-All under Ulysses sequence parallelism."""
    query_heads, kv_heads = head_counts(heads)
    if sequence < 1:
        raise typer.BadParameter(f"sequence: expected 1 or more, got {sequence}")
    problem = AttentionProblem(
        heads=query_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rows=even_split(sequence, world),
        batch=batch,
        causal=causal,
    )
    _show(plan_report(problem, _profile(profile)), as_json, picture)


@app.command()
def explain(
    producers: Annotated[
        int, typer.Option(min=1, max=MOST, help="SMs that store at once, K.")
    ] = 132,
    nbytes: Annotated[
        int, typer.Option("--bytes", min=1, max=MOST, help="Bytes per SM and burst, B.")
    ] = 65536,
    gap_us: Annotated[
        float,
        typer.Option("--gap", min=0.0, callback=finite, help="Time between bursts, G, us."),
    ] = 10.0,
    mechanism: Annotated[str, typer.Option(help="st, bulk or tma.")] = "st",
    remote_share: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, callback=finite, help="Share that crosses the link."),
    ] = 1.0,
    profile: Profile = None,
    as_json: AsJson = False,
) -> None:
    """Explain one burst pattern by the Burst-Gap law: regime, stall, and what others would say."""
    used = _profile(profile)
    law = BurstGap.of(used.mechanism(mechanism), producers, nbytes, remote_share=remote_share)
    shadow = burst_shadow(used, mechanism, "bulk_load", producers, nbytes * remote_share)
    values = {
        "V_bytes": float(law.V_bytes),  # type: ignore[arg-type]
        "T0_us": float(law.T0_us),  # type: ignore[arg-type]
        "R_GBps": float(law.R_GBps),  # type: ignore[arg-type]
        "Q_bytes": float(law.Q_bytes),  # type: ignore[arg-type]
        "drain_us": float(law.drain_us),
        "recovery_gap_us": float(law.recovery_gap()),
        "bursts_until_onset": float(law.bursts_until_onset(gap_us)),
        "T_iss_us": float(law.steady(gap_us)),
        "T_iss_free_running_us": float(law.free_running(gap_us)),
        "shadow_of_a_16KiB_load_us": float(shadow),
        "two_term_us": float(law.two_term(gap_us)),
        "rate_only_us": float(law.rate_only(gap_us)),
        "unbounded_async_us": float(law.unbounded_async(gap_us)),
        "completion_coupled_us": float(law.completion_coupled(gap_us)),
    }
    regime = Regime(int(law.regime(gap_us)))
    sentence = {
        Regime.FREE: "free: the stores cost their issue only",
        Regime.DRAIN: "drain-bound: the link fixes the period; a longer gap turns waiting into "
        "work",
        Regime.CAPACITY: "capacity-bound: one burst overfills the pipe; no gap helps, smaller "
        "bursts or fewer SMs at a time do",
    }[regime]
    outside = used.mechanism(mechanism).extrapolates(producers, nbytes)
    if as_json:
        facts = {"regime": regime.name.lower(), "profile": used.name, "extrapolates": outside}
        _print_json(facts | values)
        return
    typer.echo(f"{sentence}. Profile {used.name} ({used.provenance}).")
    for reason in outside:
        typer.echo(f"extrapolated: {reason}")
    for name, value in values.items():
        typer.echo(f"  {name:<28} {value:.6g}")


@app.command("simulate")
def simulate_command(
    shape: Annotated[str, typer.Argument(help=SHAPE_HELP)],
    tokens: Annotated[int, typer.Option(help="Tokens per rank and call.")],
    world: Annotated[int, typer.Option(help="Ranks of the group.")] = 8,
    routing: Annotated[str, typer.Option(help="Law, e.g. balanced or zipf:0.5.")] = "balanced",
    seed: Annotated[int, typer.Option(min=0, help="Of the routing.")] = 0,
    profile: Profile = None,
    as_json: AsJson = False,
) -> None:
    """Simulate every schedule and way to store for a layer; all figures are predictions."""
    used = _profile(profile)
    problem = moe_problem(shape, tokens, world)
    counts, rank = heaviest_rank(problem, routing, seed)
    beyond = beyond_measurement(used, world)
    dispatch = dispatch_of(problem, used)
    rows: list[dict[str, Any]] = []
    for schedule, schedule_name in enumerate(SCHEDULES):
        for store, store_name in enumerate(STORES):
            plan = choose(problem, used, schedule=schedule, store=store).plan
            result = simulate.simulate_megamoe(plan, counts, used, rank=rank)
            rows.append(
                {"schedule": schedule_name, "store": store_name, "total_us": result.total_us}
                | {name: result.mean(name) for name in simulate.WORKER_COLUMNS[:-1]}
                | {"egress_GBps": result.egress_GBps}
            )
    if as_json:
        facts = {"profile": used.name, "provenance": used.provenance, "not_measured": beyond}
        _print_json({"predicted": rows, "dispatch": dispatch} | facts)
        return
    title = f"predicted, {dispatch}, profile {used.name} ({used.provenance})"
    table = Table(title=title, box=None)
    for name in rows[0]:
        head = name.replace("_", "\n")
        table.add_column(head, justify="left" if name in ("schedule", "store") else "right")
    for row in rows:
        # Eighty columns hold a table without tenths of large numbers.
        table.add_row(*(v if isinstance(v, str) else f"{v:.{int(v < 100)}f}" for v in row.values()))
    console.print(table)
    if beyond is not None:
        console.print(beyond)


@app.command()
def info(as_json: AsJson = False) -> None:
    """Versions, libraries, GPUs, profiles and environment: what a bug report needs."""
    gpus = [
        {
            "name": torch.cuda.get_device_name(i),
            "capability": ".".join(map(str, torch.cuda.get_device_capability(i))),
            "peers": [
                j
                for j in range(torch.cuda.device_count())
                if j != i and torch.cuda.can_device_access_peer(i, j)
            ],
        }
        for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    ]
    facts = {
        "xstage_ext": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda of torch": torch.version.cuda,
        "kernels": _binary.CUDA_LIBRARY_ERROR or "loaded",
        "gpus": gpus,
        "profiles": {name: machine.load(name).provenance for name in machine.bundled()},
        "environment": _env.given(),
    }
    if as_json:
        _print_json(facts)
        return
    for name, value in facts.items():
        typer.echo(f"{name}: {value}")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def bench(
    context: typer.Context,
    name: Annotated[
        str | None, typer.Argument(help="Script in benchmarks/, e.g. sweep_84.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Attention layer of a public model, e.g. wan2.2-720p.")
    ] = None,
) -> None:
    """Run a benchmark of the checkout; further arguments go to it."""
    arguments = list(context.args)
    if model is not None:
        arguments = [model, *([name] if name is not None else []), *arguments]
        name = "bench_model"
    folder = pathlib.Path(__file__).resolve().parents[1] / "benchmarks"
    scripts = sorted(p.stem for p in folder.glob("[!_]*.py"))
    if name not in scripts:
        found = ", ".join(scripts) or "none: benchmarks/ is part of the repository, not of a wheel"
        raise typer.BadParameter(f"name: expected one of {found}; got {name or 'none'}")
    sys.argv = [str(folder / f"{name}.py"), *arguments]
    sys.path.insert(0, str(folder))
    runpy.run_path(sys.argv[0], run_name="__main__")


@app.command()
def calibrate(
    out: Annotated[pathlib.Path, typer.Option(help="JSON file to write.")] = pathlib.Path(
        "profile.json"
    ),
    refit: Annotated[
        pathlib.Path | None,
        typer.Option(help="Only fit again, from the .calibration.json of an earlier run."),
    ] = None,
) -> None:
    """Measure T0, R, Q and the shadow of this machine; write a profile and pictures."""
    from . import calibrate as command

    if refit is None:
        needs_gpu("calibrate", "`--refit` fits an earlier run again without one")
        command.run(writable(out))
    else:
        command.print_summary(command.refit(refit, out), console)


@app.command()
def trace(
    shape: Annotated[str, typer.Argument(help=SHAPE_HELP)],
    tokens: Annotated[int, typer.Option(help="Tokens per rank.")] = 4096,
    remote_share: Annotated[float | None, typer.Option(help="Rows that cross the link.")] = None,
    profile: Profile = None,
    out: Annotated[
        pathlib.Path | None, typer.Option(help="Folder for Chrome JSON files and timelines.")
    ] = None,
) -> None:
    """Trace a mixture-of-experts layer on this GPU, or between GPUs under torchrun."""
    from ._trace_moe import ranks, report

    needs_gpu("trace", "`xstage plan moe` predicts without one")
    out = out and writable(out / "trace.json").parent
    with ranks() as (rank, world):
        problem = ranked_moe_problem("trace", shape, tokens, world, remote_share)
        text = report(problem, _profile(profile), rank, out)
        if rank == 0:
            typer.echo(text)


@app.command()
def tune(
    shape: Annotated[str, typer.Argument(help=SHAPE_HELP)],
    tokens: Annotated[int, typer.Option(help="Tokens per rank and call.")],
    out: Annotated[
        pathlib.Path, typer.Option(help="Table to write or to add to; XSTAGE_PLANS names it.")
    ] = pathlib.Path("plans.json"),
    remote_share: Annotated[float | None, typer.Option(help="Rows that cross the link.")] = None,
    pairs: Annotated[int, typer.Option(min=1, help="Samples per plan.")] = 20,
    profile: Profile = None,
) -> None:
    """Time the planner's plans for a layer on this GPU, or between GPUs under torchrun."""
    from . import _tune_moe
    from ._trace_moe import MoETensors, ranks
    from .planner import measured

    needs_gpu("tune", "`xstage plan moe` ranks plans without one")
    out = writable(out)
    measured.check_writable(out)
    with ranks() as (rank, world):
        problem = ranked_moe_problem("tune", shape, tokens, world, remote_share)
        used = machine.load_here(profile)
        tensors = MoETensors.random(problem, rank)
        entry = _tune_moe.tune(problem, used, tensors, pairs=pairs)
        if rank == 0:
            typer.echo(_tune_moe.text(problem, used, entry))
            measured.add(out, entry)
            typer.echo(f"table {out}; calls use it with XSTAGE_PLANS={out}", err=True)


@app.command()
def validate(
    out: Annotated[pathlib.Path, typer.Option(help="Folder for report and pictures.")] = (
        pathlib.Path("validation")
    ),
    profile: Profile = None,
) -> None:
    """Write down what the law predicts for bursts that were not fitted, then measure them."""
    from .validate import run

    needs_gpu("validate", "`xstage explain` predicts without one")
    run(writable(out / "validation.md").parent, profile)


@app.command()
def doctor(profile: Profile = None) -> None:
    """Compare this machine with its profile, and say in words what is off."""
    from .doctor import report, run

    if not report(run(profile), console):
        raise typer.Exit(1)


def main() -> None:
    """Entry point; errors of the package are one line, not a traceback."""
    try:
        app()
    except (XStageError, OSError, MemoryError) as error:
        typer.echo(f"error: {str(error) or 'out of memory'}", err=True)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
