"""Ulysses attention: from sequence-sharded q, k, v to a sequence-sharded result.

Every rank owns a run of rows with all heads; an All-to-All gives each rank all rows of some heads;
attention; and the way back. Here the way back lies in the attention kernel: the owner of an output
tile stores it into the memory of the rank that owns its rows, in the final layout, and goes on.

Results and slots. A result lies in one of `slots` slots of a workspace that peers write; it holds
its slot until its last tensor is freed. Read it on the stream of the call, or let that stream wait
for the reader before dropping it. A call that finds its slot held raises with numbers; nothing is
overwritten. `out=` copies the result into memory of your own.

CUDA graphs and torch.compile (`fullgraph=True`): first `prepare` and one eager call of each shape.
A captured call uses a slot that eager calls no longer touch; its result is valid until the next
replay. Every rank captures and replays the same calls in the same order; `slots=4` keeps replays
from waiting for each other's slots. Compiled calls do not look for faults: call `check()`.
Calls on several streams: order them alike on every rank, as communicators of NCCL. Has run on CPUs
and on two H200; on more GPUs not yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ._arguments import check_group
from ._attention_memory import AttentionMemory
from ._attention_paths import CallWords, Operands, Route, Semantics, run
from ._attention_setup import (
    Rows,
    agree_on_path,
    capturing,
    check_places,
    check_scale,
    check_tensors,
    copied,
    decided,
    first_path,
    joined,
    kernel_reason,
    one_mask,
    refuse_first_call,
    refuse_options,
    refuse_shapes,
    shares_of,
    text_rows,
    wanted_impl,
    with_text,
    workspace_bytes,
)
from ._group_module import GroupModule, whose_memory
from .errors import PlanError, WorkspaceError
from .planner.attention import check_launch_fields
from .planner.attention_choice import AttentionDecision, AttentionProblem, decide
from .support import resolve_device
from .workspace import SymmetricWorkspace, region_bytes

Shape = tuple[tuple[int, ...], tuple[int, ...], int]  # rows and key rows of every rank, batch


class UlyssesAttention(GroupModule):
    """Attention of one model's layers over the ranks of a group. Inference only.

    Parameters
    ----------
    heads : int
        Query heads of the model. Need not be a multiple of the ranks.
    head_dim : int
        On CUDA 64 or 128 for the fused kernels; other sizes take the serial path.
    kv_heads : int, optional
        Key heads of the model, a divisor of heads, also fewer than ranks; None: heads.
    group : ProcessGroup, optional
        None: WORLD if torch.distributed is initialised, else this process alone. Any subgroup of up
        to 8 ranks of one NVLink domain, beyond which it falls back; its own rank numbers count.
    device : device, optional
        None: the current CUDA device where there is one, else the CPU.
    dtype : dtype
        bfloat16 or float16; on the CPU also float32.
    causal : bool
        Aligned at the ends: query i of Sq sees keys j <= i + Sk - Sq.
    scale : float, optional
        None: 1 / sqrt(head_dim).
    impl : str
        "auto" falls back with all ranks together; "fa3" or "fa4" refuses instead; "torch" forces
        torch.distributed and torch's attention. XSTAGE_IMPL=native or fallback overrides it.
    heads_per_rank : sequence of int, optional
        Query heads that each rank computes; None: as even as possible, larger shares first.
    slots : int
        Results that may be alive at the same time.
    plan : dict, optional
        `planner.attention.LAUNCH_FIELDS` that are given, not chosen by the planner.
    name : str
        For error texts.

    Attributes
    ----------
    path : str or None
        "fused", "serial" (our All-to-All around a local attention) or "torch" once prepared.
    fallback_reason : str or None
        Why the path is not the planner's choice; the same on every rank.
    decision : AttentionDecision or None
        The planner's choice with its reason and prediction.

    Examples
    --------
    >>> attention = UlyssesAttention(heads=4, head_dim=64)
    >>> q, k, v = torch.randn(3, 1, 128, 4, 64, dtype=torch.bfloat16, device=attention.device)
    >>> attention(q, k, v).shape
    torch.Size([1, 128, 4, 64])
    >>> attention.close()
    """

    def __init__(
        self,
        heads: int,
        head_dim: int,
        *,
        kv_heads: int | None = None,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        causal: bool = False,
        scale: float | None = None,
        impl: str = "auto",
        heads_per_rank: Sequence[int] | None = None,
        slots: int = 2,
        plan: dict[str, int] | None = None,
        name: str = "ulysses",
    ) -> None:
        super().__init__()
        check_scale(scale)
        check_launch_fields(plan or {})
        check_group(group, "xstage.UlyssesAttention")
        self._join(group)
        self.device = resolve_device(device)
        self.causal = causal
        self.scale = None if scale is None else float(scale)
        self.name = name
        self._wanted, self._source = wanted_impl(impl)
        self._generation = self._wanted if self._wanted in ("fa3", "fa4") else "fa3"
        self._fields = dict(plan or {})
        self._facts: dict[str, Any] = {
            "heads": heads,
            "kv_heads": heads if kv_heads is None else kv_heads,
            "head_dim": head_dim,
            "causal": causal,
            "dtype": dtype,
            "heads_per_rank": heads_per_rank,
            "generation": self._generation,
            "slots": slots,
        }
        problem = self._problem((1,) * self.world, None, 1)
        self._facts["heads_per_rank"] = problem.heads_per_rank  # nobody else's list
        reason = kernel_reason(problem, self.device)
        if self._wanted in ("fa3", "fa4") and reason is not None and self.world == 1:
            # Otherwise `prepare` tells all ranks.
            raise PlanError(f"xstage.UlyssesAttention: {self._source}, but {reason}")
        self._forget()

    def _forget(self) -> None:
        self.path: str | None = None
        self.fallback_reason: str | None = None
        self.decision: AttentionDecision | None = None
        self._memory = AttentionMemory(self.name)
        self._route: Route | None = None
        self._words: dict[Shape, CallWords] = {}
        self._closed = False

    def _problem(
        self, rows: tuple[int, ...], kv_rows: tuple[int, ...] | None, batch: int
    ) -> AttentionProblem:
        return AttentionProblem(rows=rows, kv_rows=kv_rows, batch=batch, **self._facts)

    def _shares(self, rows: Rows, name: str) -> tuple[int, ...]:
        return shares_of(rows, self.world, name)

    def bytes(self, rows: Rows, kv_rows: Rows | None = None, *, batch: int = 1) -> int:
        """Bytes of workspace per rank that `prepare` reserves. Allocates nothing."""
        key_rows = None if kv_rows is None else self._shares(kv_rows, "kv_rows")
        problem = self._problem(self._shares(rows, "rows"), key_rows, batch)
        return region_bytes(workspace_bytes(problem.plan(), problem))

    def prepare(
        self,
        rows: Rows,
        kv_rows: Rows | None = None,
        *,
        batch: int = 1,
        workspace: SymmetricWorkspace | None = None,
        share: UlyssesAttention | None = None,
    ) -> None:
        """Everything slow and collective: the path, memory, agreement between the ranks.

        Every rank of the group calls it with the same arguments. Calls with smaller shapes need no
        further prepare. Preparing again for larger shapes ends the results of earlier calls.

        Parameters
        ----------
        rows : int or sequence of int
            Largest query length in all, or the lengths of the ranks' shards.
        kv_rows : int or sequence of int, optional
            The same of keys; None: as rows.
        batch : int
            Largest batch.
        workspace : SymmetricWorkspace, optional
            With room for `bytes(...)`; None: the module makes its own.
        share : UlyssesAttention, optional
            A prepared module whose memory this one uses too. Their calls follow each other on one
            stream, in the same order on every rank: the layers of a model.

        Raises
        ------
        WorkspaceError
            The ranks disagree (named), or `share` has too little memory.
        PlanError
            A rank has impl="fa3" or "fa4", and kernels or memory cannot be had on every rank.
        """
        key_rows = None if kv_rows is None else self._shares(kv_rows, "kv_rows")
        self._prepare(self._problem(self._shares(rows, "rows"), key_rows, batch), workspace, share)

    def _prepare(
        self,
        problem: AttentionProblem,
        workspace: SymmetricWorkspace | None = None,
        share: UlyssesAttention | None = None,
    ) -> None:
        self.close()
        self._closed = False
        own = first_path(problem, self.device, self._wanted, self._source)
        facts = vars(problem) | {"scale": self.scale, "plan": self._fields}
        facts |= {"memory": whose_memory(workspace, share)}
        self.decision, refusal = decided(problem, self._fields)
        path, reason, insists = agree_on_path(own, facts, refusal, self.world, self.group)
        assert self.decision is not None
        if path != "torch" and (reason is None or insists is None):
            try:
                needed = workspace_bytes(self.decision.plan, problem)
                if share is not None:
                    self._memory.share(share._memory, needed)
                else:
                    self._memory.reserve(needed, workspace, self.group, self.device)
            except WorkspaceError as error:  # the same on every rank; so is the way out
                if workspace is not None or share is not None:
                    raise
                path, reason = "torch", str(error)
        if reason is not None and insists is not None:
            raise PlanError(f"xstage.UlyssesAttention: {insists}, but {reason}")
        if path == "fused" and self.decision.action == "serial" and insists is None:
            path = "serial"
        if path == "torch":
            self._memory.call_the_roll(self.group)
        self.path, self.fallback_reason = path, reason
        local_kernel = kernel_reason(problem, self.device) is None
        self._route = Route(path, self._generation, local_kernel, self.rank, self.world, self.group)

    def close(self) -> None:
        """Give back what `prepare` reserved, and end results and calls. Local and idempotent."""
        self._closed = True
        self._memory.close()
        self._words.clear()
        self.path = self.fallback_reason = self._route = None

    def check(self, *, synchronize: bool = False) -> None:
        """Raise what an earlier call found; see `SymmetricWorkspace.check`."""
        if self._memory.workspace is not None:
            self._memory.workspace.check(synchronize=synchronize)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        rows: Rows | None = None,
        kv_rows: Rows | None = None,
        key_segments: torch.Tensor | None = None,
        key_mask: torch.Tensor | None = None,
        joint: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
        joint_rows: Sequence[int] | None = None,
        out: torch.Tensor | None = None,
        return_lse: bool = False,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
    ) -> Any:
        """Attention over the whole sequence; every rank of the group calls it.

        Parameters
        ----------
        q : Tensor
            [B, rows of this rank, heads, D]; any strides.
        k, v : Tensor
            [B, key rows of this rank, kv_heads, D]; any strides.
        rows, kv_rows : int or sequence of int, optional
            Whole length (cut as evenly as possible, longer shards first) or every rank's length;
            the same on every rank. None: every rank has as many as this one.
        key_segments : Tensor, optional
            int32 [B, N, 2] on the device: runs of valid keys, numbered over the whole key sequence
            (`key_segments.segments_from_lengths`). What other keys hold, NaN included, is harmless.
        key_mask : Tensor, optional
            bool [B, Sk] over the whole key sequence. Waits for the device; prefer key_segments.
        joint : three Tensors, optional
            q, k, v of the text rows that this rank owns (also none of them: 0 rows).
        joint_rows : sequence of int, optional
            The owner rule: text rows of every rank, e.g. (T, 0, 0, 0) or even_split(T, 4). In the
            whole sequence each rank's text comes before its other rows.
        out : Tensor, optional
            Shaped like the result; receives a copy and is returned.
        return_lse : bool
            Also return the log-sum-exp of this rank's *heads*: float32 [B, heads of this rank, Sq].

        Returns
        -------
        Tensor
            [B, rows of this rank, heads, D]: in a slot (see the module's text), or `out`. With
            `joint` a pair (result, text result); with `return_lse` followed by the log-sum-exp.

        Raises
        ------
        TypeError, ValueError, NotImplementedError
            Dtype, shape or feature, by name. attn_mask and dropout_p are refused.
        WorkspaceError
            Larger than prepared, ranks disagree in rows, or the module is closed.
        PeerTimeout, PeerError
            On the CPU and on path "torch" from this call; on CUDA from the next call or `check`.
        """
        try:
            refuse_options(attn_mask, dropout_p, joint, joint_rows)
            check_places(self.device, key_segments=key_segments, key_mask=key_mask, out=out)
            self._check_tensors((q, k, v))
            shares = self._shares((q.shape[1],) * self.world if rows is None else rows, "rows")
            if kv_rows is None and k.shape[1] != q.shape[1]:
                kv_rows = (k.shape[1],) * self.world
            key_shares = shares if kv_rows is None else self._shares(kv_rows, "kv_rows")
            text = 0
            if joint is not None:
                owned = self._shares(text_rows(joint_rows, self.causal), "joint_rows")
                text = owned[self.rank]
                shares, key_shares = with_text(shares, owned), with_text(key_shares, owned)
                self._check_tensors(joint, "joint ")
                q, k, v = joined(joint, (q, k, v), text)
            if key_mask is not None:
                key_segments = one_mask(key_mask, key_segments, (q.shape[0], sum(key_shares)))
            shape = shares, key_shares, q.shape[0]
            self._check_call((q, k, v), shape)
        except Exception as error:
            self._refuse(error)
        meaning = Semantics(key_segments, self.scale, self.causal, return_lse)
        result, lse = self._attend((q, k, v), shape, meaning)
        parts = (result,) if joint is None else (result[:, text:], result[:, :text])
        if out is not None:
            parts = (copied(parts[0], out), *parts[1:])
        if return_lse:
            parts = (*parts, lse)
        return parts[0] if len(parts) == 1 else parts

    def _check_tensors(self, operands: Operands, prefix: str = "") -> None:
        check_tensors(operands, self._facts["head_dim"], self._facts["dtype"], self.device, prefix)

    def _check_call(self, operands: Operands, shape: Shape) -> None:
        words = self._words.get(shape)
        if words is None:
            refuse_first_call(self.name, shape, self._closed, self.device)
        if not torch.compiler.is_compiling():
            problem = self._problem(*shape) if words is None else words.problem
            refuse_shapes(operands, problem, self.rank)

    def _attend(
        self, operands: Operands, shape: Shape, meaning: Semantics
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.path is None:
            self._prepare(self._problem(*shape))
        assert self._route is not None
        if torch.compiler.is_compiling():
            self._memory.require_held()
            return run(self._route, operands, self._words_of(shape), meaning)
        with self._memory.calling(meaning):
            return run(self._route, operands, self._words_of(shape), meaning)

    def _words_of(self, shape: Shape) -> CallWords:
        words = self._words.get(shape)
        if words is None:
            problem = self._problem(*shape)
            plan = decide(problem, None, **self._fields).plan
            inputs, outputs = self._memory.inputs, self._memory.outputs
            if outputs is not None:
                self._memory.require(workspace_bytes(plan, problem), f"shape {shape}")
            words = CallWords.of(problem, plan, self.rank, inputs, outputs, self._memory.digest)
            self._words[shape] = words
        return words

    def _refuse(self, refusal: Exception) -> NoReturn:
        """Peers of a call that ends before its launch raise too, and do not meet the next one."""
        if torch.compiler.is_compiling():
            raise refusal
        if self.path is None and not (self._closed or capturing(self.device)):
            agree_on_path(("torch", None, None), {}, refusal, self.world, self.group)
        self._memory.refuse(refusal)
        raise refusal
