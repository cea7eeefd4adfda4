"""The handshake: every rank pushes its payload to every rank.

The smallest operator over a `SymmetricWorkspace`, for checking a set-up and as a model for others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .channel import ChannelLease


def handshake_bytes(world: int, row_bytes: int, slots: int = 0) -> int:
    """Bytes of the channel that handshakes of `row_bytes` per rank need."""
    needed: int = torch.ops.xstage.handshake_region_bytes(world, row_bytes, slots)
    return needed


def handshake(lease: ChannelLease, payload: torch.Tensor, *, slots: int = 0) -> torch.Tensor:
    """Exchange payloads: [...] to [world, ...], row r from rank r.

    Parameters
    ----------
    lease
        A channel of at least `handshake_bytes` bytes.
    payload
        Contiguous tensor of any dtype on the workspace's device; the same shape on every rank.
    slots
        0: the result is a new tensor. Else it lies in one of so many slots of the channel's ring
        and holds it until freed (`xstage_ext.workspace`).

    Raises
    ------
    PeerTimeout, PeerError, WorkspaceError
        On the CPU from this call; on CUDA from the next call or from `SymmetricWorkspace.check`.
    """
    with lease.guard():
        out: torch.Tensor = torch.ops.xstage.handshake(payload, lease.words(), slots)
    return out


def handshake_virtual(
    lease: ChannelLease, payloads: Sequence[torch.Tensor], *, slots: int = 0
) -> list[torch.Tensor]:
    """The same for all virtual ranks: one payload and one result per rank."""
    with lease.guard():
        outs: list[torch.Tensor] = torch.ops.xstage.handshake_virtual(
            list(payloads), lease.virtual_words(), slots
        )
    return outs


def _fake(payload: torch.Tensor, workspace: list[int], slots: int = 0) -> torch.Tensor:
    return payload.new_empty((_world(workspace), *payload.shape))


def _fake_virtual(
    payloads: list[torch.Tensor], workspaces: list[int], slots: int = 0
) -> list[torch.Tensor]:
    world = _world(workspaces)
    return [payload.new_empty((world, *payload.shape)) for payload in payloads]


def _world(words: list[int]) -> int:
    return words[4 + 1]  # behind the header: rank, world


torch.library.register_fake("xstage::handshake", _fake)
torch.library.register_fake("xstage::handshake_virtual", _fake_virtual)
