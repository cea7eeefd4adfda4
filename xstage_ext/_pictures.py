"""Pictures of a calibration: what was measured as dots, the law as lines."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np

from ._measure import Row
from ._profile_fit import column, select
from .machine import MachineProfile
from .model import BurstGap, shadow_us

COLOURS = {"st": "tab:blue", "bulk": "tab:orange", "tma": "tab:green"}


def _figure(title: str, x: str, y: str) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.0, 4.4), dpi=120)
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    return figure, axes


def _save(figure: Any, stem: pathlib.Path, name: str) -> pathlib.Path:
    from matplotlib import pyplot

    path = stem.with_name(f"{stem.name}-{name}.png")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
    return path


def volume(profile: MachineProfile, rows: list[Row], stem: pathlib.Path) -> pathlib.Path:
    """Issue time of isolated bursts against volume: the knee."""
    most = profile.gpu.num_sms
    figure, axes = _figure(
        f"Isolated bursts of {most} SMs to a peer ({profile.gpu.name})",
        "volume of a burst, MB",
        "issue time, mean over producers, us",
    )
    for name, mechanism in profile.mechanisms.items():
        dots = select(rows, kind="isolated", mechanism=name, K=most, fence=False, local=False)
        axes.plot(
            column(dots, "B") * most / 1e6, column(dots, "mean"), "o", ms=4, color=COLOURS[name]
        )
        nbytes = np.linspace(1024, 131072, 400)
        law = BurstGap.of(mechanism, most, nbytes)
        isolated = np.maximum(np.asarray(law.T0_us), law.capacity_term_us)
        axes.plot(nbytes * most / 1e6, isolated, "-", color=COLOURS[name], label=name)
    axes.legend(title="line: max(T0, (V - Q)/R)")
    return _save(figure, stem, "volume")


def gap(profile: MachineProfile, rows: list[Row], stem: pathlib.Path) -> pathlib.Path:
    """Issue time of free-running trains against the gap."""
    most = profile.gpu.num_sms
    figure, axes = _figure(
        f"Free-running trains of {most} SMs ({profile.gpu.name})",
        "gap between bursts, us",
        "issue time, mean over bursts, us",
    )
    for name, mechanism in profile.mechanisms.items():
        for nbytes, style in ((32768, "-"), (65536, "--")):
            dots = select(rows, kind="train", mechanism=name, K=most, B=nbytes)
            axes.plot(
                column(dots, "gap_seen_us"), column(dots, "mean"), "o", ms=4, color=COLOURS[name]
            )
            G = np.linspace(0, 32, 300)
            law = BurstGap.of(mechanism, most, nbytes)
            label = f"{name}, {nbytes // 1024} KiB"
            axes.plot(G, law.two_term(G), style, color=COLOURS[name], lw=1, label=label)
    axes.legend(title="line: max(T0, V/R - G)")
    return _save(figure, stem, "gap")


def saturation(profile: MachineProfile, rows: list[Row], stem: pathlib.Path) -> pathlib.Path:
    """Drain rate against the number of producers."""
    figure, axes = _figure(
        f"What K producers push through the link ({profile.gpu.name})", "producers K", "GB/s"
    )
    for name, mechanism in profile.mechanisms.items():
        dots = select(rows, kind="train", mechanism=name, gap_us=0.0, B=131072)
        axes.plot(column(dots, "K"), column(dots, "R_GBps"), "o", ms=4, color=COLOURS[name])
        K = np.arange(1, profile.gpu.num_sms + 1)
        axes.plot(K, mechanism.R_GBps(K), "-", color=COLOURS[name], label=name)
    if profile.gpu.link_nominal_GBps > 0:
        axes.axhline(profile.gpu.link_nominal_GBps, color="grey", ls=":", label="links, nominal")
    axes.axhline(profile.rates.copy_engine_GBps, color="grey", ls="--", label="copy engine")
    axes.set_xscale("log")
    axes.legend(title="dots: 128 KiB, no gap; line: R(K)")
    return _save(figure, stem, "saturation")


def shadow(profile: MachineProfile, rows: list[Row], stem: pathlib.Path) -> pathlib.Path:
    """Latency of local operations in the shadow of a 32 KiB burst of all SMs."""
    most = profile.gpu.num_sms
    figure, axes = _figure(
        f"Local operations behind a 32 KiB burst of {most} SMs ({profile.gpu.name})",
        "delay after the burst began, us",
        "median latency, us",
    )
    markers = {"load": "o", "atomic": "s", "bulk_load": "^", "tma_load": "v"}
    for key, one in profile.shadow.items():
        name, probe = key.split("/")
        dots = select(rows, kind="shadow", mechanism=name, probe=probe, K=most, B=32768)
        axes.plot(
            column(dots, "delay_us"), column(dots, "median"), markers[probe], color=COLOURS[name],
            ms=5, label=key,
        )  # fmt: skip
        delay = np.linspace(1.0, 16.0, 200)
        rate = profile.mechanisms[name].R_GBps(most)
        axes.plot(delay, shadow_us(one, rate, most, 32768, delay), "-", lw=0.8, color=COLOURS[name])
    axes.legend(ncol=3, fontsize="small")
    return _save(figure, stem, "shadow")


def draw_all(profile: MachineProfile, rows: list[Row], stem: pathlib.Path) -> list[pathlib.Path]:
    """All four pictures, `<stem>-<what>.png`."""
    return [draw(profile, rows, stem) for draw in (volume, gap, saturation, shadow)]
