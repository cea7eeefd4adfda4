"""Machine profiles: what the Burst-Gap law needs to know about one GPU type and its links.

A profile is a JSON file (`xstage_ext/profiles/`). `xstage calibrate` writes one; the planner, the
simulator and `xstage validate` read it. Times are microseconds, rates GB/s (1e9 bytes per second),
volumes bytes. Bytes are those that cross NVLink: what a rank sends to itself is not counted.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import typing
from typing import Annotated, Literal

from . import _env
from ._curves import RATES, Bytes, Microseconds
from ._curves import FloatArray as FloatArray
from ._curves import FloatLike as FloatLike
from ._curves import IssueTable as IssueTable
from ._curves import ProducerCurve as ProducerCurve
from ._json import Within, build, dump, parse
from .errors import ProfileError

SCHEMA = 1
"""Version of the JSON layout. Readers refuse another one."""

Provenance = Literal["provisional", "measured", "default"]
_PROFILES = pathlib.Path(__file__).parent / "profiles"

# Limits as in _curves.py: far beyond any machine.
GBps = Annotated[float, RATES]
Tflops = Annotated[float, Within(10, 1e6, "TFLOP/s")]
Size = Annotated[int, Within(0, 1e12, "bytes")]


@dataclasses.dataclass(frozen=True)
class Interval:
    """A bootstrap interval of one fitted number, for the reader; the law uses the curves."""

    low: float
    high: float
    confidence: float = 0.95


@dataclasses.dataclass(frozen=True)
class Mechanism:
    """One way to store to a peer: `st` (16-byte stores), `bulk` (cp.async.bulk), `tma` (tensor).

    Attributes
    ----------
    T0_us : IssueTable
        Back-pressure-free issue time. For `bulk` and `tma` issue ends when the shared memory may be
        reused (`wait_group.read`).
    R_GBps : ProducerCurve
        Effective drain rate with K producers, one direction busy.
    Q_bytes : ProducerCurve
        Outstanding capacity seen by the *mean* producer, all K together.
    Q_slowest_bytes : ProducerCurve
        The same for the slowest producer of a burst: producers are not served equally, and whoever
        waits for all of them sees this smaller one.
    visibility_us : float
        From the last byte's departure to a fence that returns.
    R_both_GBps : ProducerCurve or None
        Drain rate when the opposite direction is as busy; None means unknown, use `R_GBps`.
    intervals : dict
        Intervals by name of the quantity, e.g. `"R_GBps@132"`.
    shares : tuple of float
        Service rates of the producers relative to their mean while all saturate the link, as evenly
        spaced quantiles; empty means equal. `producers.run_trains` uses them.
    """

    T0_us: IssueTable
    R_GBps: ProducerCurve
    Q_bytes: ProducerCurve
    Q_slowest_bytes: ProducerCurve
    visibility_us: Microseconds
    R_both_GBps: ProducerCurve | None = None
    intervals: dict[str, Interval] = dataclasses.field(default_factory=dict)
    shares: tuple[Annotated[float, Within(1e-3, 1e3)], ...] = ()

    def __post_init__(self) -> None:
        for name in ("R_GBps", "R_both_GBps"):
            curve = getattr(self, name)
            if curve is not None and not all(value in RATES for value in curve.values):
                raise ProfileError(
                    f"machine profile: {name}: expected rates of {RATES}, got {curve.values}"
                )

    def extrapolates(self, K: float, B_bytes: float) -> list[str]:
        """Why an answer for K producers of B bytes lies outside of what was measured, in words.

        Empty inside. The curves go on outside (see their classes), but nobody has looked there.
        """
        reasons = []
        most = self.R_GBps.producers[-1]
        if not 1 <= K <= most:
            reasons.append(f"{K:g} producers; measured from 1 to {most:g}")
        low, high = self.T0_us.nbytes[0], self.T0_us.nbytes[-1]
        if not low <= B_bytes <= high:
            reasons.append(f"{B_bytes:g} bytes per burst; measured from {low:g} to {high:g}")
        return reasons


@dataclasses.dataclass(frozen=True)
class Shadow:
    """The wait that a burst imposes on a later local operation of the same SM.

    Attributes
    ----------
    base_us : float
        Latency of the operation without any burst.
    passed_bytes : ProducerCurve
        Bytes of the burst (all K together) that no longer hold the operation up.
    cross_bytes : float or None
        Bytes per producer that go first when burst and operation use different paths (LSU, TMA), so
        that the wait has a ceiling; None when both use one queue and the whole burst goes first.
    """

    base_us: Microseconds
    passed_bytes: ProducerCurve
    cross_bytes: Bytes | None


@dataclasses.dataclass(frozen=True)
class Gpu:
    """Facts about the GPU and its links.

    `link_nominal_GBps` is the sum over the links of one GPU and one direction.
    """

    name: str
    capability: str
    num_sms: Annotated[int, Within(2, 1024, "SMs")]
    sm_clock_mhz: Annotated[float, Within(1, 1e5, "MHz")]
    power_limit_w: Annotated[float, Within(0, 1e5, "W")]
    l2_bytes: Size
    smem_bytes: Size
    link: str
    link_nominal_GBps: Annotated[float, Within(0, RATES.most, "GB/s")]
    driver: str | None = None


@dataclasses.dataclass(frozen=True)
class Rates:
    """Local rates that turn tiles into times.

    Attributes
    ----------
    matrix_tflops : dict
        Dense matrix rate of the whole GPU by dtype (`"bf16"`), on random data, over some ten
        milliseconds: where power is the limit it falls after that (H200: 780 to 670 TFLOP/s).
    hbm_GBps, l2_GBps : float
        Read rates of device memory and of L2 into the SMs.
    tile_overhead_us : float
        Per tile of a persistent kernel: first loads, the conversion of the accumulators, flags.
    launch_us : float
        Start and end of a kernel of one wave of blocks, seen by the stream.
    flag_us : float
        A release by one SM until another one sees it.
    pull_GBps : float
        Rate of reads from peers by all SMs.
    copy_engine_GBps : float
        One direction by the copy engine: what a drained link carries at best.
    """

    matrix_tflops: dict[str, Tflops]
    hbm_GBps: GBps
    l2_GBps: GBps
    tile_overhead_us: Microseconds
    launch_us: Microseconds
    flag_us: Microseconds
    pull_GBps: GBps
    copy_engine_GBps: GBps

    def __post_init__(self) -> None:
        if "bf16" not in self.matrix_tflops:
            known = ", ".join(self.matrix_tflops) or "none"
            raise ProfileError(f"machine profile: matrix_tflops: expected a bf16 rate, got {known}")


@dataclasses.dataclass(frozen=True)
class MachineProfile:
    """Everything measured (or, until then, assumed) about one machine type.

    Attributes
    ----------
    schema : int
        `SCHEMA` of the writer.
    name : str
        File name without `.json`, e.g. `"h200x2"`.
    provenance : str
        `"measured"` by `xstage calibrate`, `"provisional"` from an earlier probe, `"default"` from
        public figures.
    source : str
        Where the numbers come from, in words.
    command, date : str or None
        How and when it was measured.
    world : int
        GPUs that took part.
    shadow : dict
        By `"<mechanism>/<operation>"`; operations are `load`, `atomic`, `bulk_load`, `tma_load`.
    """

    schema: int
    name: str
    provenance: Provenance
    source: str
    world: Annotated[int, Within(1, 1024, "GPUs")]
    gpu: Gpu
    # Dictionaries have no hash; equality compares them. The planner looks decisions up by profile.
    mechanisms: dict[str, Mechanism] = dataclasses.field(hash=False)
    shadow: dict[str, Shadow] = dataclasses.field(hash=False)
    rates: Rates = dataclasses.field(hash=False)
    command: str | None = None
    date: str | None = None

    def __post_init__(self) -> None:
        if self.schema != SCHEMA:
            raise ProfileError(
                f"machine profile {self.name}: schema: expected {SCHEMA}, got {self.schema}; "
                "run `xstage calibrate` with this version"
            )
        if not self.mechanisms:
            raise ProfileError(f"machine profile {self.name}: mechanisms: expected at least one")

    def mechanism(self, name: str) -> Mechanism:
        """The parameters of a store mechanism, or a ProfileError that names those known."""
        try:
            return self.mechanisms[name]
        except KeyError:
            raise ProfileError(
                f"machine profile {self.name}: mechanism: expected one of "
                f"{', '.join(sorted(self.mechanisms))}, got {name}"
            ) from None

    def shadow_of(self, mechanism: str, operation: str) -> Shadow:
        """The shadow that bursts of `mechanism` cast on `operation`."""
        key = f"{mechanism}/{operation}"
        try:
            return self.shadow[key]
        except KeyError:
            raise ProfileError(
                f"machine profile {self.name}: shadow: expected one of "
                f"{', '.join(sorted(self.shadow))}, got {key}"
            ) from None

    def require(self, gpu_name: str) -> MachineProfile:
        """This profile, or a ProfileError when `gpu_name` is another GPU than the profile's."""
        if gpu_key(gpu_name) != gpu_key(self.gpu.name):
            raise ProfileError(
                f"machine profile {self.name} describes {self.gpu.name}, this GPU is {gpu_name}; "
                "run `xstage calibrate` here, or set XSTAGE_PROFILE to a profile of this GPU"
            )
        return self

    def to_json(self) -> str:
        """The profile as indented JSON; numeric rows stay on one line each."""
        return dump(dataclasses.asdict(self)) + "\n"

    def save(self, path: str | pathlib.Path) -> None:
        """Write the JSON file."""
        pathlib.Path(path).write_text(self.to_json(), encoding="utf-8")


