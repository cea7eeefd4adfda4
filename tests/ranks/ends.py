"""What the processes of `launch` do at the end of a workspace, and after a peer's."""

from __future__ import annotations

import gc
import time

import torch.distributed as dist

from xstage_ext import SymmetricWorkspace
from xstage_ext.errors import XStageError
from xstage_ext.handshake import handshake_bytes

from .scenarios import Place, exchange, report, reported


def leave(place: Place, how: str) -> None:
    """Six ways to end a process that has a workspace."""
    place.join("gloo")
    workspace = SymmetricWorkspace(nbytes=1 << 18, device=place.device, timeout_ms=20_000)
    lease = workspace.channel("h", handshake_bytes(place.world, 40, 2))
    kept = exchange(lease, 0, slots=2)
    workspace.agree("everyone has finished the first call")
    if how == "normal":
        workspace.close()
        dist.destroy_process_group()
    elif how == "no close":
        pass
    elif how == "close after destroy":
        dist.destroy_process_group()
        workspace.close()
    elif how == "close twice":
        workspace.close()
        workspace.close()
        dist.destroy_process_group()
    elif how == "exception on rank 1":
        if place.rank == 1:
            raise ValueError("on purpose")
        reported(lambda: exchange(lease, 1))
    elif how == "del on rank 0":
        if place.rank == 0:
            del workspace, lease
            gc.collect()
            time.sleep(0.5)
        else:
            time.sleep(1.0)
    assert float(kept[0, 1]) == 1.0


def closed(place: Place) -> None:
    """Use after close."""
    workspace = place.workspace()
    lease = workspace.channel("h", 1 << 16)
    exchange(lease, 0)
    workspace.close()
    reported(lambda: lease.words())


def peer_closed(place: Place, victim: int, how: str) -> None:
    """One rank closes; whatever the others ask of it afterwards says so at once."""
    workspace = place.workspace(timeout_ms=20_000)
    lease = workspace.channel("h", 1 << 16)
    exchange(lease, 0)
    if place.rank == victim:
        if how == "close":
            workspace.close()
        elif how == "del":
            del workspace, lease
            gc.collect()
        place.store.set("victim closed", "1")
        if how == "exit":
            return
        time.sleep(2.0)
        return
    place.store.wait(["victim closed"])
    asked = {
        "call": lambda: exchange(lease, 1),
        "next call": lambda: exchange(lease, 2),
        "reset": workspace.reset,
        "channel": lambda: workspace.channel("g", 1 << 10),
        "agree": lambda: workspace.agree("anything"),
    }
    for name, ask in asked.items():
        started = time.monotonic()
        try:
            ask()
        except XStageError as error:
            text = f"{type(error).__name__}: {error}"
            report(**{name: text, f"{name} seconds": time.monotonic() - started})
    workspace.close()
