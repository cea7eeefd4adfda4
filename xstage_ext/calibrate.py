"""`xstage calibrate`: measure this machine's T0, R, Q and shadow, and write a profile.

Two minutes on two GPUs. The leading rank measures bursts to the next rank, alone and with all ranks
sending; every quantity is found by more than one route where there is one, with bootstrap
intervals. Points that `xstage validate` predicts are not among those that are fitted.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import pathlib
import random
import sys
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from . import _calibration_report, _measure, _pictures, _profile_fit, machine
from ._gpu_facts import complaints
from ._json import dumps
from ._measure import Row
from ._profile_fit import MECHANISMS, PROBES, Finding
from ._session import Session, on_all_gpus
from .burst import Point
from .errors import CalibrationError, ProfileError
from .machine import MachineProfile

KIB = 1024
FIT_BYTES = (1 * KIB, 2 * KIB, 8 * KIB, 32 * KIB, 64 * KIB, 128 * KIB)
LONG_BYTES = 4096 * KIB
"""Bursts of so few producers that none of the others saturates them."""
SHADOW_BYTES = (8 * KIB, 32 * KIB, 64 * KIB)
SHADOW_DELAYS_US = (0.3, 1.0, 2.0, 4.0, 8.0, 16.0)
ROUNDS = 3


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Everything a calibration found.

    Attributes
    ----------
    profile : MachineProfile
    rows : list of dict
        Measurements, as `_measure` describes them.
    findings : list of Finding
        Every estimate by every route.
    environment : dict
        GPUs, driver, clocks, power, links, command, date.
    shadow_errors : dict
        Median relative error of each shadow fit inside the shadow.
    """

    profile: MachineProfile
    rows: list[Row]
    findings: list[Finding]
    environment: dict[str, Any]
    shadow_errors: dict[str, float]

    def report(self) -> str:
        """Everything in words and tables (Markdown)."""
        return _calibration_report.markdown(
            self.profile, self.rows, self.findings, self.environment, self.shadow_errors
        )

    def save(self, path: pathlib.Path, pictures: bool = True) -> list[pathlib.Path]:
        """Write the profile, the raw measurements beside it, and the pictures."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.profile.save(path)
        raw = path.with_name(f"{path.stem}.calibration.json")
        record = {
            "environment": self.environment,
            "findings": [finding.asdict() for finding in self.findings],
            "shadow_errors": self.shadow_errors,
            "rows": self.rows,
        }
        raw.write_text(_json_lines(record), encoding="utf-8")
        report = path.with_name(f"{path.stem}.calibration.md")
        report.write_text(self.report(), encoding="utf-8")
        written = [path, raw, report]
        if pictures:
            written += _pictures.draw_all(self.profile, self.rows, path.with_suffix(""))
        return written


def _rounded(value: Any) -> Any:
    """Floats to five significant digits: more than any of them is worth."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return value


