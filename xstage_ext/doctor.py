"""`xstage doctor`: a 20-second check of a machine against its profile, in words."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import torch
from rich.console import Console

from . import _measure, machine
from ._gpu_facts import GpuFacts, complaints, gpu_facts
from ._session import Session, on_all_gpus
from .burst import Point
from .errors import ProfileError, XStageError
from .machine import MachineProfile

KIB = 1024
Verdict = Literal["ok", "warning", "wrong"]


@dataclasses.dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    what: str
    verdict: Verdict
    text: str


def compare(
    what: str, seen: float, expected: float, unit: str, hint: str, more_is_better: bool = True
) -> Check:
    """`ok` within 5% of the profile, `wrong` when worse by more than 15%, else `warning`."""
    ratio = seen / expected if expected else float("inf")
    shortfall = 1.0 - ratio if more_is_better else ratio - 1.0
    digits = 0 if expected >= 100 else 2
    text = f"{seen:.{digits}f} {unit}, profile {expected:.{digits}f} {unit}"
    if shortfall <= 0.05:
        return Check(what, "ok", text)
    verdict: Verdict = "wrong" if shortfall > 0.15 else "warning"
    word = "below" if more_is_better else "above"
    return Check(what, verdict, f"{text}: {abs(shortfall):.0%} {word} what it should be; {hint}")


def check_facts(facts: list[GpuFacts], profile: MachineProfile) -> list[Check]:
    """What needs no measurement: names, links, clocks, other processes."""
    checks = []
    for index, one in enumerate(facts):
        what = f"GPU {index}"
        try:
            profile.require(one.name)
            checks.append(Check(what, "ok", f"{one.name}, driver {one.driver}"))
        except ProfileError as error:
            checks.append(Check(what, "wrong", str(error)))
        nominal = profile.gpu.link_nominal_GBps
        if one.links_GBps and nominal > 0:
            hint = f"{len(one.links_GBps)} links are up, profile says {profile.gpu.link}"
            checks.append(compare(f"{what} links", sum(one.links_GBps), nominal, "GB/s", hint))
        elif nominal > 0:
            text = "nvidia-smi lists no active NVLink; peers would be reached over PCIe, if at all"
            checks.append(Check(f"{what} links", "wrong", text))
        limit = one.power_limit_w
        if limit is not None and limit < 0.95 * profile.gpu.power_limit_w:
            text = f"limited to {limit:.0f} W, profile {profile.gpu.power_limit_w:.0f} W"
            checks.append(Check(f"{what} power", "warning", f"{text}: clocks will be lower"))
        checks += [Check(what, "warning", reason) for reason in complaints(one)]
    return checks


def check_peers(num_gpus: int) -> list[Check]:
    """Peer access between every pair of visible GPUs."""
    missing = [
        f"{a} to {b}"
        for a in range(num_gpus)
        for b in range(num_gpus)
        if a != b and not torch.cuda.can_device_access_peer(a, b)
    ]
    if missing:
        text = (
            f"missing from GPU {', '.join(missing)}: no NVLink between them, or IOMMU, ACS or "
            "virtualisation forbids it; xstage will fall back to NCCL"
        )
        return [Check("peer access", "wrong", text)]
    return [Check("peer access", "ok", f"between all {num_gpus} GPUs")]


def check_measured(seen: dict[str, Any], profile: MachineProfile) -> list[Check]:
    """Measured numbers of every rank against the profile."""
    most = profile.gpu.num_sms
    st, bulk = profile.mechanism("st"), profile.mechanism("bulk")
    checks = [
        compare(
            "SM clock",
            seen["clock_mhz"],
            profile.gpu.sm_clock_mhz,
            "MHz",
            "look at power limit, temperature and locked clocks (nvidia-smi -q -d CLOCK)",
        ),
        compare(
            "issue of a 32 KiB burst to local memory",
            seen["T0_local_us"],
            seen["T0_local_expected_us"],
            "us",
            "the SM itself is slow: clocks, or another process on this GPU",
            more_is_better=False,
        ),
        compare(
            "matrix products, bf16",
            seen["matrix_tflops"],
            profile.rates.matrix_tflops["bf16"],
            "TFLOP/s",
            "power or temperature throttles the tensor cores",
        ),
    ]
    link_hint = (
        "a link is down or runs at a lower width (nvidia-smi nvlink -s), the traffic takes PCIe, "
        "or somebody else uses it"
    )
    for rank, rates in enumerate(seen["rates"]):
        for name, mechanism in (("st", st), ("bulk", bulk)):
            what = f"rank {rank} to the next, {name}"
            expected = float(mechanism.R_GBps(most))
            checks.append(compare(what, rates[name], expected, "GB/s", link_hint))
        both = bulk.R_both_GBps
        if both is not None:
            what = f"rank {rank}, all ranks sending"
            hint = "one direction alone may be fine: receivers or switch are congested"
            checks.append(compare(what, rates["both"], float(both(most)), "GB/s", hint))
    checks.append(
        compare(
            "time until a lone store is visible",
            seen["visible_us"],
            seen["visible_expected_us"],
            "us",
            "stores take a detour (PCIe, or a busy receiver)",
            more_is_better=False,
        )
    )
    return checks


def _measure_rank(session: Session, profile: MachineProfile) -> dict[str, Any]:
    bench, most = session.bench, session.bench.num_sms
    clock = bench.calibrate_clock()
    own: dict[str, float] = {}
    first: dict[str, float] = {}
    for rank in range(session.world):
        if rank == session.rank:
            _measure.wake_link(bench)
            for name in ("st", "bulk"):
                point = Point(name, most, 64 * KIB)
                # The best: links that have slept are slow for milliseconds, lame ones stay slow.
                own[name] = float(max(_measure.train(bench, point)["R_GBps"] for _ in range(9)))
        session.barrier()
    own["both"] = _measure.train_everywhere(session, Point("bulk", most, 64 * KIB))["R_GBps"]
    if session.leads:
        local = _measure.isolated(bench, Point("st", most, 32 * KIB, local=True))
        lone = _measure.isolated(bench, Point("st", 8, 2 * KIB, fence=True))
        first = {
            "T0_local_us": local["median"],
            "T0_local_expected_us": float(profile.mechanism("st").T0_us(most, 32 * KIB)),
            "visible_us": lone["visible_mean"],
            "visible_expected_us": profile.mechanism("st").visibility_us,
            "matrix_tflops": _measure.matrix_tflops(session.device),
        }
    return {"clock_mhz": clock, "rates": session.gather(own)} | first


def run(profile_source: str | None = None) -> list[Check]:
    """Check this machine; empty on ranks that do not lead."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    facts = [gpu_facts(index) for index in range(num_gpus)]
    try:
        profile = machine.load(
            profile_source, facts[0].name if facts and not profile_source else None
        )
    except ProfileError as error:
        return [Check("profile", "wrong", str(error))]
    if not facts:
        return [Check("GPUs", "wrong", "torch sees no CUDA device; a CPU build, or no driver")]
    checks = [Check("profile", "ok", f"{profile.name}, {profile.provenance}, {profile.date}")]
    if profile.provenance != "measured":
        text = "its numbers were not measured on such a machine; run `xstage calibrate`"
        checks.append(Check("profile", "warning", text))
    checks += check_facts(facts, profile) + check_peers(num_gpus)
    if num_gpus < 2:
        checks.append(Check("links", "warning", "one GPU only: nothing to measure between GPUs"))
        return checks
    try:
        seen = on_all_gpus(_measure_rank, profile)
    except (XStageError, RuntimeError) as error:
        return [*checks, Check("measurement", "wrong", f"did not finish: {error}")]
    return [] if seen is None else checks + check_measured(seen, profile)


def report(checks: list[Check], console: Console | None = None) -> bool:
    """Print the checks; True when nothing is wrong."""
    console = console or Console()
    marks = {"ok": "[green]ok     [/]", "warning": "[yellow]warning[/]", "wrong": "[red]wrong  [/]"}
    for check in checks:
        console.print(f"{marks[check.verdict]} {check.what}: {check.text}")
    wrong = sum(check.verdict == "wrong" for check in checks)
    warnings = sum(check.verdict == "warning" for check in checks)
    if wrong:
        console.print(f"wrong: {wrong}; to look at: {warnings}")
    elif warnings:
        console.print(f"usable; to look at: {warnings}")
    elif checks:
        console.print("this machine is as its profile says")
    return wrong == 0
