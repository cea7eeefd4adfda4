"""Who takes part in a workspace, on what devices, and whether they can reach each other."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from . import _faults
from ._backends import BlockMemory, LocalMemory, SharedMemory, TorchSymmetricMemory
from ._exchange import Exchange
from .errors import WorkspaceError
from .support import resolve_device

BACKENDS = ("auto", "symm_mem", "nvshmem", "shm", "virtual")


@dataclasses.dataclass(frozen=True)
class GroupFacts:
    """A group's store, and this process's place in it (group ranks, never global ones)."""

    store: Store | None
    rank: int
    world: int


@dataclasses.dataclass(frozen=True)
class BackendChoice:
    """What `choose_backend` decided. `in_process`: all ranks live in this process."""

    backend: str
    device: torch.device
    world: int
    in_process: bool


def group_facts(group: dist.ProcessGroup | None, *, virtual: bool) -> GroupFacts:
    """Facts of a process group; None means WORLD if there is one, else a world of one."""
    if virtual:
        if group is not None:
            raise WorkspaceError("workspace: virtual ranks need no group; pass world= only")
        return GroupFacts(None, 0, 1)
    if not (dist.is_available() and dist.is_initialized()):
        if group is not None:
            raise WorkspaceError("workspace: group: torch.distributed is not initialised")
        return GroupFacts(None, 0, 1)
    rank = dist.get_rank(group)
    if rank < 0:
        raise WorkspaceError(
            f"workspace: group: this process (global rank {dist.get_rank()}) is not a member; only "
            "members make the workspace"
        )
    world = dist.get_world_size(group)
    if world == 1:
        return GroupFacts(None, rank, world)
    from torch.distributed import distributed_c10d

    real = group if group is not None else distributed_c10d._get_default_group()
    return GroupFacts(distributed_c10d._get_process_group_store(real), rank, world)


def choose_backend(
    device: torch.device | str | int | None, backend: str, world: int, virtual_world: int | None
) -> BackendChoice:
    """Resolve "auto", and refuse combinations that cannot work."""
    if backend not in BACKENDS:
        raise WorkspaceError(f"workspace: backend: expected one of {BACKENDS}, got {backend!r}")
    if virtual_world is not None and backend not in ("auto", "virtual"):
        raise WorkspaceError(f"workspace: world is for virtual ranks, not for backend {backend!r}")
    chosen = _resolve_device(device)
    total = virtual_world if virtual_world is not None else world
    max_ranks = _faults.layout().max_ranks
    if not 1 <= total <= max_ranks:
        raise WorkspaceError(
            f"workspace: group of {total} ranks: expected 1 to {max_ranks} ranks of one NVLink "
            "domain; make subgroups (torch.distributed.new_group)"
        )
    if virtual_world is not None or backend == "virtual":
        return BackendChoice("virtual", chosen, total, True)
    if backend == "auto" and total == 1:
        return BackendChoice("local", chosen, 1, True)
    wanted = {"cpu": "shm", "cuda": "symm_mem"}[chosen.type] if backend == "auto" else backend
    if (wanted == "shm") != (chosen.type == "cpu"):
        raise WorkspaceError(
            f"workspace: backend {wanted!r} has no memory on {chosen}; use "
            f"{'shm' if chosen.type == 'cpu' else 'symm_mem or nvshmem'!s}"
        )
    if total == 1:
        return BackendChoice("local", chosen, 1, True)
    return BackendChoice(wanted, chosen, total, False)


def _resolve_device(device: torch.device | str | int | None) -> torch.device:
    resolved = resolve_device(device)
    if resolved.type not in ("cpu", "cuda"):
        raise WorkspaceError(f"workspace: device: expected cpu or cuda, got {resolved}")
    return resolved


def check_agreement(exchange: Exchange, facts: Mapping[str, object], what: str) -> None:
    """Raise on every rank, naming field and ranks, unless all ranks passed the same facts."""
    problems = differences(exchange.all_gather(dict(facts), what))
    if problems:
        raise WorkspaceError(f"workspace: ranks disagree in {what}: {'; '.join(problems)}")


def differences(everyone: Sequence[Mapping[str, Any]]) -> list[str]:
    """Fields in which the ranks' facts differ, each with its values and ranks."""
    fields = list(dict.fromkeys(field for theirs in everyone for field in theirs))
    problems = []
    for field in fields:
        values = [theirs.get(field, "nothing") for theirs in everyone]
        if any(value != values[0] for value in values):
            problems.append(f"{field}: {_by_value(values)}")
    return problems


