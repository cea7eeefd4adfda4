"""The All-to-All of Ulysses over a workspace channel, and what torch.compile must know of the ops.

Forms of a tensor: *sequence* [B, rows of the rank, all heads, D] and *head* [B, all rows, heads of
the rank, D]. `ulysses_a2a` turns one into the other by direct stores into the peers' results: the
layout change happens on the way, and nothing is reshuffled before or after.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ._arguments import check_place
from .channel import ChannelLease
from .planner.attention import MAX_RANKS, AttentionPlan
from .planner.wire import KINDS

_HEADER = 4


def ulysses_a2a(
    lease: ChannelLease, plan: AttentionPlan, tensors: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Exchange tensors between sequence shards and heads, all in one call.

    Parameters
    ----------
    lease
        A channel of at least `plan.a2a_region_bytes(...)` bytes; one stream at a time. Kernels hold
        SMs while they wait for peers: where calls of several channels overlap on several streams,
        events must order them alike on every rank, as communicators of NCCL.
    plan
        The same on every rank. `direction` 0: sequence form to head form; the first
        `num_query` tensors have query rows and heads, the others key rows and heads. 1: head form
        to sequence form, query-like tensors only.
    tensors
        float32, bfloat16 or float16, any strides (a last stride other than 1 costs a copy).
        On CUDA 16-byte aligned rows are fast; others work.

    Returns
    -------
    list of torch.Tensor
        In a slot of the channel's ring: valid until freed (`xstage_ext.workspace`). Contiguous, but
        for `plan.row_pad` bytes between the rows of shards.

    Raises
    ------
    TypeError
        A tensor on another device than the channel's.
    RuntimeError
        Shapes differ from the plan, or all slots hold live results; peers then raise PeerError.
    PeerTimeout, PeerError, WorkspaceError
        On the CPU from this call, on CUDA from the next one.
    """
    words = plan.words()
    with lease.guard():
        _check_places(tensors, lease)
        outputs: list[torch.Tensor] = torch.ops.xstage.ulysses_a2a(
            list(tensors), words, lease.words()
        )
    return outputs


def ulysses_a2a_virtual(
    lease: ChannelLease, plan: AttentionPlan, tensors: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The same for all virtual ranks: tensors of rank 0, then of rank 1, and so on."""
    words = plan.words()
    with lease.guard():
        _check_places(tensors, lease)
        outputs: list[torch.Tensor] = torch.ops.xstage.ulysses_a2a_virtual(
            list(tensors), words, lease.virtual_words()
        )
    return outputs


def _check_places(tensors: Sequence[torch.Tensor], lease: ChannelLease) -> None:
    device = lease.workspace.device
    for index, tensor in enumerate(tensors):
        check_place(tensor, device, "xstage.ulysses_a2a", f"tensors[{index}]")


# What the fakes read out of wire messages. Positions follow the X-lists, checked at import.


class _PlanWords:
    def __init__(self, words: Sequence[int]) -> None:
        if words[1] != KINDS["attention"]:
            raise ValueError(f"xstage: plan: expected kind {KINDS['attention']}, got {words[1]}")
        fields = list(words[_HEADER:])
        self.world, self.kv_group, self.num_query, self.direction = fields[:4]
        self.row_pad = fields[-3 * MAX_RANKS - 1]
        arrays = fields[-3 * MAX_RANKS :]
        self.rows = arrays[:MAX_RANKS]
        self.kv_rows = arrays[MAX_RANKS : 2 * MAX_RANKS]
        self.heads = arrays[2 * MAX_RANKS :]

    def key_head_count(self, rank: int) -> int:
        first = sum(self.heads[:rank])
        if self.heads[rank] == 0:
            return 0
        return (first + self.heads[rank] - 1) // self.kv_group - first // self.kv_group + 1

    def received(self, tensor: int, rank: int) -> tuple[int, int]:
        """Rows and heads of what a rank receives of the tensor-th tensor."""
        query = tensor < self.num_query
        rows = self.rows if query else self.kv_rows
        if self.direction == 0:
            return sum(rows), self.heads[rank] if query else self.key_head_count(rank)
        return rows[rank], sum(self.heads)


def _rank_of(workspace: Sequence[int]) -> int:
    return workspace[_HEADER]


def _fake_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key_segments: torch.Tensor | None = None,
    scale: float | None = None,
    causal: bool = False,
    want_lse: bool = False,
    head_phase: int = 0,
    plan: Sequence[int] = (),
) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), _fake_lse(q, want_lse)


def _fake_lse(q: torch.Tensor, want_lse: bool) -> torch.Tensor:
    size = (q.shape[0], q.shape[2], q.shape[1]) if want_lse else (0,)
    return q.new_empty(size, dtype=torch.float32)


def _fake_out(q: torch.Tensor, plan: _PlanWords, rank: int) -> torch.Tensor:
    return q.new_empty((q.shape[0], plan.rows[rank], sum(plan.heads), q.shape[3]))


def _fake_attention_a2a(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key_segments: torch.Tensor | None,
    scale: float | None,
    causal: bool,
    want_lse: bool,
    plan: Sequence[int],
    workspace: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    return _fake_out(q, _PlanWords(plan), _rank_of(workspace)), _fake_lse(q, want_lse)


def _fake_attention_a2a_virtual(
    q: list[torch.Tensor],
    k: list[torch.Tensor],
    v: list[torch.Tensor],
    key_segments: torch.Tensor | None,
    scale: float | None,
    causal: bool,
    want_lse: bool,
    plan: Sequence[int],
    workspaces: Sequence[int],
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    facts = _PlanWords(plan)
    outs = [_fake_out(tensor, facts, rank) for rank, tensor in enumerate(q)]
    return outs, [_fake_lse(tensor, want_lse) for tensor in q]


def _fake_received(
    inputs: Sequence[torch.Tensor], plan: _PlanWords, rank: int
) -> list[torch.Tensor]:
    outputs = []
    for index, tensor in enumerate(inputs):
        rows, heads = plan.received(index, rank)
        batch, head_dim = tensor.shape[0], tensor.shape[3]
        pad = plan.row_pad // tensor.element_size() if plan.direction == 1 else 0
        pitch = heads * head_dim + pad
        outputs.append(
            tensor.new_empty_strided(
                (batch, rows, heads, head_dim), (rows * pitch, pitch, head_dim, 1)
            )
        )
    return outputs


def _fake_a2a(
    inputs: list[torch.Tensor], plan: Sequence[int], workspace: Sequence[int]
) -> list[torch.Tensor]:
    return _fake_received(inputs, _PlanWords(plan), _rank_of(workspace))


def _fake_a2a_virtual(
    inputs: list[torch.Tensor], plan: Sequence[int], workspaces: Sequence[int]
) -> list[torch.Tensor]:
    facts = _PlanWords(plan)
    per_rank = len(inputs) // facts.world
    return [
        output
        for rank in range(facts.world)
        for output in _fake_received(inputs[rank * per_rank : (rank + 1) * per_rank], facts, rank)
    ]


torch.library.register_fake("xstage::ulysses_a2a", _fake_a2a)
torch.library.register_fake("xstage::ulysses_a2a_virtual", _fake_a2a_virtual)
for _generation in ("fa3", "fa4"):
    torch.library.register_fake(f"xstage::{_generation}", _fake_attention)
    torch.library.register_fake(f"xstage::{_generation}_a2a", _fake_attention_a2a)
    torch.library.register_fake(f"xstage::{_generation}_a2a_virtual", _fake_attention_a2a_virtual)
