"""How far the sweep is from what arithmetic and bytes allow, and where the time goes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import _plans
import _sweep
import numpy as np
from _exhibits import Exhibit, Line, Table, by_arm, plt

from xstage_ext.planner.megamoe import MegaMoePlan

WANTED = 1.18
"""What was wanted over the wave with plain stores, geometric mean."""
FLOPS_PER_CYCLE = 4096.0
"""Of one SM of sm_90, dense bf16."""

PARTS = (
    "before the first tile",
    "full rows",
    "empty rows of tiles",
    "waiting for operands",
    "epilogues",
    "waiting for rows, the end",
    "combine",
)
"""Of a call: set-up and first rows; main loops by rows that count and rows that are padding; waits
for operands in main loops; Linear-1 and Linear-2 epilogues; waits for a tile's first operands (rows
that peers have not sent, results of Linear-1) and for the last SM; signals and the combine."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A traced call of one configuration.

    Attributes
    ----------
    arithmetic : float
        Share of the call that all operations take at the peak of the clock that it ran at.
    shares : tuple of float
        By `PARTS`, of the whole call.
    """

    config: _sweep.Config
    us: float
    clock_mhz: float
    arithmetic: float
    shares: tuple[float, ...]


def parts_of(line: Line, config: _sweep.Config) -> Part:
    """Splits a traced call of rank 0; means over SMs."""
    plan = MegaMoePlan(**line["plan"])
    rows = config.draw().counts(config.num_experts).sum(axis=0)[: config.local_experts]
    blocks = -(-rows // plan.block_m)
    last = rows - (blocks - 1) * plan.block_m
    # A tile with half of its rows or fewer takes half of the arithmetic.
    worked = float((blocks - 0.5 * ((last <= plan.block_m // 2) & (rows > 0))).sum())
    full = float(rows.sum()) / plan.block_m / worked
    per_sm = {
        1: float(blocks.sum()) * plan.linear1_tiles / plan.num_sms,
        2: float(blocks.sum()) * plan.linear2_tiles / plan.num_sms,
    }

    def total(name: str) -> float:
        return sum(per_sm[phase] * line.get(f"linear{phase}_{name}_us", 0.0) for phase in per_sm)

    main, waits, epilogues = total("tile"), total("stage_wait"), total("hand_over")
    first, tiles = line["first_tile_us"], line["tiles_us"]
    rest = tiles - first - main - waits - epilogues
    combine = line["signal_us"] + line["combine_us"]
    whole = tiles + combine
    times = (first, main * full, main * (1.0 - full), waits, epilogues, rest, combine)
    flops = 6.0 * float(rows.sum()) * plan.hidden * plan.intermediate
    clock = line["kernel_clock_mhz"]
    least = flops / (plan.num_sms * FLOPS_PER_CYCLE * clock)
    return Part(config, whole, clock, least / whole, tuple(us / whole for us in times))


def ceiling(lines: Sequence[Line], traces: Sequence[Line], plans: Sequence[_plans.Case]) -> Exhibit:
    """What the ceilings and the best of all measured plans would give, and a call in parts."""
    arms = by_arm(lines)
    configs = {str(config.key): config for config in _sweep.load_configs()}
    best = {str(case.config.key): min(one.us for one in case.rivals) for case in plans}
    tables = [_ratios(arms, best, configs)]
    # Traced are the wave with plain stores and then, where it differs, what the planner chose.
    chosen = {str(line["shape"]): line for line in traces}
    parts = [parts_of(line, configs[key]) for key, line in chosen.items()]
    figure, axes = plt.subplots(figsize=(9, 7), layout="constrained")
    if parts:
        tables.append(_shares(parts, axes))
    low = [key for key, found in arms.items() if _over(found, _ceiling_us(found)) < WANTED]
    text = (
        "The ceiling of a configuration is the largest of three times: its arithmetic at the rate "
        "that a large dense bf16 product of torch reached in the same rounds, the bytes that leave "
        "a rank (results, and tokens, once for each of the real layer's ranks that wants them) at "
        "the rate of the link with both directions busy, and its weights read once. It is under "
        f"{WANTED:.2f}x the wave with plain stores in "
        f"{len(low)} of {len(arms)} configurations. *dense*: the rate of that product, mean. "
        "Below: one traced call per configuration by the plan that the planner chose in that run, "
        "means over SMs. What a tile waits for before its first step is rows "
        "that peers have not sent, or results of Linear-1."
    )
    return Exhibit(text, tables, figure)


def _ceiling_us(found: Mapping[str, Line]) -> float:
    return float(found["wave/st"]["ceiling_us"])


def _over(found: Mapping[str, Line], us: float) -> float:
    """Time of the wave with plain stores over another one."""
    return float(found["wave/st"]["us_median"]) / us


def _ratios(
    arms: Mapping[str, Mapping[str, Line]],
    best: Mapping[str, float],
    configs: Mapping[str, _sweep.Config],
) -> Table:
    models: dict[str, list[tuple[float, ...]]] = {}
    for key, found in arms.items():
        times = [float(found[arm]["us_median"]) for arm in _sweep.RIVALS]
        chosen = float(found["planner"]["us_median"])
        ratios = [_over(found, us) for us in (chosen, min(times), best[key], _ceiling_us(found))]
        base = found["wave/st"]
        dense = float(base["flops"]) / float(base["compute_floor_us"]) / 1e6
        values = (*ratios, _ceiling_us(found) / chosen, dense)
        models.setdefault(configs[key].model, []).append(values)
    models["**all**"] = [values for found in models.values() for values in found]
    rows = []
    for model, values in models.items():
        means = [_sweep.geometric_mean(column) for column in zip(*values, strict=True)]
        *over, reached, dense = means
        cells = [*(f"{mean:.3f}x" for mean in over), f"{reached:.0%}", f"{dense:.0f}"]
        rows.append([model, str(len(values)), *cells])
    head = ["wave with st over ..., geometric mean", "n", "planner", "best arm"]
    head += ["best measured plan", "ceiling", "planner of ceiling", "dense, TFLOP/s"]
    return head, rows


def _shares(parts: Sequence[Part], axes: plt.Axes) -> Table:
    groups: dict[tuple[str, int], list[Part]] = {}
    for part in parts:
        groups.setdefault((part.config.model, part.config.tokens), []).append(part)
    rows = []
    labels = []
    left = np.zeros(len(groups))
    means = np.array([np.mean([p.shares for p in found], axis=0) for found in groups.values()])
    for (model, tokens), found in groups.items():
        us = np.mean([part.us for part in found])
        clock = np.mean([part.clock_mhz for part in found])
        least = np.mean([part.arithmetic for part in found])
        labels.append(f"{model} {tokens}")
        shares = means[len(rows)]
        cells = [f"{us:.0f}", f"{clock:.0f}", f"{least:.0%}", *(f"{s:.0%}" for s in shares)]
        rows.append([labels[-1], *cells])
    for place, name in enumerate(PARTS):
        axes.barh(labels, means[:, place], left=left, label=name)
        left += means[:, place]
    axes.invert_yaxis()
    axes.set_xlabel("share of the call")
    axes.set_xlim(0.0, 1.0)
    axes.figure.legend(fontsize=8, ncols=4, loc="outside upper center")
    head = ["model, tokens", "us", "MHz", "arithmetic at this clock", *PARTS]
    return head, rows
