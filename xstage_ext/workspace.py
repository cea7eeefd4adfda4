"""The symmetric workspace: memory that every rank of a group can write, and its counters.

Contract of results that lie in the workspace ("slots"): a result is valid until its last tensor is
freed; read it on the stream of the call that made it, or let that stream wait for the reader before
the result is dropped. A result of a call captured in a CUDA graph is valid until the next replay.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from . import _env, _faults
from ._exchange import Exchange
from ._groups import check_agreement, check_placement, choose_backend, group_facts, open_memory
from ._resources import Resources, round_up
from .channel import ChannelLease, distinct, first_gap
from .errors import PeerError, WorkspaceError, XStageError

_MIN_SETUP_MS = 60_000


def workspace_bytes(regions: Iterable[int]) -> int:
    """Bytes of one rank's block for channels of these sizes, counters included.

    Answers without allocating anything; pass the same sizes to `SymmetricWorkspace.channel`.

    Parameters
    ----------
    regions
        Bytes of each channel's region.
    """
    return _faults.layout().control_bytes + region_bytes(regions)


def region_bytes(regions: Iterable[int]) -> int:
    """The `nbytes` of a workspace that holds channels of these sizes."""
    return sum(round_up(nbytes) for nbytes in regions)


class SymmetricWorkspace:
    """Peer-mapped memory and signal words for the 1 to 8 ranks of one NVLink domain.

    Making one is collective: every rank of the group makes the same workspaces in the same order.

    Parameters
    ----------
    group
        Process group (any backend; only its store is used). None: WORLD if torch.distributed is
        initialised, else a world of one. Subgroups use their own group ranks.
    nbytes
        Bytes for channels' regions in each rank's block (`region_bytes`); the same on every rank.
    device
        CUDA device or "cpu"; None: the current CUDA device where there is one, else the CPU.
    backend
        "auto", "symm_mem" (torch symmetric memory), "nvshmem" (torch's NVSHMEM backend), "shm"
        (POSIX shared memory, CPU) or "virtual" (all ranks in this process, on one device).
    world
        Number of virtual ranks; only with backend "virtual" (or "auto" without a group).
    timeout_ms
        Deadline of every wait, milliseconds; 0 waits for ever. None: XSTAGE_TIMEOUT_MS, else five
        minutes.

    Raises
    ------
    WorkspaceError
        The group is too large, spans hosts, has no peer-to-peer path, shares a GPU, or its ranks
        disagree; the same on every rank.
    PeerTimeout
        A rank did not come.

    Examples
    --------
    >>> with SymmetricWorkspace(nbytes=1 << 20) as workspace:          # doctest: +SKIP
    ...     lease = workspace.channel("hello", handshake_bytes(workspace.world, 64))
    ...     everyone = handshake(lease, torch.full((16,), float(workspace.rank)))
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        nbytes: int = 0,
        *,
        device: torch.device | str | int | None = None,
        backend: str = "auto",
        world: int | None = None,
        timeout_ms: int | None = None,
    ) -> None:
        facts = group_facts(group, virtual=backend == "virtual" or world is not None)
        self._open(facts.store, facts.rank, facts.world, nbytes, device, backend, world, timeout_ms)

    @classmethod
    def from_store(
        cls,
        store: Store,
        rank: int,
        world: int,
        nbytes: int,
        *,
        device: torch.device | str | int | None = None,
        backend: str = "auto",
        timeout_ms: int | None = None,
    ) -> SymmetricWorkspace:
        """A workspace for processes that share only a key-value store, without torch.distributed.

        Parameters as in the constructor; `rank` and `world` number the processes.
        """
        workspace = cls.__new__(cls)
        workspace._open(store, rank, world, nbytes, device, backend, None, timeout_ms)
        return workspace

    def _open(
        self,
        store: Store | None,
        rank: int,
        world: int,
        nbytes: int,
        device: torch.device | str | int | None,
        backend: str,
        virtual_world: int | None,
        timeout_ms: int | None,
    ) -> None:
        timeout_ms = _env.timeout_ms() if timeout_ms is None else timeout_ms
        if nbytes < 0 or timeout_ms < 0:
            raise WorkspaceError(
                f"workspace: nbytes and timeout_ms: expected 0 or more, got {nbytes}, {timeout_ms}"
            )
        choice = choose_backend(device, backend, world, virtual_world)
        self.rank = rank
        self.world = choice.world
        self.device = choice.device
        self.backend = choice.backend
        self.nbytes = round_up(nbytes)
        self.timeout_ms = timeout_ms
        setup_ms = int(_env.get("XSTAGE_SETUP_TIMEOUT_MS") or max(timeout_ms, _MIN_SETUP_MS))
        processes = 1 if choice.in_process else world
        self._exchange = exchange = Exchange(store, rank, processes, setup_ms)
        check_placement(exchange, choice, self.nbytes, timeout_ms)
        memory = open_memory(exchange, choice, _faults.layout().control_bytes + self.nbytes)
        self._resources = Resources(memory, exchange, self.device, timeout_ms)
        self._finalizer = weakref.finalize(self, self._resources.close)
        self._finalizer.atexit = False  # _resources closes everything at exit, in one place
        self._leases: dict[int, ChannelLease] = {}
        self._failure: XStageError | None = None
        # Nobody may signal into a block before it is zero.
        exchange.barrier("workspace start")

    # --- what it is ---------------------------------------------------------------------------

    @property
    def own_ranks(self) -> list[int]:
        """Ranks that this process plays: one, or all virtual ranks."""
        return self._resources.own_ranks

    @property
    def closed(self) -> bool:
        return self._resources.closed

    def bytes(self) -> int:
        """Bytes of one rank's block, counters included. `workspace_bytes` answers beforehand."""
        return _faults.layout().control_bytes + self.nbytes

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{len(self._leases)} channels"
        return (
            f"SymmetricWorkspace(rank={self.rank}, world={self.world}, device={self.device}, "
            f"backend={self.backend!r}, nbytes={self.nbytes}, {state})"
        )

    # --- channels -----------------------------------------------------------------------------

    def channel(self, name: str, nbytes: int, *, counter_bytes: int | None = None) -> ChannelLease:
        """Reserve counters and a region of every block for one operator instance. Collective.

        Parameters
        ----------
        name
            For error texts, with a number where it is taken; the same on every rank.
        nbytes
            Size of the region. It starts at a multiple of 1024 bytes and is zero.
        counter_bytes
            Bytes at the start of the region that must be zero again after `reset`; None: all of it.
            Pass 0 when the region holds results only, so that a reset keeps live results.
        """
        self._require_open()
        size = round_up(nbytes)
        facts = _faults.layout()
        self.agree({"channel name": name, "channel bytes": nbytes}, what="a new channel")
        index = next((i for i in range(facts.max_channels) if i not in self._leases), None)
        if index is None:
            raise WorkspaceError(
                f"workspace: channel {name!r}: all {facts.max_channels} channels are in use; share "
                "one between layers, or release some"
            )
        offset = first_gap(self._leases.values(), size, facts.control_bytes, self.bytes())
        if offset is None:
            used = sum(lease.reserved_bytes for lease in self._leases.values())
            raise WorkspaceError(
                f"workspace: channel {name!r}: needs {size} bytes in one piece, the workspace has "
                f"{self.nbytes} of which {used} are reserved; make it with a larger nbytes"
            )
        name = distinct(name, [taken.name for taken in self._leases.values()])
        lease = ChannelLease(self, name, index, offset, nbytes, counter_bytes)
        what = f"channel {name!r}"
        try:
            with self._exchange.before(what):
                self._zero_channel(lease, everything=True)
            self._exchange.barrier(what)
        finally:
            if self._exchange.met:  # the peers have it, even if this rank leaves by an interrupt
                self._leases[index] = lease
        return lease

    def _zero_channel(self, lease: ChannelLease, *, everything: bool) -> None:
        facts = _faults.layout()
        counters = lease.reserved_bytes if everything else lease.counter_bytes
        first = facts.channel_offset + lease.index * facts.channel_bytes
        for rank in self.own_ranks:
            block = self._resources.memory.block(rank)
            block[first : first + facts.channel_bytes].zero_()
            block[lease.offset : lease.offset + counters].zero_()
        self._resources.synchronize()

    def _release(self, lease: ChannelLease) -> None:
        if self._leases.get(lease.index) is lease:
            del self._leases[lease.index]

    # --- agreement ----------------------------------------------------------------------------

    def agree(self, facts: Mapping[str, object] | str, *, what: str = "agreement") -> None:
        """Raise on every rank unless all ranks passed the same facts. Collective; no device.

        Parameters
        ----------
        facts
            Named values that JSON can carry (shapes, dtypes by name, digests), or one text.

        Raises
        ------
        WorkspaceError
            Names each field that differs, with the ranks and their values.
        """
        self._require_open()
        check_agreement(self._exchange, {"text": facts} if isinstance(facts, str) else facts, what)

    # --- faults -------------------------------------------------------------------------------

    def check(self, *, synchronize: bool = False) -> None:
        """Raise what a kernel of this process found. A read of host memory; no device call.

        Parameters
        ----------
        synchronize
            First wait for the device, so that calls already launched have shown their fault.

        Raises
        ------
        PeerTimeout, PeerError, WorkspaceError
            The call failed; raised again until `reset`.
        RoutingError
            An expert id was out of range and was masked; raised once.
        """
        self._require_open()
        if synchronize:
            self._resources.synchronize()
        if self._failure is not None:
            raise self._failure
        for rank in self.own_ranks:
            record = _faults.read_record(self._resources.page(rank), _faults.FATAL)
            if record is not None:
                self._failure = self._error_of(record)
                raise self._failure
        for rank in self.own_ranks:
            record = _faults.read_record(self._resources.page(rank), _faults.MASKED)
            if record is not None:
                self._forget_masked(rank)
                raise self._error_of(record)

    def _error_of(self, record: _faults.FaultRecord) -> XStageError:
        return _faults.error_of(record, self._channel_name, self._exchange.reason_of)

    def _channel_name(self, index: int) -> str:
        return self._leases[index].name if index in self._leases else str(index)

    def _forget_masked(self, rank: int) -> None:
        _faults.clear_record(self._resources.page(rank), _faults.MASKED)
        # Control.recorded[MASKED], the claim on the record: the second word behind `failed`.
        self._resources.memory.block(rank)[12:16].zero_()

    def begin(self) -> None:
        """Before each call: raise a fault nobody has seen; recover from one that was raised.

        After a fault was raised here, the next call resets the workspace, together with all peers:
        each of them has met the same fault, or meets it in its next call. A reset that fails, fails
        the call of every rank, so that a rank's next call still meets the peers' next one.
        """
        if self._failure is not None:
            self._reset()
        self.check()

    def refuse(self, reason: str, channel: int = 0) -> None:
        """Tell all peers that this rank refuses a call, so that they raise PeerError with `reason`.

        The workspace then needs a reset, which the next call makes.
        """
        if self.closed or self._failure is not None:
            return
        self._exchange.post_reason(reason)
        self._resources.announce(_faults.REFUSED, channel)
        self._failure = PeerError(f"rank {self.rank} of {self.world} itself refused: {reason}")

    def reset(self) -> None:
        """Make a failed workspace usable again. Collective; waits for this process's device.

        A rank that comes late passes over the resets that its peers gave up on before.

        Raises
        ------
        PeerTimeout, PeerError
            A rank does not come: it has ended, or does not know of the fault; or another rank gave
            up on this reset. The next one, on every rank, starts over.
        """
        self._require_open()
        self._exchange.catch_up("workspace reset")
        self._reset()

    def _reset(self) -> None:
        """In two rounds (see `Exchange`); a rank that leaves between them voids the second."""
        self._require_open()
        if self._resources.capturing():
            raise WorkspaceError(
                "workspace: an earlier call failed; call reset() outside of the graph capture"
            )
        self._resources.synchronize()
        failure = self._failure or WorkspaceError("workspace: reset() failed; repeat it")
        second = "workspace reset, second half"
        with self._exchange.before(second):
            try:
                self._exchange.barrier("workspace reset")  # nothing is in flight any more
            finally:
                self._failure = failure if self._exchange.met else self._failure
            self._resources.forget_faults()
            for lease in self._leases.values():
                self._zero_channel(lease, everything=False)
            self._resources.synchronize()
            self._exchange.clear_reason()
        try:
            self._exchange.barrier(second)  # every block is zero
        finally:
            self._failure = None if self._exchange.met else failure

    def watch(
        self, on_fault: Callable[[XStageError], None] | None = None, interval_s: float = 0.5
    ) -> threading.Thread:
        """Report the first fault while the main thread is busy or waits for the device.

        Parameters
        ----------
        on_fault
            Called once, in the watching thread; None prints one line to standard error.
        interval_s
            Seconds between looks at the host page.
        """
        from ._watcher import start

        return start(self._resources, self._error_of, on_fault, interval_s)

    # --- end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Free this rank's part after its pending calls. Local, idempotent, never raises.

        Peers that still wait for this rank raise PeerError.
        """
        self._resources.close()

    def __reduce__(self) -> NoReturn:
        raise WorkspaceError("workspace: its memory belongs to this process; it cannot be copied")

    def __enter__(self) -> SymmetricWorkspace:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if kind is None:
            self.close()
            return
        self._exchange.post_reason(f"{kind.__name__}: {error}".splitlines()[0])
        self._resources.close(_faults.GAVE_UP)

    def _require_open(self) -> None:
        if self.closed:
            raise WorkspaceError(
                f"workspace: it is closed (rank {self.rank} of {self.world}); make a new one"
            )
