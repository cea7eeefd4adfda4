"""The sweep's picture: speed-up over the wave against arithmetic per byte."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any


def draw(rows: Sequence[Mapping[str, Any]], title: str, path: pathlib.Path) -> None:
    """Speed-up over the wave against arithmetic per byte, with every configuration's ceiling.

    Parameters
    ----------
    rows : sequence of mappings
        With `flop_per_byte`, `speedup`, `ceiling`, and `model`, by which they are coloured.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 5.5))
    models = sorted({row["model"] for row in rows})
    colours = {name: plt.get_cmap("tab10")(i % 10) for i, name in enumerate(models)}
    for row in rows:
        x, low, high = row["flop_per_byte"], row["speedup"], row["ceiling"]
        axes.plot([x, x], [low, high], color="0.85", linewidth=1, zorder=1)
        axes.plot(x, high, marker="_", color="0.45", markersize=9, zorder=2)
        axes.plot(x, low, marker="o", color=colours[row["model"]], markersize=5, zorder=3)
    for name in models:
        axes.plot([], [], "o", color=colours[name], label=name)
    axes.plot([], [], "_", color="0.45", markersize=9, label="ceiling")
    axes.axhline(1.0, color="0.3", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xlabel("floating-point operations per byte that leaves the rank")
    axes.set_ylabel("speed-up over the wave")
    axes.set_title(title)
    axes.legend(fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