def from_json(text: str, where: str = "machine profile") -> MachineProfile:
    """Parse and check a profile. Raises ProfileError naming the field that does not fit."""
    data = parse(text, where, ProfileError)
    if isinstance(data, dict) and data.get("schema") != SCHEMA:
        raise ProfileError(
            f"{where}: schema: expected {SCHEMA}, got {data.get('schema')}; "
            "run `xstage calibrate` with this version"
        )
    return typing.cast(MachineProfile, build(MachineProfile, data, where, ProfileError))


def bundled() -> list[str]:
    """Names of the profiles that ship with the package."""
    return sorted(path.stem for path in _PROFILES.glob("*.json"))


def load(source: str | pathlib.Path | None = None, gpu_name: str | None = None) -> MachineProfile:
    """Find a profile.

    Parameters
    ----------
    source : str or path, optional
        Name of a bundled profile or path of a JSON file. Without it: the environment variable
        `XSTAGE_PROFILE`, else the bundled profile of `gpu_name`, else (no `gpu_name`) `h200x2`.
    gpu_name : str, optional
        Name of the GPU that the profile must describe, as the driver reports it.

    Raises
    ------
    ProfileError
        No such profile, it does not parse, or it describes another GPU.
    """
    chosen = source if source is not None else _env.get("XSTAGE_PROFILE")
    if chosen is None:
        chosen = "h200x2" if gpu_name is None else _bundled_for(gpu_name)
    profile = _read(str(chosen))
    return profile if gpu_name is None else profile.require(gpu_name)


