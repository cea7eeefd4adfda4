"""Takes out of samples what their neighbours in time share: states of the machine, not of a plan.

At its power limit a GPU runs some tenths of a second 10 to 15 percent slower, then recovers. Plans
that differ by one percent are measured in turns, so that every plan meets such times, but the
median of twenty samples still depends on how many it met. A sample's level is how much longer than
usual the samples right before and after it took, each compared with its own plan's median.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

NEAR = 3
"""Neighbours on each side."""
PASSES = 2
"""Medians of levelled samples give better levels."""


def levels(sequence: Sequence[tuple[str, float]]) -> npt.NDArray[np.float64]:
    """By what factor the machine was slower than usual at every sample.

    Parameters
    ----------
    sequence : sequence of (name, us)
        In the order of time. The names with most samples tell the level, the others only get one.
    """
    names = np.array([name for name, _ in sequence])
    logs = np.log([us for _, us in sequence])
    counts = {name: int((names == name).sum()) for name in dict.fromkeys(names.tolist())}
    most = max(counts.values(), default=0)
    telling = np.flatnonzero([counts[name] == most for name in names.tolist()])
    level = np.zeros(len(sequence))
    for _ in range(PASSES if len(telling) > 2 * NEAR else 0):
        usual = {name: np.median((logs - level)[names == name]) for name in counts}
        slower = logs - np.array([usual[name] for name in names.tolist()])
        place = np.searchsorted(telling, np.arange(len(sequence)))
        for k in range(len(sequence)):
            own = int(place[k] < len(telling) and telling[place[k]] == k)
            before = telling[max(0, place[k] - NEAR) : place[k]]
            after = telling[place[k] + own : place[k] + own + NEAR]
            level[k] = np.median(slower[np.concatenate([before, after])])
    return np.exp(level)


def levelled(sequence: Sequence[tuple[str, float]]) -> dict[str, list[float]]:
    """Samples by name, in the order of time, each divided by its level."""
    found: dict[str, list[float]] = {}
    for (name, us), level in zip(sequence, levels(sequence).tolist(), strict=True):
        found.setdefault(name, []).append(us / level)
    return found
