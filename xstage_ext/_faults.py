"""The fault records that kernels leave in a rank's host page, and their text.

The layout mirrors `HostPage` in csrc/common/workspace.h; `_LAYOUT` is read from the binary.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import struct
from collections.abc import Callable

import torch

from .errors import PeerError, PeerTimeout, RoutingError, WorkspaceError, XStageError

_RECORD = struct.Struct("<IIIiiIQQQQQ")
FATAL, MASKED = 0, 1

_TIMEOUT, _PEER_FAILED, _PLAN_DIFFERS, _BAD_EXPERT = 1, 2, 3, 4
REFUSED, GAVE_UP, CLOSED = 1, 2, 3
_FAILURE_TEXT = {
    REFUSED: "refused a call on its host",
    GAVE_UP: "gave up on a call",
    CLOSED: "has closed its workspace",
}


@dataclasses.dataclass(frozen=True)
class Layout:
    """Sizes of the structures that Python and the binary share, in bytes where not counts."""

    control_bytes: int
    host_page_bytes: int
    host_channel_bytes: int
    max_ranks: int
    max_channels: int
    max_slots: int
    channel_offset: int
    channel_bytes: int


@functools.cache
def layout() -> Layout:
    """The layout of the loaded binary."""
    values = torch.ops.xstage.workspace_layout()
    return Layout(*(int(value) for value in values))


@functools.cache
def phase_names() -> list[str]:
    """Names of the phases in which a rank can wait, by number."""
    names: list[str] = torch.ops.xstage.phase_names().splitlines()
    return names


@dataclasses.dataclass(frozen=True)
class FaultRecord:
    """What a rank found out; fields as in csrc/common/fault.h, times in nanoseconds."""

    kind: int
    phase: int
    channel: int
    rank: int
    src_rank: int
    world: int
    epoch: int
    expected: int
    seen: int
    waited_ns: int

    @property
    def phase_name(self) -> str:
        names = phase_names()
        return names[self.phase] if self.phase < len(names) else f"phase {self.phase}"

    @property
    def waited_ms(self) -> float:
        return self.waited_ns / 1e6


def read_record(page: int, slot: int) -> FaultRecord | None:
    """The record in slot `slot` (FATAL or MASKED) of the host page at address `page`, if any."""
    address = page + slot * _RECORD.size
    if ctypes.c_uint32.from_address(address).value == 0:  # `kind` is written last
        return None
    fields = _RECORD.unpack(ctypes.string_at(address, _RECORD.size))
    return FaultRecord(*fields[:-1])


def clear_record(page: int, slot: int) -> None:
    """Forget a record."""
    ctypes.memset(page + slot * _RECORD.size, 0, _RECORD.size)


def held_slots(page: int) -> int:
    """Number of output slots that live results hold, over all channels of a host page."""
    facts = layout()
    first = page + facts.host_page_bytes - facts.max_channels * facts.host_channel_bytes
    held = 0
    for channel in range(facts.max_channels):
        word = ctypes.c_uint32.from_address(first + channel * facts.host_channel_bytes + 16)
        held += word.value.bit_count()
    return held


def restart_slots(page: int) -> None:
    """Start every ring at its first slot again; live results keep theirs."""
    facts = layout()
    first = page + facts.host_page_bytes - facts.max_channels * facts.host_channel_bytes
    for channel in range(facts.max_channels):
        ctypes.memset(first + channel * facts.host_channel_bytes, 0, 16)


def error_of(
    record: FaultRecord,
    channel_name: Callable[[int], str],
    reason_of: Callable[[int], str | None],
) -> XStageError:
    """The exception that says a record in one line, and carries it."""
    error = _error_of(record, channel_name, reason_of)
    error.record = record
    return error


def _error_of(
    record: FaultRecord,
    channel_name: Callable[[int], str],
    reason_of: Callable[[int], str | None],
) -> XStageError:
    me = f"rank {record.rank} of {record.world}"
    where = (
        f"in {record.phase_name} (channel {channel_name(record.channel)!r}, call {record.epoch})"
    )
    peer = f"rank {record.src_rank}" if record.src_rank >= 0 else "its own blocks or several ranks"
    if record.kind == _TIMEOUT:
        return PeerTimeout(
            f"{me} waited {record.waited_ms:.0f} ms for {peer} {where}: expected "
            f"{record.expected}, saw {record.seen}; it ended, is late, or skipped a call "
            "(XSTAGE_TIMEOUT_MS sets the deadline)",
        )
    if record.kind == _PEER_FAILED:
        reason = reason_of(record.src_rank)
        said = f": {reason}" if reason else ""
        what = _FAILURE_TEXT.get(record.seen, f"failed with code {record.seen}")
        return PeerError(
            f"{me} found {where} that {peer} {what}{said}; expected {record.expected}, waited "
            f"{record.waited_ms:.0f} ms",
        )
    if record.kind == _PLAN_DIFFERS:
        return WorkspaceError(
            f"{me} and {peer} made different calls {where}: digest of plan and shapes "
            f"{record.expected:#08x} here, {record.seen:#08x} there; all ranks must call the same "
            "modules, with the same plan and sizes, in the same order",
        )
    if record.kind == _BAD_EXPERT:
        expert = record.seen - (1 << 64) if record.seen >> 63 else record.seen
        return RoutingError(
            f"{me}: an expert id out of range was masked {where}: got {expert}, expected -1 "
            f"to {record.expected - 1}",
        )
    return XStageError(f"{me}: unknown fault {record.kind} {where}")
