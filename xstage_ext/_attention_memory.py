"""The memory that a `UlyssesAttention` calls through, and how its peers hear of a refused call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist

from ._attention_paths import Semantics, refuse_lse
from ._roll_call import RollCall
from .channel import ChannelLease
from .errors import WorkspaceError, XStageError
from .planner import wire
from .workspace import SymmetricWorkspace, region_bytes


class AttentionMemory:
    """The channels of a module: one for q, k and v behind the All-to-All, one for results."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.workspace: SymmetricWorkspace | None = None
        self.inputs: ChannelLease | None = None
        self.outputs: ChannelLease | None = None
        self.digest = 0
        self.roll_call: RollCall | None = None
        self._owned = contextlib.ExitStack()  # gives back what was reserved here

    @property
    def sizes(self) -> tuple[int, int]:
        """Bytes for inputs and for outputs."""
        leases = (self.inputs, self.outputs)
        inputs, outputs = (0 if lease is None else lease.nbytes for lease in leases)
        return inputs, outputs

    def require(self, needed: tuple[int, int], what: str) -> None:
        """Raise unless the channels are large enough."""
        if any(have < need for have, need in zip(self.sizes, needed, strict=True)):
            raise WorkspaceError(
                f"xstage.UlyssesAttention: {self.name}: {what} needs {needed} bytes for inputs and "
                f"outputs, prepared are {self.sizes}; prepare() for the largest shape"
            )

    def require_held(self) -> None:
        """Raise once the module that reserved the channels has given them back."""
        if self.outputs is not None:
            self.outputs.require_held()

    def reserve(
        self,
        needed: tuple[int, int],
        workspace: SymmetricWorkspace | None,
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        """Take channels of a workspace, or make one; collective."""
        try:
            if workspace is None:
                workspace = SymmetricWorkspace(group, region_bytes(needed), device=device)
                self._owned.callback(workspace.close)
            self.outputs = workspace.channel(f"{self.name} outputs", needed[1], counter_bytes=0)
            self._owned.callback(self.outputs.release)
            if needed[0]:
                self.inputs = workspace.channel(f"{self.name} inputs", needed[0], counter_bytes=0)
                self._owned.callback(self.inputs.release)
        except BaseException:
            self.close()  # all of it or nothing
            raise
        self.workspace = workspace
        self.digest = wire.digest(self.outputs.enrol(self.name))

    def share(self, other: AttentionMemory, needed: tuple[int, int]) -> None:
        """Use another module's channels."""
        other.require(needed, f"sharing with {self.name}")
        other.require_held()
        self.workspace, self.inputs, self.outputs = other.workspace, other.inputs, other.outputs
        assert self.outputs is not None
        self.digest = wire.digest(self.outputs.enrol(self.name))

    def call_the_roll(self, group: dist.ProcessGroup | None) -> None:
        """Instead of channels, where torch.distributed carries the calls."""
        self.roll_call = RollCall(group, self.name)
        self._owned.callback(self.roll_call.close)

    @contextlib.contextmanager
    def calling(self, meaning: Semantics) -> Iterator[None]:
        """Around one eager call: what ends it here ends it for the peers, in words."""
        if self.outputs is None:
            assert self.roll_call is not None
            with self.roll_call.guard():
                refuse_lse(meaning)
            yield
            return
        with self.outputs.guard():
            self.outputs.workspace.begin()
            yield

    def refuse(self, refusal: Exception) -> None:
        """Tell the peers that this rank makes no such call; none hears it before `prepare`.

        A refused call counts as a call: with an earlier fault behind it, it joins the peers' reset.
        """
        if self.roll_call is not None:
            self.roll_call.refuse(refusal)
        if self.outputs is None:
            return
        try:
            self.outputs.workspace.begin()
            self.outputs.refuse(f"{type(refusal).__name__}: {refusal}".splitlines()[0])
        except XStageError as fault:
            raise refusal from fault

    def close(self) -> None:
        """Give back what was reserved here; local, idempotent."""
        self._owned.close()
        self.workspace = self.inputs = self.outputs = self.roll_call = None
