"""The Burst-Gap law's numbers for one train of bursts, as `xstage plan` shows them."""

from __future__ import annotations

import dataclasses

import numpy as np

from .machine import MachineProfile
from .model import BurstGap, Regime

LAW = "in step: max(T0, V/R - G, (V - Q)/R); free: max(T0, V/R - G)"
HEAD = "regime     V MB   V/R     G    T0  Q MB    G*  in step   free  fence  shadow"


@dataclasses.dataclass(frozen=True)
class BurstReport:
    """What the law says of a train of bursts; times in us.

    Attributes
    ----------
    order : str
        Of Linear-2 tiles: `"wave"`, they follow each other; `"interleaved"`, Linear-1 work lies
        between. Of attention: one of `attention_cost.WAYS`.
    gap_us : float
        Time without stores after a burst, G.
    T_iss_us, free_running_us : float
        Issue time when all SMs burst in step, and when nothing holds them in step.
    shadow_us : float or None
        Wait of a load issued right after the burst, when all SMs burst together; None where none
        follows before the bytes have left.
    """

    order: str
    mechanism: str
    regime: str
    V_bytes: float
    drain_us: float
    gap_us: float
    T0_us: float
    Q_bytes: float
    capacity_term_us: float
    recovery_gap_us: float | None
    T_iss_us: float
    free_running_us: float
    completion_coupled_us: float
    shadow_us: float | None

    @classmethod
    def of(
        cls,
        order: str,
        mechanism: str,
        law: BurstGap,
        gap_us: float,
        shadow_us: float | None,
    ) -> BurstReport:
        """Every number of a law with this gap."""
        star = float(law.recovery_gap())
        return cls(
            order=order,
            mechanism=mechanism,
            regime=Regime(int(law.regime(gap_us))).name.lower(),
            V_bytes=float(np.asarray(law.V_bytes)),
            drain_us=float(law.drain_us),
            gap_us=gap_us,
            T0_us=float(np.asarray(law.T0_us)),
            Q_bytes=float(np.asarray(law.Q_bytes)),
            capacity_term_us=float(law.capacity_term_us),
            recovery_gap_us=star if np.isfinite(star) else None,
            T_iss_us=float(law.steady(gap_us)),
            free_running_us=float(law.free_running(gap_us)),
            completion_coupled_us=float(law.completion_coupled(gap_us)),
            shadow_us=shadow_us,
        )

    def cells(self) -> str:
        """The numbers below `HEAD`."""
        star = "  inf" if self.recovery_gap_us is None else f"{self.recovery_gap_us:5.1f}"
        shadow = f"{'-':>7}" if self.shadow_us is None else f"{self.shadow_us:7.1f}"
        return (
            f"{self.regime:<9} {self.V_bytes / 1e6:5.2f} {self.drain_us:5.1f} {self.gap_us:5.1f} "
            f"{self.T0_us:5.2f} {self.Q_bytes / 1e6:5.2f} {star} {self.T_iss_us:8.2f} "
            f"{self.free_running_us:6.2f} {self.completion_coupled_us:6.1f} {shadow}"
        )


def beyond_measurement(profile: MachineProfile, world: int) -> str | None:
    """A sentence for worlds larger than those in which the profile was measured, else None."""
    if world <= profile.world:
        return None
    return (
        f"Not measured: profile {profile.name} knows bursts between {profile.world} GPUs, one "
        f"destination each. For {world} GPUs the same rate per GPU is assumed, however many send "
        "to one."
    )
