"""Least times of a mixture-of-experts call: what no schedule can beat."""

from __future__ import annotations

import dataclasses

from .. import machine
from .problem import MoEProblem


@dataclasses.dataclass(frozen=True)
class Floors:
    """Least times of a call on one rank, us: arithmetic, bytes leaving (each token once per rank
    that wants it, and results), reading weights once."""

    compute_us: float
    egress_us: float
    weights_us: float

    @property
    def binding(self) -> str:
        """Which of them is largest, in words."""
        by_time = {
            self.compute_us: "arithmetic",
            self.egress_us: "the link",
            self.weights_us: "reading the weights",
        }
        return by_time[max(by_time)]

    @property
    def us(self) -> float:
        """The largest."""
        return max(self.compute_us, self.egress_us, self.weights_us)


def floors(problem: MoEProblem, profile: machine.MachineProfile) -> Floors:
    """Least times of the problem on a machine."""
    rates = profile.rates
    # Experts without rows are not read.
    busy = min(1.0, problem.rows / problem.experts_per_rank)
    return Floors(
        compute_us=problem.flops / rates.matrix_tflops["bf16"] / 1e6,
        egress_us=egress_us(problem, profile, "push"),
        weights_us=busy * problem.weight_bytes / rates.hbm_GBps / 1e3,
    )


def egress_us(problem: MoEProblem, profile: machine.MachineProfile, dispatch: str) -> float:
    """Time of the bytes that leave a rank, us; `dispatch`: of `DISPATCHES`."""
    rate = float(profile.mechanism("bulk").R_GBps(profile.gpu.num_sms))
    return problem.egress_bytes(dispatch) / rate / 1e3