def _json_lines(record: dict[str, Any]) -> str:
    """JSON with one finding or row per line, so that differences can be read."""
    parts = []
    for key, value in record.items():
        if isinstance(value, list):
            inner = ",\n ".join(dumps(_rounded(item)) for item in value)
            parts.append(f'"{key}": [\n {inner}\n]')
        else:
            parts.append(f'"{key}": {dumps(value, indent=1)}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def producers_for(num_sms: int) -> tuple[int, ...]:
    """Numbers of producers that are fitted."""
    return (1, 2, 4, 8, round(num_sms / 4), num_sms // 2, num_sms)


def fills_the_link(K: int, num_sms: int) -> bool:
    """Whether K producers surely send faster than the link drains: a quarter of the SMs do."""
    return num_sms // 4 <= K


def drained_bytes(K: int, num_sms: int) -> list[int]:
    """Sizes beyond `FIT_BYTES` whose time until visible is long enough for a slope of 1%.

    Volumes are half, five eighths and all of what all SMs send with 128 KiB each. The slope of
    producers that do not fill the link needs no more.
    """
    if not fills_the_link(K, num_sms):
        return []
    most = num_sms * FIT_BYTES[-1] // K
    sizes = {most * part // 8 // (8 * KIB) * (8 * KIB) for part in (4, 5, 8)}
    return sorted(sizes - set(FIT_BYTES))


def long_gap_us(K: int, nbytes: int) -> float:
    """A gap in which the pipe runs empty."""
    return 4.0 + 2.0 * K * nbytes / 300e3


def control(mechanism: str, K: int, nbytes: int) -> Point:
    """The same instructions on local memory.

    Gaps are random, each producer its own: in step all SMs would meet at the L2 cache, which takes
    64 KiB from each of 132 SMs more slowly than they issue them.
    """
    gap = long_gap_us(K, nbytes)
    gaps = np.random.default_rng(K).uniform(0.5 * gap, 1.5 * gap, size=(K, 64))
    return Point(mechanism, K, nbytes, gap_us=gap, gaps_us=gaps, local=True)


def fitted_points(num_sms: int) -> list[tuple[str, Point]]:
    """(kind, point) of everything that the leading rank measures alone, without the shadow."""
    points: list[tuple[str, Point]] = []
    producers = producers_for(num_sms)
    for mechanism in MECHANISMS:
        for nbytes in FIT_BYTES:
            for K in producers:
                for fence in (False, True):
                    points.append(("isolated", Point(mechanism, K, nbytes, fence=fence)))
                gap = long_gap_us(K, nbytes)
                points.append(("plateau", Point(mechanism, K, nbytes, gap_us=gap)))
            for K in (1, round(num_sms / 4), num_sms):
                points.append(("control", control(mechanism, K, nbytes)))
        for K in producers:
            for nbytes in (32 * KIB, 64 * KIB, 128 * KIB):
                points.append(("train", Point(mechanism, K, nbytes)))
            if not fills_the_link(K, num_sms):
                points.append(("long", Point(mechanism, K, LONG_BYTES)))
            for nbytes in drained_bytes(K, num_sms):
                points.append(("isolated", Point(mechanism, K, nbytes, fence=True)))
        for nbytes in (32 * KIB, 64 * KIB):
            for gap in (2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0, 17.0, 20.0, 25.0, 30.0):
                points.append(("train", Point(mechanism, num_sms, nbytes, gap_us=gap)))
    return points


def measure(session: Session, progress: _measure.Progress) -> tuple[list[Row], dict[str, float]]:
    """Run the protocol. Collective; the leading rank's rows and local rates count."""
    bench = session.bench
    rows: list[Row] = []
    rates: dict[str, float] = {}
    bench.calibrate_clock()
    progress("copy engine, matrix products, memory")
    rates["copy_engine_GBps"] = _measure.copy_engine_GBps(session)
    if session.leads:
        _measure.wake_link(bench)
        rates["matrix_bf16_tflops"] = _measure.matrix_tflops(session.device)
        rates["hbm_GBps"] = _measure.memory_GBps(session.device)
        rates["gap_shortest_us"], rates["gap_late_us"] = _measure.gap_overhead(bench)
        for number in range(ROUNDS):
            points = fitted_points(bench.num_sms)
            random.Random(number).shuffle(points)
            progress(f"bursts and trains, one direction, round {number + 1} of {ROUNDS}")
            for kind, point in points:
                run = _measure.isolated if kind == "isolated" else _measure.train
                rows.append(run(bench, point) | {"kind": kind, "round": number})
        progress("the shadow of a burst")
        rows += _shadow_rows(session)
        pull = Point("pull", bench.num_sms, 16 * KIB)
        rates["pull_GBps"] = _measure.train(bench, pull, "pull")["R_GBps"]
    session.barrier()
    progress("all ranks at once")
    for mechanism in MECHANISMS:
        for K in (round(bench.num_sms / 4), bench.num_sms):
            for nbytes in (32 * KIB, 64 * KIB):
                rows.append(_measure.train_everywhere(session, Point(mechanism, K, nbytes)))
    return rows, rates


def _shadow_rows(session: Session) -> list[Row]:
    bench = session.bench
    rows: list[Row] = []
    for probe in PROBES:
        rows += _measure.shadow_rows(bench, Point("st", 0, 4096), probe, SHADOW_DELAYS_US)
        for mechanism in MECHANISMS:
            for K in (round(bench.num_sms / 4), bench.num_sms // 2, bench.num_sms):
                for nbytes in SHADOW_BYTES:
                    point = Point(mechanism, K, nbytes)
                    rows += _measure.shadow_rows(bench, point, probe, SHADOW_DELAYS_US)
    return rows


def fit(
    rows: list[Row], rates: dict[str, float], environment: dict[str, Any], name: str
) -> Calibration:
    """Turn measurements into a profile. Pure: tests feed it rows of a known law.

    Parameters
    ----------
    rows, rates
        As `measure` returns them.
    environment : dict
        `gpu` (fields of machine.Gpu), `world`, `command`, `date`, and whatever else is to be kept.
    name : str
        Name of the profile.
    """
    # As they are kept, so that a refit finds the same.
    rows = _rounded(rows)
    mechanisms, shadows, findings, errors = {}, {}, [], {}
    for mechanism in MECHANISMS:
        mechanisms[mechanism], found = _profile_fit.fit_mechanism(rows, mechanism)
        findings += found
        for probe in PROBES:
            key = f"{mechanism}/{probe}"
            shadows[key], errors[key] = _profile_fit.fit_shadow(
                rows, mechanism, probe, mechanisms[mechanism].R_GBps
            )
    gpu = machine.Gpu(**environment["gpu"])
    base = _base_rates(gpu.name)
    measured = dataclasses.replace(
        base,
        matrix_tflops=base.matrix_tflops | {"bf16": round(rates["matrix_bf16_tflops"], 1)},
        hbm_GBps=round(rates["hbm_GBps"], 1),
        pull_GBps=round(rates["pull_GBps"], 1),
        copy_engine_GBps=round(rates["copy_engine_GBps"], 1),
    )
    profile = MachineProfile(
        schema=machine.SCHEMA,
        name=name,
        provenance="measured",
        source=(
            "xstage calibrate: bursts of one rank to the next, alone and with all ranks sending. "
            "Measured too: bf16 matrix rate, memory and copy-engine rates, rate of pulls. Taken "
            "over from the bundled profile, not measured: rates of other dtypes, L2 rate, tile "
            "overhead, launch, flag."
        ),
        world=int(environment["world"]),
        gpu=gpu,
        mechanisms=mechanisms,
        shadow=shadows,
        rates=measured,
        command=environment["command"],
        date=environment["date"],
    )
    return Calibration(profile, rows, findings, environment | {"rates": rates}, errors)


def _base_rates(gpu_name: str) -> machine.Rates:
    """Rates of the bundled profile of this GPU, else of the default one."""
    try:
        return machine.load(gpu_name=gpu_name).rates
    except ProfileError:
        return machine.load("h100").rates


def environment_of(session: Session) -> dict[str, Any]:
    """Facts about machine and command that belong to every measurement."""
    import torch

    facts = session.facts[0]
    properties = torch.cuda.get_device_properties(session.device)
    links = facts.links_GBps
    return {
        "gpu": {
            "name": facts.name,
            "capability": f"{properties.major}.{properties.minor}",
            "num_sms": properties.multi_processor_count,
            "sm_clock_mhz": round(session.bench.clock_mhz, 1),
            "power_limit_w": facts.power_limit_w or 0.0,
            "l2_bytes": properties.L2_cache_size,
            "smem_bytes": getattr(properties, "shared_memory_per_block_optin", 0),
            "link": f"NV{len(links)}" if links else "none seen",
            "link_nominal_GBps": round(sum(links), 1),
            "driver": facts.driver,
        },
        "gpus": [other.asdict() for other in session.facts],
        "world": session.world,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "command": " ".join(["xstage", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def warn_when_busy(session: Session, console: Console) -> list[str]:
    """Say who else uses the GPUs; returns the reasons."""
    reasons = [reason for facts in session.facts for reason in complaints(facts)]
    if session.leads:
        for reason in reasons:
            console.print(f"[yellow]warning:[/] {reason}; the numbers will be off")
    return reasons


def _on_rank(session: Session, name: str) -> Calibration | None:
    console = Console(stderr=True, quiet=not session.leads)
    busy = warn_when_busy(session, console)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not session.leads) as bar:
        task = bar.add_task("waking the GPUs up", total=None)
        rows, rates = measure(session, lambda text: bar.update(task, description=text))
        if not session.leads:
            return None
        bar.update(task, description="fitting")
        return fit(rows, rates, environment_of(session) | {"busy": busy}, name)


def run(out: pathlib.Path) -> Calibration | None:
    """Measure on all visible GPUs and write the profile; None on ranks that do not lead."""
    calibration = on_all_gpus(_on_rank, out.stem)
    if calibration is None:
        return None
    for path in calibration.save(out):
        print(path)
    print_summary(calibration, Console())
    return calibration


def refit(raw: pathlib.Path, out: pathlib.Path) -> Calibration:
    """Fit again from the raw measurements that an earlier calibration kept."""
    expected = f"{raw}: expected a .calibration.json file of `xstage calibrate`"
    try:
        record = json.loads(raw.read_text(encoding="utf-8"))
        environment = record["environment"]
        # What was no number was written as null.
        rows = [{k: np.nan if v is None else v for k, v in dict(r).items()} for r in record["rows"]]
        calibration = fit(rows, environment["rates"], environment, out.stem)
    except OSError as error:
        raise CalibrationError(f"{expected}; {error.strerror or error}") from None
    except (ValueError, TypeError, RecursionError) as error:
        raise CalibrationError(f"{expected}, got something else ({error})") from None
    except KeyError as error:
        raise CalibrationError(f"{expected}, no {error}") from None
    calibration.save(out)
    return calibration


def print_summary(calibration: Calibration, console: Console) -> None:
    """The numbers that people ask for, and how far the routes to them differ."""
    profile = calibration.profile
    most = profile.gpu.num_sms
    table = Table(title=f"{profile.gpu.name} x {profile.world}, {most} producers")
    for head in ("mechanism", "T0 32 KiB", "R", "R both ways", "Q", "Q slowest", "fence"):
        table.add_column(head, justify="right")
    for name, mechanism in profile.mechanisms.items():
        both = mechanism.R_both_GBps
        table.add_row(
            name,
            f"{float(mechanism.T0_us(most, 32 * KIB)):.2f} us",
            f"{float(mechanism.R_GBps(most)):.0f} GB/s",
            "-" if both is None else f"{float(both(most)):.0f} GB/s",
            f"{float(mechanism.Q_bytes(most)) / 1e6:.2f} MB",
            f"{float(mechanism.Q_slowest_bytes(most)) / 1e6:.2f} MB",
            f"{mechanism.visibility_us:.2f} us",
        )
    console.print(table)
    for name in ("R_GBps", "Q_bytes", "T0_us"):
        gaps = _profile_fit.routes_differ(calibration.findings, f"/{name}@")
        if gaps:
            worst = max(gaps, key=lambda quantity: gaps[quantity])
            console.print(f"{name}: two routes differ by at most {gaps[worst]:.1%} ({worst})")
    worst = max(calibration.shadow_errors, key=lambda key: calibration.shadow_errors[key])
    console.print(
        f"shadow: median error of the fit at most {calibration.shadow_errors[worst]:.0%} ({worst})"
    )
