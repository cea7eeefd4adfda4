"""One process per GPU for calibrate, validate and doctor: by torchrun, or spawned."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessException

from ._gpu_facts import GpuFacts, gpu_facts
from .burst import BurstBench
from .errors import CalibrationError
from .workspace import SymmetricWorkspace

REGION_BYTES = 512 << 20
CONTROL_BYTES = 4096
"""kBurstControlBytes of csrc/burst/plan.h."""

T = TypeVar("T")


class Session:
    """One rank of a measurement.

    Attributes
    ----------
    rank, world : int
    device : torch.device
    bench : BurstBench
    facts : list of GpuFacts
        Of every rank's GPU.
    """

    def __init__(self, workspace: SymmetricWorkspace) -> None:
        self.workspace = workspace
        self.rank = workspace.rank
        self.world = workspace.world
        self.device = torch.device(workspace.device)
        self._lease = workspace.channel("burst", REGION_BYTES, counter_bytes=CONTROL_BYTES)
        self.bench = BurstBench(self._lease.words, self.rank, self.world, self.device)
        self.facts: list[GpuFacts] = self.gather(gpu_facts(self.device))

    @property
    def leads(self) -> bool:
        """Whether this rank measures and reports."""
        return self.rank == 0

    def barrier(self) -> None:
        """All ranks meet on the host; the GPUs are idle behind it."""
        torch.cuda.synchronize(self.device)
        if self.world > 1:
            dist.barrier()

    def gather(self, value: T) -> list[T]:
        """Everybody's value on every rank."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def landing(self, dst_rank: int, src_rank: int | None = None) -> torch.Tensor:
        """uint8 view of the area on `dst_rank` where bytes of `src_rank` (this rank) land."""
        region = self._lease.region(dst_rank)
        area = (region.numel() - CONTROL_BYTES) // self.world // 4096 * 4096
        start = CONTROL_BYTES + (self.rank if src_rank is None else src_rank) * area
        return region[start : start + area]


@contextlib.contextmanager
def open_session() -> Iterator[Session]:
    """The session of this process; torch.distributed is initialised when there are several."""
    with SymmetricWorkspace(nbytes=REGION_BYTES, timeout_ms=20_000) as workspace:
        yield Session(workspace)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _run_rank(
    rank: int, world: int, port: int, function: Callable[..., Any], args: tuple[Any, ...], path: str
) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
    )
    try:
        with open_session() as session:
            result = function(session, *args)
        if rank == 0:
            with open(path, "wb") as file:
                pickle.dump(result, file)
    finally:
        dist.destroy_process_group()


def on_all_gpus(function: Callable[..., T], *args: Any, fewest: int = 2) -> T | None:
    """Call `function(session, *args)` in one process per GPU.

    Under torchrun this process is one of the ranks; otherwise processes are spawned, one for each
    visible GPU (at most 8).

    Returns
    -------
    The leading rank's result; None on the others.

    Raises
    ------
    CalibrationError
        Fewer than `fewest` GPUs, or a spawned rank failed; its traceback is the cause.
    """
    if not torch.cuda.is_available():
        raise CalibrationError("no CUDA device: this command measures GPUs")
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        world = int(os.environ["WORLD_SIZE"])
        _require(world, fewest)
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        with open_session() as session:
            result = function(session, *args)
            return result if session.leads else None
    world = min(torch.cuda.device_count(), 8)
    _require(world, fewest)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "result")
        try:
            torch.multiprocessing.spawn(
                _run_rank, (world, _free_port(), function, args, path), nprocs=world
            )
        except ProcessException as error:
            last = str(error).strip().splitlines()[-1]
            raise CalibrationError(f"rank {error.error_index} failed: {last}") from error
        with open(path, "rb") as file:
            return pickle.load(file)  # type: ignore[no-any-return]


def _require(world: int, fewest: int) -> None:
    if world < fewest:
        raise CalibrationError(
            f"expected at least {fewest} GPUs with peer access in one node, got {world}"
        )
