"""Which of a few plans of a megamoe layer is fastest: a ranking fitted to the measured sweep.

The simulator explains a plan, but needs milliseconds for each, and differences between good plans
(two or three percent) are smaller than its error. So plans are ranked by a logarithm that is linear
in a handful of features of the problem, one set of weights per family of plans, fitted by
`benchmarks/fit_planner.py` to five of the sweep's seven shapes and judged by the other two. It
takes microseconds.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import pathlib
from collections.abc import Sequence

from .. import machine
from ..model import drain_GBps
from .problem import MoEProblem

_FILE = pathlib.Path(__file__).with_name("megamoe_ranking.json")
_ROWS = 128.0
"""Rows of a tile, for features only."""

FAMILIES: dict[str, dict[str, int]] = {
    "wave st 64": {"schedule": 0, "store": 0, "wave_blocks": 64},
    "wave st 128": {"schedule": 0, "store": 0, "wave_blocks": 128},
    "wave paced 64": {"schedule": 0, "store": 2, "wave_blocks": 64},
    "inter paced 48": {"schedule": 1, "store": 2, "lead_blocks": 48},
    "inter paced 128": {"schedule": 1, "store": 2, "lead_blocks": 128},
    "mixed st 32 g8": {"schedule": 1, "mix": 1, "store": 0, "lead_blocks": 32, "group_blocks": 8},
    "mixed paced 16 g8": {
        "schedule": 1, "mix": 1, "store": 2, "lead_blocks": 16, "group_blocks": 8,
    },
}  # fmt: skip
"""Fields of the plans that are considered. What a family leaves open is in `DEFAULTS`; waves and
leads are cut to the load. A ranking of few and different families holds better on shapes that it
was not fitted to than one of many and alike: docs/perf_log.md says what was measured and left
out."""

DEFAULTS = {"group_blocks": 16, "mix": 0, "slice_rows": 1, "x_ring_blocks": 64, "idle_sms": 0}
"""Groups are whole experts up to 16 m-blocks; all SMs work."""

NEAR = 0.05
"""Features (logarithms) so far outside of what was measured still count as measured: 5%."""

LEAST_LINK = 0.6
"""Where the link takes less than this share of the time of arithmetic, how much less says no more
about plans: docs/perf_log.md."""


@functools.lru_cache(maxsize=256)  # a decision asks for times and whether they are covered
def features(
    problem: MoEProblem, profile: machine.MachineProfile, dispatch: str
) -> tuple[float, ...]:
    """Logarithms: time on the link over arithmetic (at least `LEAST_LINK`), weights over
    arithmetic, m-blocks of a rank; `dispatch`, of `DISPATCHES`: how the plan moves tokens.
    """
    rate = float(drain_GBps(profile.mechanism("bulk"), profile.gpu.num_sms, True))
    compute_us = max(problem.flops, 1.0) / profile.rates.matrix_tflops["bf16"] / 1e6
    link_us = max(problem.egress_bytes(dispatch), 1.0) / rate / 1e3
    weights_us = problem.weight_bytes / profile.rates.hbm_GBps / 1e3
    blocks = max(problem.rows, 1) / _ROWS
    link = max(link_us / compute_us, LEAST_LINK)
    return tuple(math.log(value) for value in (link, weights_us / compute_us, blocks))


def terms(values: Sequence[float]) -> list[float]:
    """What the weights multiply."""
    link, weights, blocks = values
    return [1.0, link, weights, blocks, link * blocks, weights * blocks]


@dataclasses.dataclass(frozen=True)
class Ranking:
    """Fitted weights.

    Attributes
    ----------
    weights : dict
        By family: what multiplies the `terms`; the sum is the logarithm of the family's time over
        the geometric mean of all families.
    ranges : list of pairs
        Least and most of every feature among the shapes fitted to; others are moved to the nearer
        end.
    source : str
        What was measured, where and when.
    at_home : dict
        By family, the fastest first: mean time where no row crosses the link, over the fastest
        family's.
    """

    weights: dict[str, list[float]]
    ranges: list[tuple[float, float]]
    source: str
    at_home: dict[str, float] = dataclasses.field(default_factory=dict)

    def covers(self, values: Sequence[float]) -> bool:
        """Whether features lie among those of the shapes fitted to, or `NEAR` them."""
        ends = zip(values, self.ranges, strict=True)
        return all(low - NEAR <= v <= high + NEAR for v, (low, high) in ends)

    def log_times(self, values: Sequence[float]) -> dict[str, float]:
        """By family, from features."""
        inside = [
            min(max(v, low), high) for v, (low, high) in zip(values, self.ranges, strict=True)
        ]
        expanded = terms(inside)
        return {
            family: sum(w * t for w, t in zip(weights, expanded, strict=True))
            for family, weights in self.weights.items()
        }


@functools.cache
def fitted() -> Ranking:
    """The weights that the package ships."""
    data = json.loads(_FILE.read_text(encoding="utf-8"))
    ranges = [(low, high) for low, high in data["ranges"]]
    return Ranking(data["weights"], ranges, data["source"], data["at_home"])


def covers(problem: MoEProblem, profile: machine.MachineProfile, dispatch: str) -> bool:
    """Whether layers like this one were measured for its ranking."""
    return fitted().covers(features(problem, profile, dispatch))


def relative_times(
    problem: MoEProblem, profile: machine.MachineProfile, dispatch: str
) -> dict[str, float]:
    """Expected time of every family over that of the fastest, the fastest first."""
    if problem.remote == 0.0:
        return dict(fitted().at_home)
    logs = fitted().log_times(features(problem, profile, dispatch))
    least = min(logs.values())
    return {name: math.exp(logs[name] - least) for name in sorted(logs, key=lambda n: logs[n])}


fitted()  # at import: the first decision of a process shall not wait for files
