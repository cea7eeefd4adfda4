"""Gives the sweep's measured plans to its arms again, after the planner was fitted to them.

What was measured stays as it is: every family of plans ran beside the arms, in the same rounds.
Which of them an arm stands for, and what the simulator predicts, follow the package as it is now.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import _plans
import _report
import _sweep
import sweep_84

from xstage_ext import machine

Line = dict[str, Any]


def relabel(lines: Sequence[Line], profile: machine.MachineProfile) -> list[Line]:
    """The lines with those of arms replaced, others kept, by configuration.

    `labelled` is the commit whose planner and simulator a replaced line follows.
    """
    number = {json.dumps(config.key): config.index for config in _sweep.load_configs()}
    lines = sorted(lines, key=lambda line: number[json.dumps(line["shape"])])
    cases = {json.dumps(case.config.key): case for case in _plans.read(lines)}
    arms = {
        key: {row.arm: row for row in _measured_rows(case, profile)} for key, case in cases.items()
    }
    found = []
    for line in lines:
        row = arms.get(json.dumps(line["shape"]), {}).get(line["arm"])
        if line["op"] != "megamoe" or row is None:
            found.append(line)
            continue
        kept = {name: value for name, value in line.items() if name in KEPT}
        found.append(kept | row.as_dict() | {"labelled": _report.commit()})
    return found


KEPT = (
    *("relative_error", "gpu", "driver", "torch", "clock_mhz", "power_limit_w", "date", "commit"),
    "command",
)  # fmt: skip
"""What a line keeps of the run, whatever plan it now stands for."""


def _measured_rows(case: _plans.Case, profile: machine.MachineProfile) -> list[Any]:
    rows = []
    for row in sweep_84.predicted_rows(case.config, profile):
        one = case.of(_sweep.plan_of(case.config, row.arm, profile))
        if one is not None:
            extra = {"measured_as": one.name, "raw_us": one.raw_us}
            extra |= sweep_84.ceiling_facts(case.load.of(row.arm), profile, case.matrix_tflops)
            if one.alone_us:
                extra["alone_us"] = one.usual_alone_us
            rows.append(_plans.measured(row, one.timing, True, extra))
    return rows
