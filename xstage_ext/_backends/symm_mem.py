"""Memory of GPU processes on one node: torch symmetric memory, its own or NVSHMEM's."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch._C._distributed_c10d import Store

from .._exchange import Exchange
from ..errors import WorkspaceError


class TorchSymmetricMemory:
    """A block of torch symmetric memory per rank.

    Parameters
    ----------
    exchange
        The group. Its store also carries torch's rendezvous, under a name of our own, so that no
        process group is needed and subgroups cannot collide.
    nbytes
        Size of a block; the same on every rank.
    device
        This rank's CUDA device.
    nvshmem
        Allocate from NVSHMEM's heap. torch allows one kind per process, chosen by its first
        allocation.
    """

    def __init__(
        self, exchange: Exchange, nbytes: int, device: torch.device, *, nvshmem: bool
    ) -> None:
        self.name = "nvshmem" if nvshmem else "symm_mem"
        import torch.distributed._symmetric_memory as symmetric_memory

        backend: Any = symmetric_memory._SymmetricMemory
        problem = None
        own = None
        try:
            if nvshmem:
                _select_nvshmem(symmetric_memory, backend, device)
            own = backend.empty_strided_p2p((nbytes,), (1,), torch.uint8, device)
        except (RuntimeError, WorkspaceError) as error:
            problem = str(error).splitlines()[0]
        # Everyone learns of a failed allocation before the rendezvous, so all raise alike.
        problems = exchange.all_gather(problem, "workspace allocation")
        if own is None or any(problems):
            texts = [f"rank {r}: {text}" for r, text in enumerate(problems) if text]
            raise WorkspaceError(f"workspace: cannot allocate {nbytes} bytes: {'; '.join(texts)}")

        self._group = _NamedGroup(exchange)
        with _rendezvous_environment():
            try:
                self._handle: Any = backend.rendezvous(own, self._group.name)
            except RuntimeError as error:
                raise WorkspaceError(
                    f"workspace: torch symmetric memory could not map the peers' blocks on "
                    f"{device}: {str(error).splitlines()[0]}; are all GPUs joined by NVLink, and "
                    "may the processes share file descriptors?"
                ) from error
        if self._handle is None:
            raise WorkspaceError("workspace: torch symmetric memory gave no handle")
        self._own: torch.Tensor | None = own
        own.zero_()
        torch.cuda.synchronize(device)
        self.addresses = [int(p) for p in self._handle.buffer_ptrs]
        self.own_ranks = [exchange.rank]
        self._nbytes = nbytes
        if any(address == 0 for address in self.addresses):
            far = [r for r, address in enumerate(self.addresses) if address == 0]
            raise WorkspaceError(
                f"workspace: rank {exchange.rank} cannot address the blocks of ranks {far}: no "
                "peer-to-peer path; use ranks of one NVLink domain, or the fallback"
            )

    def block(self, rank: int) -> torch.Tensor:
        if rank == self.own_ranks[0]:
            assert self._own is not None
            return self._own
        block: torch.Tensor = self._handle.get_buffer(rank, (self._nbytes,), torch.uint8)
        return block

    def free(self) -> None:
        self._handle = None
        self._own = None
        self._group.forget()


class _NamedGroup:
    """A group that torch's rendezvous can find by name, whatever torch.distributed knows.

    Older versions ask a table of group facts, newer ones (seen in 2.11) the registry of process
    groups. A bare group has no backend and costs nothing.
    """

    _numbers = itertools.count()

    def __init__(self, exchange: Exchange) -> None:
        import torch.distributed as dist
        import torch.distributed._symmetric_memory as symmetric_memory
        from torch._C import _distributed_c10d

        self.name = f"xstage-{next(self._numbers)}"
        self._registry: Any = _distributed_c10d
        backend: Any = symmetric_memory._SymmetricMemory
        # torch keeps only the C++ half of a store; this object keeps the Python half.
        self._store = _RendezvousStore(exchange.store)
        _STORES.append(self._store)
        backend.set_group_info(self.name, exchange.rank, exchange.world, self._store)
        self._group: Any = dist.ProcessGroup(self._store, exchange.rank, exchange.world)
        self._registry._register_process_group(self.name, self._group)

    def forget(self) -> None:
        """Take the name back; safe to call twice."""
        if self._group is not None:
            with contextlib.suppress(RuntimeError):  # torch has forgotten all groups before us
                self._registry._unregister_process_group(self.name)
            self._group = None


_STORES: list[Store] = []
"""torch's table of group facts has no way to remove one, so these live as long as the process."""


class _RendezvousStore(Store):
    """The group's store as torch's rendezvous should see it.

    torch numbers its exchanges by one counter per process and puts the number into its keys
    ("<prefix>/<number>/<rank>"). Processes that have been in different subgroups have counted
    differently and would wait for each other for ever. Here the first number seen becomes 0, the
    next 1, and so on, which is the same on every rank of the group.
    """

    def __init__(self, store: Any) -> None:
        super().__init__()
        self._store = store
        self._numbers: dict[str, int] = {}

    def _key(self, key: str) -> str:
        prefix, number, *rank = key.split("/")
        if not number.isdigit():
            return key
        relative = self._numbers.setdefault(number, len(self._numbers))
        return "/".join(["rendezvous", prefix, str(relative), *rank])

    def set(self, key: str, value: Any) -> None:
        self._store.set(self._key(key), value)

    def get(self, key: str) -> bytes:
        value: bytes = self._store.get(self._key(key))
        return value

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def add(self, key: str, amount: int) -> int:
        total: int = self._store.add(self._key(key), amount)
        return total

    def check(self, keys: list[str]) -> bool:
        present: bool = self._store.check([self._key(key) for key in keys])
        return present

    def wait(self, keys: list[str], *timeout: Any) -> None:
        self._store.wait([self._key(key) for key in keys], *timeout)

    def delete_key(self, key: str) -> bool:
        deleted: bool = self._store.delete_key(self._key(key))
        return deleted


def _select_nvshmem(symmetric_memory: Any, backend: Any, device: torch.device) -> None:
    if not symmetric_memory.is_nvshmem_available():
        raise WorkspaceError(
            "NVSHMEM is not available to torch; install nvidia-nvshmem-cu12 or -cu13 as torch's "
            "CUDA version says"
        )
    if backend.get_backend(device) != "NVSHMEM":
        symmetric_memory.set_backend("NVSHMEM")


@contextlib.contextmanager
def _rendezvous_environment() -> Iterator[None]:
    """Settings of torch's rendezvous that our own checks make safe.

    Launchers that show each process one GPU make every device number 0, which torch takes for one
    shared device; the workspace has compared the devices' UUIDs instead. Multicast is not used.
    """
    wanted = {
        "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    }
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
