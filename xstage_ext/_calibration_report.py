"""The report of a calibration as Markdown: parameters, routes, producers, shadow. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np

from ._measure import Row
from ._profile_fit import Finding, column, routes_differ, select
from .machine import MachineProfile

KIB = 1024
CURVES = {
    "R_GBps": ("R, GB/s", 1.0),
    "R_both_GBps": ("R while all ranks send, GB/s", 1.0),
    "Q_bytes": ("Q for the mean producer, MB", 1e6),
    "Q_slowest_bytes": ("Q for the slowest producer, MB", 1e6),
}
"""Parameters by number of producers: words, and what a unit of the table is in the finding's."""


def markdown(
    profile: MachineProfile,
    rows: list[Row],
    findings: list[Finding],
    environment: dict[str, Any],
    shadow_errors: dict[str, float],
) -> str:
    """The whole report."""
    most = profile.gpu.num_sms
    lines = [
        f"# Calibration of {profile.gpu.name} x {profile.world}",
        "",
        *_environment(profile, environment),
        "",
        "Bytes are those that cross the link. T_iss of `st` ends when the load-store unit is free "
        "again, of `bulk` and `tma` when the source may be reused.",
        "",
        "## Parameters",
        "",
        *_parameters(profile),
        "",
        "## Every estimate, by every route",
        "",
        "Bold ones are in the profile; in brackets 95% bootstrap intervals. The last column is the "
        "largest difference of any route from the first.",
        "",
        *_routes(findings),
        "",
        "T0, us; the first route is in the profile:",
        "",
        *_issue_times(profile, findings),
        "",
        f"## Producers: {most} at once, isolated bursts",
        "",
        *_distribution(rows, most),
        "",
        "Service rates of the producers relative to their mean, all saturating, as quantiles:",
        "",
        *_shares(profile),
        "",
        "## Shadow",
        "",
        *_shadow(profile, most, shadow_errors),
    ]
    return "\n".join(lines) + "\n"


def _environment(profile: MachineProfile, environment: dict[str, Any]) -> list[str]:
    gpu, rates = profile.gpu, environment.get("rates", {})
    busy = environment.get("busy") or ["no other process"]
    return [
        f"`{profile.command}`, {profile.date}. Driver {gpu.driver}, torch "
        f"{environment.get('torch')}, CUDA {environment.get('cuda')}, SM clock "
        f"{gpu.sm_clock_mhz:.0f} MHz while measuring, power limit {gpu.power_limit_w:.0f} W, "
        f"{gpu.link} ({gpu.link_nominal_GBps:.0f} GB/s nominal per direction); {'; '.join(busy)}. "
        f"Copy engine {rates.get('copy_engine_GBps', 0):.0f} GB/s, reads of the peer "
        f"{rates.get('pull_GBps', 0):.0f} GB/s, device memory "
        f"{rates.get('hbm_GBps', 0):.0f} GB/s "
        f"(read and write), bf16 products {rates.get('matrix_bf16_tflops', 0):.0f} TFLOP/s. "
        f"Between bursts the bench itself needs {rates.get('gap_shortest_us', 0):.2f} us.",
    ]


def _parameters(profile: MachineProfile) -> list[str]:
    lines = []
    for name, m in profile.mechanisms.items():
        both = "-" if m.R_both_GBps is None else f"{m.R_both_GBps.values[-1]:.0f}"
        lines += [
            f"`{name}`: fence {m.visibility_us:.2f} us beyond V/R; R with all ranks sending "
            f"{both} GB/s.",
            "",
            "| K | R GB/s | Q MB | Q slowest MB | "
            + " | ".join(f"T0 {b / KIB:g} KiB us" for b in m.T0_us.nbytes)
            + " |",
            "|---" * (4 + len(m.T0_us.nbytes)) + "|",
        ]
        for K in m.R_GBps.producers:
            Q = [
                f"{float(curve(K)) / 1e6:.2f}" if K in curve.producers else "-"
                for curve in (m.Q_bytes, m.Q_slowest_bytes)
            ]
            T0 = [
                f"{float(m.T0_us(K, b)):.2f}" if K in m.T0_us.producers else "-"
                for b in m.T0_us.nbytes
            ]
            lines.append(f"| {K:.0f} | {float(m.R_GBps(K)):.1f} | {' | '.join(Q + T0)} |")
        lines.append("")
    return lines[:-1]