def load_here(source: str | pathlib.Path | None = None) -> MachineProfile:
    """`load` for the current CUDA device; without one, `load(source)`."""
    import torch

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return load(source, name)


def _read(chosen: str) -> MachineProfile:
    path = chosen if chosen.endswith(".json") else os.path.join(_PROFILES, f"{chosen}.json")
    if not os.path.isfile(path):
        raise ProfileError(
            f"machine profile: expected a JSON file or one of {', '.join(bundled())}, got {chosen}"
        )
    facts = os.stat(path)
    return _parsed(path, facts.st_ino, facts.st_size, facts.st_mtime_ns)


@functools.lru_cache(maxsize=32)
def _parsed(path: str, *state: int) -> MachineProfile:
    """Cached until the file changes; `state` says that it has."""
    text = pathlib.Path(path).read_text(encoding="utf-8", errors="replace")
    return from_json(text, f"machine profile {os.path.basename(path)}")


def _bundled_for(gpu_name: str) -> str:
    for name in bundled():
        if gpu_key(_read(name).gpu.name) == gpu_key(gpu_name):
            return name
    raise ProfileError(
        f"machine profile: none bundled for {gpu_name} (there are {', '.join(bundled())}); "
        "run `xstage calibrate`"
    )


def gpu_key(name: str) -> str:
    """`NVIDIA H200` and `H200` are one GPU; `H100 80GB HBM3` is an `H100`; `H200 NVL` is not."""
    words = [word for word in name.upper().replace("-", " ").split() if word != "NVIDIA"]
    noise = ("GB", "HBM2E", "HBM3", "HBM3E", "SXM", "SXM4", "SXM5", "TESLA")
    return " ".join(word for word in words if not word.endswith(noise))


# At import, beside torch's seconds: the first decision of a process shall not wait for files.
for _name in bundled():
    _read(_name)