def first_said(everyone: Sequence[str | None], own: str | None) -> str | None:
    """The first rank's text there is, with its rank unless this rank says the same."""
    for rank, text in enumerate(everyone):
        if text is not None:
            return text if text == own else f"rank {rank}: {text}"
    return None


def _by_value(values: Sequence[object]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(repr(value), []).append(rank)
    return ", ".join(
        f"rank{'s' if len(who) > 1 else ''} {', '.join(map(str, who))} has {value}"
        if len(who) == 1
        else f"ranks {', '.join(map(str, who))} have {value}"
        for value, who in ranks.items()
    )


def check_placement(
    exchange: Exchange, choice: BackendChoice, nbytes: int, timeout_ms: int
) -> None:
    """Refuse, on every rank alike, a group that cannot share memory."""
    if choice.in_process:
        return
    facts = {
        "nbytes": nbytes,
        "backend": choice.backend,
        "timeout_ms": timeout_ms,
        "world": choice.world,
    }
    check_agreement(exchange, facts, "workspace")
    places = exchange.all_gather(_place(choice.device), "workspace placement")
    problems = [_placement_problem(exchange.rank, choice, places)]
    everyones = exchange.all_gather(problems[0], "workspace placement, verdicts")
    found = list(dict.fromkeys(text for text in everyones if text))
    if found:
        raise WorkspaceError(f"workspace: {'; '.join(found)}")


def _place(device: torch.device) -> dict[str, str]:
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id")
    place = {"host": socket.gethostname(), "boot": ""}
    with contextlib.suppress(OSError):
        place["boot"] = boot.read_text().strip()
    if device.type == "cuda":
        place["gpu"] = _gpu_uuid(device.index)
    return place


def _placement_problem(
    rank: int, choice: BackendChoice, places: list[dict[str, str]]
) -> str | None:
    kernels = {place["boot"] or place["host"] for place in places}
    if len(kernels) > 1:
        hosts = _by_value([place["host"] for place in places])
        return f"the ranks are on {len(kernels)} hosts ({hosts}); a workspace serves one node"
    if choice.device.type != "cuda":
        return None
    for peer, place in enumerate(places):
        if peer == rank:
            continue
        if place["gpu"] == places[rank]["gpu"]:
            return (
                f"ranks {min(rank, peer)} and {max(rank, peer)} share one GPU ({place['gpu']}); "
                "give each rank its own, or use backend='virtual'"
            )
        if peer_access(choice.device.index, place["gpu"]) is False:
            return (
                f"rank {rank} on {choice.device} has no peer-to-peer access to the GPU of rank "
                f"{peer} ({place['gpu']}); use GPUs joined by NVLink, or the fallback"
            )
    return None


def _gpu_uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def peer_access(index: int, uuid: str) -> bool | None:
    """Whether a device can map a GPU's memory; None when this process does not see that GPU."""
    for other in range(torch.cuda.device_count()):
        if _gpu_uuid(other) == uuid:
            return bool(torch.cuda.can_device_access_peer(index, other))
    return None


def open_memory(exchange: Exchange, choice: BackendChoice, nbytes: int) -> BlockMemory:
    """Allocate and map the blocks. Collective unless all ranks are in this process."""
    if choice.in_process:
        return LocalMemory(choice.world, nbytes, choice.device, choice.backend)
    if choice.backend == "shm":
        return SharedMemory(exchange, nbytes)
    with torch.cuda.device(choice.device):
        return TorchSymmetricMemory(
            exchange, nbytes, choice.device, nvshmem=choice.backend == "nvshmem"
        )