def _routes(findings: list[Finding]) -> list[str]:
    """One table per parameter: a line per quantity, a column per route, how far they differ."""
    lines = []
    for name, (words, unit) in CURVES.items():
        some = [f for f in findings if f.quantity.split("/")[1].split("@")[0] == name]
        routes = list(dict.fromkeys(finding.estimate.route for finding in some))
        lines += [
            f"{words}:",
            "",
            f"| mechanism | K | {' | '.join(routes)} | differ |",
            "|---" * (len(routes) + 3) + "|",
        ]
        for quantity in dict.fromkeys(finding.quantity for finding in some):
            mechanism, K = quantity.split("/")[0], quantity.partition("@")[2]
            by_route = {f.estimate.route: f for f in some if f.quantity == quantity}
            cells = [_cell(by_route.get(route), unit) for route in routes]
            lines.append(
                f"| {mechanism} | {K} | {' | '.join(cells)} | {_differ(findings, quantity)} |"
            )
        lines.append("")
    return lines[:-1]


def _cell(finding: Finding | None, unit: float) -> str:
    if finding is None:
        return "-"
    e = finding.estimate
    value = f"**{e.value / unit:.4g}**" if finding.chosen else f"{e.value / unit:.4g}"
    return f"{value} ({e.low / unit:.4g} to {e.high / unit:.4g})"


def _differ(findings: list[Finding], quantity: str) -> str:
    gaps = routes_differ(findings, quantity)
    return f"{gaps[quantity]:.1%}" if quantity in gaps else "-"


def _issue_times(profile: MachineProfile, findings: list[Finding]) -> list[str]:
    """T0 by every route: a line per mechanism, number of producers and route, a column per size."""
    sizes = next(iter(profile.mechanisms.values())).T0_us.nbytes
    lines = [
        "| mechanism | K | route | "
        + " | ".join(f"{b / KIB:g} KiB" for b in sizes)
        + " | widest interval |",
        "|---" * (4 + len(sizes)) + "|",
    ]
    for name, mechanism in profile.mechanisms.items():
        for K in mechanism.T0_us.producers:
            some = {
                (f.estimate.route, f.quantity): f
                for f in findings
                if f.quantity.startswith(f"{name}/T0_us@{K:.0f},")
            }
            for route in dict.fromkeys(route for route, _ in some):
                found = [some.get((route, f"{name}/T0_us@{K:.0f},{b:.0f}")) for b in sizes]
                cells = ["-" if f is None else f"{f.estimate.value:.3g}" for f in found]
                widest = max(f.estimate.relative_width for f in found if f is not None)
                cells.append(f"{widest:.1%} either way")
                lines.append(f"| {name} | {K:.0f} | {route} | {' | '.join(cells)} |")
    return lines


def _distribution(rows: list[Row], most: int) -> list[str]:
    lines = [
        "| mechanism | KiB | mean us | median | p95 | slowest of each burst | visible (slowest) |",
        "|---|---|---|---|---|---|---|",
    ]
    single = select(rows, kind="isolated", K=most, local=False)
    for mechanism in sorted({row["mechanism"] for row in single}):
        for B in sorted({row["B"] for row in single}):
            some = select(single, mechanism=mechanism, B=B, fence=False)
            fenced = select(single, mechanism=mechanism, B=B, fence=True)
            if not some:  # the longest are only sent to see them drain
                continue
            cells = [
                f"{np.median(column(some, key)):.2f}"
                for key in ("mean", "median", "p95", "slowest")
            ]
            cells.append(f"{np.median(column(fenced, 'visible_slowest')):.2f}")
            lines.append(f"| {mechanism} | {B // KIB} | {' | '.join(cells)} |")
    return lines


def _shares(profile: MachineProfile) -> list[str]:
    return [
        f"- `{name}`: " + ", ".join(f"{share:.2f}" for share in mechanism.shares)
        for name, mechanism in profile.mechanisms.items()
    ]


def _shadow(profile: MachineProfile, most: int, errors: dict[str, float]) -> list[str]:
    lines = [
        "S = base + c tanh(w / c), w = max(0, (V - passed)/R - delay), c = K cross/R.",
        "",
        f"| burst/operation | base us | passed MB at K = {most} | cross KiB | median error of the "
        "fit |",
        "|---|---|---|---|---|",
    ]
    for key, shadow in profile.shadow.items():
        cross = "-" if shadow.cross_bytes is None else f"{shadow.cross_bytes / KIB:.1f}"
        lines.append(
            f"| {key} | {shadow.base_us:.2f} | {float(shadow.passed_bytes(most)) / 1e6:.2f} | "
            f"{cross} | {errors[key]:.0%} |"
        )
    return lines
