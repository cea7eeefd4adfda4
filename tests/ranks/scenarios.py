"""What the processes of `launch` do. Each function is one rank's whole life.

Ranks report facts as JSON lines on standard output; tests judge them.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import signal
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from xstage_ext import SymmetricWorkspace
from xstage_ext.channel import ChannelLease
from xstage_ext.errors import XStageError
from xstage_ext.handshake import handshake, handshake_bytes


@dataclasses.dataclass(frozen=True)
class Place:
    """This process: its rank, the world's size, a store that outlives every rank, its device."""

    rank: int
    world: int
    store: dist.Store
    device: torch.device

    def workspace(self, nbytes: int = 1 << 20, **options: Any) -> SymmetricWorkspace:
        return SymmetricWorkspace.from_store(
            self.store, self.rank, self.world, nbytes, device=self.device, **options
        )

    def join(self, backend: str) -> None:
        dist.init_process_group(backend, store=self.store, rank=self.rank, world_size=self.world)


def report(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def exchange(lease: ChannelLease, call: int, elements: int = 10, slots: int = 0) -> torch.Tensor:
    """One handshake whose every element is checked."""
    workspace = lease.workspace
    ramp = torch.arange(elements, dtype=torch.float32, device=workspace.device)
    out = handshake(lease, ramp + 1000 * workspace.rank + call, slots=slots)
    workspace.check(synchronize=True)
    ranks = torch.arange(workspace.world, dtype=torch.float32, device=workspace.device)
    expected = ramp + 1000 * ranks[:, None] + call
    assert torch.equal(out, expected), (workspace.rank, call, out, expected)
    return out


def reported(body: Any, **also: Any) -> None:
    """Run, report the error and how long it took, and leave with code 7 if there was one."""
    started = time.monotonic()
    try:
        body()
    except XStageError as error:
        report(
            error=type(error).__name__,
            text=str(error),
            seconds=time.monotonic() - started,
            **also,
        )
        sys.exit(7)
    report(error=None, **also)


# --- good cases -------------------------------------------------------------------------------


def handshakes(place: Place, calls: int, elements: int, slots: list[int], group: str) -> None:
    """Calls over a store alone, or over a process group; with each number of output slots."""
    if group:
        place.join(group)
        workspace = SymmetricWorkspace(nbytes=1 << 24, device=place.device)
    else:
        workspace = place.workspace(1 << 24)
    with workspace:
        for count in slots:
            lease = workspace.channel("h", handshake_bytes(place.world, 4 * elements, count))
            for call in range(calls):
                exchange(lease, call, elements, count)
        report(backend=workspace.backend, rank=workspace.rank, world=workspace.world)
    if group:
        dist.destroy_process_group()


def nvshmem(place: Place) -> None:
    """The same over NVSHMEM's heap, which wants a process group."""
    place.join("nccl")
    with SymmetricWorkspace(nbytes=1 << 20, device=place.device, backend="nvshmem") as workspace:
        lease = workspace.channel("h", handshake_bytes(place.world, 4004))
        for call in range(20):
            exchange(lease, call, 1001)
    dist.destroy_process_group()


def two_channels(place: Place) -> None:
    """Two instances of different size, alive together, used in turn; then one is reserved anew."""
    with place.workspace() as workspace:
        small = workspace.channel("small", handshake_bytes(place.world, 40))
        large = workspace.channel("large", handshake_bytes(place.world, 4000))
        for call in range(6):
            exchange(small, call)
            exchange(large, call, 1000)
        small.release()
        again = workspace.channel("again", handshake_bytes(place.world, 40))
        assert again.offset == small.offset and again.index == small.index
        exchange(again, 0)


def subgroups(place: Place, first: list[list[int]], backend: str) -> None:
    """Workspaces of disjoint subgroups at the same time, then one of WORLD."""
    place.join(backend)
    mine = None
    for ranks in first:
        group = dist.new_group(ranks)
        if place.rank in ranks:
            mine = (ranks, group)
    if mine is not None:
        ranks, group = mine
        size = 1 << (18 + ranks[0])  # alive together with other sizes
        workspace = SymmetricWorkspace(group, size, device=place.device)
        assert (workspace.rank, workspace.world) == (ranks.index(place.rank), len(ranks))
        lease = workspace.channel("sub", handshake_bytes(len(ranks), 40))
        for call in range(20):
            exchange(lease, call)
    with SymmetricWorkspace(nbytes=1 << 18, device=place.device) as everyone:
        lease = everyone.channel("all", handshake_bytes(place.world, 40))
        for call in range(20):
            exchange(lease, call)
    if mine is not None:
        workspace.close()
    dist.destroy_process_group()


def create_and_close(place: Place, times: int) -> None:
    """Workspaces made and closed again and again; reports memory and handles afterwards."""
    sizes = []
    for _ in range(times):
        with place.workspace(1 << 22) as workspace:
            exchange(workspace.channel("h", handshake_bytes(place.world, 40)), 0)
        sizes.append(_footprint(place.device))
    report(first=sizes[4], last=sizes[-1])


def _footprint(device: torch.device) -> dict[str, int]:
    with open("/proc/self/statm") as statm:
        resident = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    with open("/proc/self/maps") as maps:
        mapped = sum("/dev/shm/xstage-" in line for line in maps)
    used = 0
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        used = total - free
    return {
        "resident": resident,
        "files": len(os.listdir("/proc/self/fd")),
        "mapped": mapped,
        "device": used,
    }


def slots_and_results(place: Place) -> None:
    """Live results hold their slots, dropping frees them, and they outlive their workspace."""
    workspace = place.workspace(timeout_ms=20_000)
    lease = workspace.channel("ring", handshake_bytes(place.world, 40, 2), counter_bytes=0)
    kept = [exchange(lease, 0, slots=2), exchange(lease, 1, slots=2)]
    try:
        exchange(lease, 2, slots=2)
    except Exception as error:
        report(exhausted=str(error))
    first = kept[0].clone()
    assert torch.equal(kept[0], first)
    del kept[0]
    last = exchange(lease, 3, slots=2)  # after the reset that a refused call needs
    workspace.close()
    again = place.workspace()
    assert torch.equal(kept[0][0, :2].cpu(), torch.tensor([1.0, 2.0]))
    assert float(last[0, 0]) == 3.0
    again.close()


# --- faults -----------------------------------------------------------------------------------


def killed(place: Place, victim: int, where: str, timeout_ms: int, signal_name: str) -> None:
    """One rank dies before, during or after a call; the others report what they get."""
    number = getattr(signal, signal_name)
    elements = 1 << 22 if where == "during" else 10
    size = handshake_bytes(place.world, 4 * elements)
    if where == "setup" and place.rank == victim:
        os.kill(os.getpid(), number)
    workspace = place.workspace(size, timeout_ms=timeout_ms)
    lease = workspace.channel("layer.0", size)
    if where != "before":
        exchange(lease, 0, elements)
    if place.rank == victim:
        if where == "during":
            threading.Timer(0.004, os.kill, (os.getpid(), number)).start()
            for call in range(1, 1000):
                exchange(lease, call, elements)
        os.kill(os.getpid(), number)
        time.sleep(60)
    report(left=_shared_names())

    def calls() -> None:
        for call in range(1, 1000):
            exchange(lease, call, elements)

    reported(calls)


def _shared_names() -> list[str]:
    """This process's blocks that still have a name."""
    return [name for name in os.listdir("/dev/shm") if name.startswith(f"xstage-{os.getpid()}-")]


def exception(place: Place, how: str) -> None:
    """Rank 1 leaves by an exception; the others wait for it in a call."""
    workspace = place.workspace(timeout_ms=30_000)
    lease = workspace.channel("layer.0", 1 << 16)
    for call in range(20):
        exchange(lease, call)
    if place.rank == 1:
        if how == "with":
            with workspace:
                raise ValueError("no such layer")
        raise ValueError("no such layer")
    reported(lambda: exchange(lease, 1))


def refusal(place: Place) -> None:
    """Rank 0 refuses a call; everyone raises; the next call works on all ranks."""
    workspace = place.workspace(timeout_ms=20_000)
    lease = workspace.channel("layer.3", 1 << 16)
    for trial in range(2):
        for call in range(20):  # a refusal of the next call must not reach back into these
            exchange(lease, call)
        try:
            if place.rank == 0:
                with lease.guard():
                    raise ValueError("tokens: expected at most 256, got 257")
            exchange(lease, 1)
        except ValueError as error:
            report(error=type(error).__name__, text=str(error))
        except XStageError as error:
            report(error=type(error).__name__, text=str(error))
        for call in range(5):
            exchange(lease, call + 10 * trial)
    workspace.close()
    report(recovered=True)


def late(place: Place, timeout_ms: int) -> None:
    """Rank 1 comes later than the deadline; everyone raises; the next call works on all ranks."""
    workspace = place.workspace(timeout_ms=timeout_ms)
    lease = workspace.channel("layer.1", 1 << 16)
    exchange(lease, 0)
    if place.rank == 1:
        time.sleep(3 * timeout_ms / 1000)
    try:
        exchange(lease, 1)
    except XStageError as error:
        report(error=type(error).__name__, text=str(error))
    for call in range(5):
        exchange(lease, call)
    workspace.close()
    report(recovered=True)


def disagree(place: Place) -> None:
    """Rank 1 differs from the others in one thing after another; reports what each brings."""
    texts = {}
    for what in ("nbytes", "timeout", "name", "size", "field", "text", "payload"):
        try:
            _differ(place, what if place.rank == 1 else "")
        except XStageError as error:
            texts[what] = f"{type(error).__name__}: {error}"
    report(**texts)


def _differ(place: Place, what: str) -> None:
    workspace = place.workspace(
        1 << (19 if what == "nbytes" else 18), timeout_ms=20_000 + (what == "timeout")
    )
    lease = workspace.channel("b" if what == "name" else "a", 2048 if what == "size" else 8192)
    workspace.agree({"hidden": 4096, "topk": 8 if what == "field" else 4})
    workspace.agree("plan 2" if what == "text" else "plan 1")
    exchange(lease, 0, elements=11 if what == "payload" else 10)


def watched(place: Place) -> None:
    """A watcher reports the fault while nobody calls anything."""
    workspace = place.workspace(timeout_ms=500)
    lease = workspace.channel("layer.0", 1 << 16)
    exchange(lease, 0)
    if place.rank == 1:
        time.sleep(3)
        return
    watcher = workspace.watch(interval_s=0.05)
    torch.ops.xstage.handshake(torch.ones(10, device=place.device), lease.words())
    watcher.join(10)
    os._exit(0 if not watcher.is_alive() else 1)


def too_large(place: Place) -> None:
    """More memory than there is."""
    reported(lambda: place.workspace(1 << 46))


def play(task: dict[str, Any]) -> None:
    """One rank of a task that `launch` wrote."""
    device = torch.device(task["device"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", task["port"], is_master=False)
    place = Place(task["rank"], task["world"], store, device)
    # "name" is a function of this file, "module.name" one of tests/ranks/module.py.
    module, _, name = task["scenario"].rpartition(".")
    there = vars(importlib.import_module(f"tests.ranks.{module}")) if module else globals()
    there[name](place, **task["arguments"])


if __name__ == "__main__":
    play(json.loads(sys.argv[1]))
