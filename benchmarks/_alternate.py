"""Ratios of two calls that differ by less than the machine's own state moves.

At its power limit a GPU's clock wanders by several percent over some tenths of a second. So the
arms follow each other call by call, in blocks of two rounds of which the second runs backwards: in
a block every arm has the same mean place, and whatever moves steadily through it divides out. The
ratio of an arm is the median over blocks of its time over the base's; the interval is a bootstrap
of that median. Rounds before the first block bring the GPU to its limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from xstage_ext.testing import Ratio, Timing, time_arms

WARM_UP_US = 0.5e6
FEWEST_BLOCKS, MOST_BLOCKS = 20, 60
RESAMPLES = 4000


def over_base(
    arms: Mapping[str, Callable[[], object]], base: str, round_us: float, seconds: float
) -> tuple[dict[str, Ratio], int]:
    """How many times as long as `base` every other arm takes, and from how many blocks.

    Parameters
    ----------
    arms : mapping
        As for `time_arms`; equal on all ranks.
    base : str
        One of them.
    round_us : float
        About how long one call of each takes; equal on all ranks.
    seconds : float
        What to spend, where that makes a sensible number of blocks.
    """
    blocks = round(seconds * 1e6 / (2 * round_us))
    blocks = min(MOST_BLOCKS, max(FEWEST_BLOCKS, blocks))
    warmup = math.ceil(WARM_UP_US / round_us)
    timings = time_arms(arms, pairs=2 * blocks, warmup=warmup)
    return {
        name: ratio_of(timing, timings[base]) for name, timing in timings.items() if name != base
    }, blocks


def ratio_of(timing: Timing, base: Timing) -> Ratio:
    """Of two arms of one `time_arms` with an even number of rounds."""
    ratios = _blocks(timing) / _blocks(base)
    draws = np.random.default_rng(0).choice(ratios, (RESAMPLES, ratios.size))
    low, high = np.percentile(np.median(draws, axis=1), [2.5, 97.5])
    return Ratio(float(np.median(ratios)), float(low), float(high))


def _blocks(timing: Timing) -> npt.NDArray[np.float64]:
    return np.asarray(timing.samples_us, dtype=np.float64).reshape(-1, 2).sum(axis=1)
