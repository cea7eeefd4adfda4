"""What a workspace owns, apart from the object that users hold.

Separate, so that garbage collection and interpreter exit can free it without that object, and so
that memory under live results outlives its workspace.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing.util
import os
import sys
import weakref

import torch

from . import _binary, _faults
from ._backends import BlockMemory
from ._exchange import Exchange
from .errors import BinaryError
from .planner import wire

_LIVE: weakref.WeakSet[Resources] = weakref.WeakSet()
_KEPT: list[Resources] = []
"""Closed, but a live result still lies in a slot, or a graph capture was running."""


class Resources:
    """Memory, host pages and addresses of one workspace.

    Parameters
    ----------
    memory
        One block per rank.
    exchange
        The group's hosts.
    device
        Where the blocks are.
    timeout_ms
        Deadline of device waits.
    """

    def __init__(
        self, memory: BlockMemory, exchange: Exchange, device: torch.device, timeout_ms: int
    ) -> None:
        self.memory = memory
        self.exchange = exchange
        self.device = device
        self.timeout_ms = timeout_ms
        self.world = len(memory.addresses)
        self.own_ranks = list(memory.own_ranks)
        self.closed = False
        self._freed = False
        self._pid = os.getpid()
        facts = _faults.layout()
        # Pinned memory has one address for host and device, and kernels may write it at any time.
        self._pages = torch.zeros(
            (len(self.own_ranks), facts.host_page_bytes),
            dtype=torch.uint8,
            pin_memory=device.type == "cuda",
        )
        # As numbers: under a fake mode of torch a tensor tells another address.
        self._addresses: list[int] = [page.data_ptr() for page in self._pages]
        torch.ops.xstage.workspace_load(memory.block(self.own_ranks[0]))
        # Made now: making the first stream waits for running kernels, and close() must not.
        self._side_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        _sweep()
        _LIVE.add(self)
        _hook_exit()

    def page(self, rank: int) -> int:
        """Address of the host page of one of this process's ranks."""
        return self._addresses[self.own_ranks.index(rank)]

    def words(
        self, rank: int, *, channel: int, offset: int, nbytes: int, digest: int = 0
    ) -> list[int]:
        """The wire message that describes one operator instance to an operator (workspace.h)."""
        facts = _faults.layout()
        fields = [
            rank,
            self.world,
            1 if self.device.type == "cuda" else 0,
            self.timeout_ms,
            channel,
            offset,
            nbytes,
            self.page(rank),
            digest,
            *self.memory.addresses,
            *[0] * (facts.max_ranks - self.world),
        ]
        return [*_wire_header(), *fields]

    def announce(self, failure: int, channel: int = 0) -> None:
        """Tell all peers, on the current stream, that this process's ranks take no further part.

        From the next call of `channel` on; its earlier calls are not concerned.
        """
        for rank in self.own_ranks:
            words = self.words(rank, channel=channel, offset=0, nbytes=0)
            torch.ops.xstage.workspace_announce(self.memory.block(rank), failure, words)

    def forget_faults(self) -> None:
        """Clear what this process's ranks found, and what peers told them."""
        for rank in self.own_ranks:
            self.memory.block(rank)[: _faults.layout().channel_offset].zero_()
            page = self.page(rank)
            _faults.clear_record(page, _faults.FATAL)
            _faults.clear_record(page, _faults.MASKED)
            _faults.restart_slots(page)

    def synchronize(self) -> None:
        """Wait until the device has finished; at most a deadline per pending call."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def close(self, failure: int = _faults.CLOSED) -> None:
        """Free this process's part. Local, never raises, safe to call twice and from anywhere.

        `failure` is what peers that still wait for this rank are told. After CLOSED pending calls
        run to their end first; otherwise they are told to leave at once.
        """
        if self.closed or os.getpid() != self._pid:
            return
        self.closed = True
        self.exchange.post_closed()
        if self.capturing():
            _KEPT.append(self)  # freeing would break the capture
            return
        # With a broken device context the driver frees what this process had.
        with contextlib.suppress(RuntimeError):
            self._announce_and_wait(failure)
        if self._held():
            _KEPT.append(self)
        else:
            self._free()

    def _announce_and_wait(self, failure: int) -> None:
        alone = len(self.own_ranks) == self.world
        if self.device.type != "cuda":
            if not alone:
                self.announce(failure)
            return
        with torch.cuda.device(self.device):
            if failure == _faults.CLOSED:
                self.synchronize()
            if not alone:
                # A stream of its own: a stuck kernel on the current one must not hold it up.
                with torch.cuda.stream(self._side_stream):
                    self.announce(failure)
            self.synchronize()

    def capturing(self) -> bool:
        return self.device.type == "cuda" and bool(torch.cuda.is_current_stream_capturing())

    def _held(self) -> bool:
        return any(_faults.held_slots(self.page(rank)) for rank in self.own_ranks)

    def _free(self) -> None:
        self._freed = True
        self.memory.free()


_FIELDS = (
    "rank",
    "world",
    "memory",
    "timeout_ms",
    "channel",
    "region_offset",
    "region_bytes",
    "host_page",
    "digest",
)
DIGEST_WORD = 4 + _FIELDS.index("digest")
"""Where in a wire message the digest of a call stands."""


@functools.cache
def _wire_header() -> tuple[int, ...]:
    """The header; compares the field list with the binary's on the first use."""
    theirs = [name for name, *_ in _binary.wire_fields("workspace")]
    ours = [*_FIELDS, *(f"base_{r}" for r in range(_faults.layout().max_ranks))]
    if ours != theirs:
        raise BinaryError(
            f"xstage: workspace: the Python package has fields {ours}, the binary {theirs}; "
            "reinstall xstage_ext"
        )
    return (wire.MAGIC, wire.KINDS["workspace"], wire.VERSION, len(theirs))


def round_up(nbytes: int, multiple: int = 1024) -> int:
    """Regions start at multiples of 1024 bytes."""
    return (nbytes + multiple - 1) // multiple * multiple


def _sweep() -> None:
    """Free what was kept for live results that are gone by now."""
    for kept in list(_KEPT):
        if not kept.capturing() and not kept._held():
            _KEPT.remove(kept)
            kept._free()


def _close_all() -> None:
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    leaving = error is not None and not isinstance(error, SystemExit)
    for resources in list(_LIVE):
        if leaving and not resources.closed:
            resources.exchange.post_reason(f"{type(error).__name__}: {error}".splitlines()[0])
        resources.close(_faults.GAVE_UP if leaving else _faults.CLOSED)


_HOOKED: set[int] = set()


def _hook_exit() -> None:
    """Close everything when this process ends, also where multiprocessing skips atexit.

    Once per process: a forked child starts without its parent's hooks.
    """
    if os.getpid() not in _HOOKED:
        _HOOKED.add(os.getpid())
        multiprocessing.util.Finalize(None, _close_all, exitpriority=100)
