"""What nvidia-smi says about the GPUs of a measurement: clocks, power, links, who else is there."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
from typing import Any

import torch


@dataclasses.dataclass(frozen=True)
class GpuFacts:
    """One GPU as nvidia-smi sees it; None or empty where it does not say.

    Attributes
    ----------
    links_GBps : tuple of float
        Nominal rate of every active NVLink and direction.
    others : tuple of int
        Process ids of other compute processes on this GPU.
    """

    name: str
    uuid: str
    driver: str | None
    sm_clock_mhz: float | None
    sm_clock_max_mhz: float | None
    power_limit_w: float | None
    utilization_percent: float | None
    memory_used_mib: float | None
    links_GBps: tuple[float, ...]
    others: tuple[int, ...]

    def asdict(self) -> dict[str, Any]:
        """Plain dict for JSON."""
        return dataclasses.asdict(self)


def _smi(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def parse_links(text: str) -> tuple[float, ...]:
    """Rates out of `nvidia-smi nvlink --status`."""
    return tuple(float(rate) for rate in re.findall(r"Link \d+: ([0-9.]+) GB/s", text))


def gpu_facts(device: torch.device | int) -> GpuFacts:
    """Ask nvidia-smi about a CUDA device, by its UUID: visible devices may be renumbered."""
    properties = torch.cuda.get_device_properties(device)
    uuid = f"GPU-{properties.uuid}"
    fields = "driver_version,clocks.sm,clocks.max.sm,power.limit,utilization.gpu,memory.used"
    line = _smi("-i", uuid, f"--query-gpu={fields}", "--format=csv,noheader,nounits").strip()
    values = [part.strip() for part in line.split(",")] if line else [""] * 6
    apps = _smi("-i", uuid, "--query-compute-apps=pid", "--format=csv,noheader,nounits")
    own = _family()
    pids = {int(word) for word in apps.split() if word.isdigit()}
    return GpuFacts(
        name=properties.name,
        uuid=uuid,
        driver=values[0] or None,
        sm_clock_mhz=_number(values[1]),
        sm_clock_max_mhz=_number(values[2]),
        power_limit_w=_number(values[3]),
        utilization_percent=_number(values[4]),
        memory_used_mib=_number(values[5]),
        links_GBps=parse_links(_smi("nvlink", "--status", "-i", uuid)),
        others=tuple(sorted(pids - own)),
    )


def _family() -> set[int]:
    """This process, its parent and the parent's children: the ranks of one command."""
    own = {os.getpid(), os.getppid()}
    try:
        with open(f"/proc/{os.getppid()}/task/{os.getppid()}/children", encoding="ascii") as file:
            own |= {int(word) for word in file.read().split()}
    except OSError:
        pass
    return own


def complaints(facts: GpuFacts) -> list[str]:
    """Reasons not to trust a measurement on this GPU now, in words; empty when it is idle."""
    reasons = []
    if facts.others:
        reasons.append(
            f"{facts.name} ({facts.uuid[:12]}) is used by other processes: "
            f"{', '.join(map(str, facts.others))}"
        )
    if facts.utilization_percent is not None and facts.utilization_percent > 5:
        reasons.append(f"{facts.name} ({facts.uuid[:12]}) is {facts.utilization_percent:.0f}% busy")
    return reasons
