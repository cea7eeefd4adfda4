"""The mixture-of-experts layer whose dispatch and combine run inside the compute kernel."""

from __future__ import annotations

import contextlib
import dataclasses

import torch
import torch.distributed as dist

from . import _megamoe_fakes as _megamoe_fakes
from . import reference
from ._arguments import check_group
from ._group_module import GroupModule, whose_memory
from ._megamoe_calls import Given, accepted, check_shapes
from ._megamoe_setup import (
    agree,
    check_factors,
    counter_bytes,
    differing,
    given_fields,
    new_weight,
    refuse_late_prepare,
    wanted_impl,
)
from ._roll_call import RollCall
from .channel import ChannelLease
from .errors import PlanError, WorkspaceError, XStageError
from .planner import choose, wire
from .planner.megamoe import MegaMoePlan
from .planner.problem import MoEProblem
from .support import resolve_device, why_not
from .workspace import SymmetricWorkspace, region_bytes


class MegaMoE(GroupModule):
    """Experts of one layer, spread over the ranks of a group. Inference only.

    Routing weights multiply in fp32 where a token's results are added up, in ascending slot order,
    so results are bitwise the same for every schedule and plan. Every expert's result is rounded
    to bf16, as an unfused pipeline does. So are gate and up on the CPU; the CUDA kernel keeps them
    in fp32 up to the activation.

    Parameters
    ----------
    num_experts : int
        Experts of the whole group; a multiple of its ranks. Rank r holds experts
        r * num_experts / world and following.
    topk : int
        Experts per token.
    hidden, intermediate : int
        Widths in elements; multiples of 64.
    max_tokens : int
        Most tokens per rank in any call, the same on every rank; it sizes the workspace.
    tokens : int, optional
        Usual tokens per rank, for the planner; None: max_tokens. The same on every rank.
    group : ProcessGroup, optional
        None: WORLD if torch.distributed is initialised, else this process alone.
    device : device, optional
        None: the current CUDA device where there is one, else the CPU.
    weight_layout : str
        Rows of w13: "gate_up", "up_gate" or "interleaved" (one gate row, one up row in turns).
    clamp : float, optional
        The gate is cut at clamp, up at +-clamp, before the activation.
    routed_scaling_factor : float
        Multiplies the result.
    count_load : bool
        Add the rows that each local expert receives to the buffer `expert_load`.
    impl : str
        "auto" falls back where the kernel cannot run, "native" refuses, "fallback" forces torch and
        the group's collectives. XSTAGE_IMPL=native or fallback overrides it.
    plan : dict, optional
        Fields of `MegaMoePlan` that are given, not chosen by the planner.
    name : str
        For error texts.

    Attributes
    ----------
    w13, w2 : Parameter
        bf16 [experts / world, 2 * intermediate, hidden] and [experts / world, hidden,
        intermediate]; uninitialised, to be loaded by the caller.
    impl : str or None
        "native" or "fallback" once prepared.
    fallback_reason : str or None
        Why the fallback runs; the same on every rank.

    Examples
    --------
    >>> moe = MegaMoE(num_experts=8, topk=2, hidden=64, intermediate=64, max_tokens=16)
    >>> _ = moe.w13.normal_(), moe.w2.normal_()
    >>> moe.prepare()                          # collective: memory, agreement
    >>> scores, ids = torch.rand(16, 8, device=moe.w13.device).topk(2)
    >>> y = moe(torch.randn(16, 64, device=ids.device).bfloat16(), ids, scores.float())
    >>> y.shape
    torch.Size([16, 64])
    >>> moe.close()
    """

    w13: torch.nn.Parameter
    w2: torch.nn.Parameter
    expert_load: torch.Tensor | None

    def __init__(
        self,
        *,
        num_experts: int,
        topk: int,
        hidden: int,
        intermediate: int,
        max_tokens: int,
        tokens: int | None = None,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | int | None = None,
        weight_layout: str = "gate_up",
        clamp: float | None = None,
        routed_scaling_factor: float = 1.0,
        count_load: bool = False,
        impl: str = "auto",
        plan: dict[str, int] | None = None,
        name: str = "megamoe",
    ) -> None:
        super().__init__()
        check_group(group, "xstage.MegaMoE")
        self._join(group)
        check_factors(clamp, routed_scaling_factor)
        self.problem = MoEProblem(
            world=self.world,
            num_experts=num_experts,
            topk=topk,
            hidden=hidden,
            intermediate=intermediate,
            max_tokens=max_tokens,
            tokens=tokens,
            weight_layout=weight_layout,
        )
        self.device = resolve_device(device)
        self.clamp = None if clamp is None else float(clamp)
        self.routed_scaling_factor = float(routed_scaling_factor)
        self.name = name
        self._choice: choose.Decision | None = None
        self._refusal: XStageError | None = None
        wanted, source = wanted_impl(impl)
        self._insists = f"{source}=native" if wanted == "native" else None
        self._reason = why_not(self.problem, self.device)
        if wanted == "fallback":
            self._reason = f"{source}=fallback"
        if self._reason is None:
            self._choose(given_fields(plan, self.device))
        elif self._insists and self.world == 1:  # otherwise `prepare` tells all ranks
            raise PlanError(f"xstage.MegaMoE: {self._insists}, but {self._reason}")
        self._forget()
        local = self.problem.experts_per_rank
        self.w13 = new_weight(local, 2 * intermediate, hidden, device=self.device)
        self.w2 = new_weight(local, hidden, intermediate, device=self.device)
        load = torch.zeros(local, dtype=torch.int64, device=self.device) if count_load else None
        self.register_buffer("expert_load", load, persistent=False)

    # --- set-up -------------------------------------------------------------------------------

    def _choose(self, given: dict[str, int]) -> None:
        try:
            self._choice = choose.choose(self.problem, None, **given)
        except XStageError as error:
            if self.world == 1:
                raise
            self._refusal = error  # `prepare` tells all ranks; alone, this one would leave them

    def _forget(self) -> None:
        self.impl: str | None = None
        self.fallback_reason = self._reason
        self._lease: ChannelLease | None = None
        self._roll_call: RollCall | None = None  # of the fallback
        self._owned = contextlib.ExitStack()  # gives back what `prepare` reserved
        self._words: tuple[list[int], list[int]] = [], []
        self._closed = False

    @property
    def decision(self) -> choose.Decision | None:
        """The planner's choice, its reason and prediction; None when falling back."""
        if self._refusal is not None:
            raise self._refusal
        return None if self.impl == "fallback" else self._choice

    @property
    def plan(self) -> MegaMoePlan | None:
        """The plan of native calls."""
        return None if self.decision is None else self.decision.plan

    def bytes(self) -> int:
        """Bytes of workspace per rank that `prepare` reserves; 0 for the fallback."""
        return 0 if self.decision is None else self.decision.bytes

    def prepare(
        self, workspace: SymmetricWorkspace | None = None, *, share: MegaMoE | None = None
    ) -> None:
        """Everything slow and collective: memory, agreement between the ranks, one empty call.

        Every rank of the group calls it, in the same order among its other collective calls.

        Parameters
        ----------
        workspace : SymmetricWorkspace, optional
            With room for `bytes()`; None: the layer makes its own.
        share : MegaMoE, optional
            A prepared layer of the same plan whose memory this layer uses too. Their calls must
            follow each other on one stream, in the same order on every rank: the layers of a model.

        Raises
        ------
        WorkspaceError
            The ranks disagree (named), or `share` has another plan.
        PlanError
            A rank found no plan; or a rank has impl="native", and another cannot or will not run
            the kernel, or the memory cannot be had. The same on every rank.
        """
        if self.impl is not None:
            raise WorkspaceError(f"xstage.MegaMoE: {self.name}: prepare: it is prepared already")
        self._closed = False
        plan = None if self._choice is None else self._choice.plan
        given = {"max_tokens": self.problem.max_tokens, "tokens": self.problem.load}
        facts: dict[str, object] = {**given}  # in front of what follows from them
        facts |= {} if plan is None else dataclasses.asdict(plan)
        facts |= {"clamp": self.clamp, "routed_scaling_factor": self.routed_scaling_factor}
        facts["memory"] = whose_memory(workspace, share)
        reason, insists = agree(
            self.group, self.problem.world, self._reason, facts, self._refusal, self._insists
        )
        if reason is None and workspace is None and share is None:
            try:
                workspace = SymmetricWorkspace(
                    self.group, region_bytes([self.bytes()]), device=self.device
                )
                self._owned.callback(workspace.close)
            except WorkspaceError as error:
                reason = str(error)  # the same on every rank
        if reason is not None:
            if insists is not None:
                raise PlanError(f"xstage.MegaMoE: {insists}, but {reason}")
            self._roll_call = RollCall(self.group, self.name)
            self._owned.callback(self._roll_call.close)
            self.impl, self.fallback_reason = "fallback", reason
            return
        try:
            self._reserve(workspace, share)
            self.impl = "native"
            ids = torch.empty(0, self.problem.topk, dtype=torch.int32, device=self.device)
            with torch.no_grad():
                self(self.w2.new_empty(0, self.problem.hidden), ids, ids.float())
        except BaseException:
            self._owned.close()
            self._forget()  # so that it can be prepared again
            raise

    def _reserve(self, workspace: SymmetricWorkspace | None, share: MegaMoE | None) -> None:
        assert self.decision is not None
        plan = self.decision.plan
        if share is not None:
            if share._lease is None or share._lease.released or share.plan != plan:
                raise WorkspaceError(
                    f"xstage.MegaMoE: {self.name}: share: expected a prepared layer of the same "
                    f"plan, got {share.name} ({share.impl}, {differing(share.plan, plan)})"
                )
            self._lease = share._lease
        else:
            assert workspace is not None
            self._lease = workspace.channel(
                self.name, self.decision.bytes, counter_bytes=counter_bytes(plan)
            )
            self._owned.callback(self._lease.release)
        me = self._lease.enrol(self.name)
        self._digest = wire.digest(me, plan.words(), self.clamp, self.routed_scaling_factor)
        self._words = plan.words(), self._lease.words(self._digest)

    def close(self) -> None:
        """Give back what `prepare` reserved. Local and idempotent; layers that share it end too."""
        self._owned.close()
        self._forget()
        self._closed = True

    # --- calls --------------------------------------------------------------------------------

    def forward(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        num_tokens: int | torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Route every token through its experts. Every rank of the group calls it.

        Parameters
        ----------
        x : Tensor
            bf16 [tokens, hidden]; any strides. The number of tokens may differ between ranks and
            calls, from 0 to max_tokens.
        topk_idx : Tensor
            int32 or int64 [tokens, topk]: experts, or -1 for a slot that is skipped. Other ids
            count as -1; natively the next call or `check` then raises `RoutingError`.
        topk_weights : Tensor
            Floating point [tokens, topk]; those of skipped slots may hold anything.
        num_tokens : int or Tensor, optional
            Only so many rows of x are tokens; the rest of the result is zero. A tensor (int32 or
            int64, one element, on the device) is read by the kernel, so a CUDA graph can be
            replayed with another number; nobody waits for its value, so one below 0 counts as 0,
            one above the rows of x as all of them.
        out : Tensor, optional
            bf16 [tokens, hidden], contiguous; receives and is the result.

        Returns
        -------
        Tensor
            bf16 [tokens, hidden].

        Raises
        ------
        TypeError, ValueError, RuntimeError
            This rank refuses the call, and its peers raise PeerError. TypeError: no tensor where
            one belongs, another device, a dtype that is not accepted, an input or weight that
            requires grad. ValueError: num_tokens outside of the rows of x. RuntimeError: a wrong
            shape, more than max_tokens tokens, or an `out` that does not fit.
        PeerTimeout, PeerError, RoutingError
            On the CPU and in the fallback from this call; on CUDA from the next one or `check`.
        """
        if self.impl is None:
            refuse_late_prepare(self.name, self._closed, self.device)
            self.prepare()
        given = Given(x, topk_idx, topk_weights, num_tokens, out)
        if self._lease is None:
            return self._fallback(given)
        if torch.compiler.is_compiling():
            # A traced call skips the look at the fault record; `check` takes it.
            self._lease.require_held()
            return self._compute(self._words, given)
        with self._lease.guard():
            return self._compute((self._words[0], self._lease.words(self._digest)), given)

    def check(self, *, synchronize: bool = False) -> None:
        """Raise what an earlier call found; see `SymmetricWorkspace.check`."""
        if self._lease is not None:
            self._lease.workspace.check(synchronize=synchronize)

    def _compute(self, words: tuple[list[int], list[int]], given: Given) -> torch.Tensor:
        given = accepted(given, self.w13, self.w2, self.device)
        x, topk_idx, weights, num_tokens, out = given
        if not isinstance(num_tokens, int):
            return self._launch(words, x, topk_idx, weights, num_tokens, out)
        check_shapes(self.problem, given)
        if out is None:
            out = torch.empty_like(x, memory_format=torch.contiguous_format)
        out[num_tokens:].zero_()
        x, topk_idx, weights = (tensor[:num_tokens] for tensor in (x, topk_idx, weights))
        self._launch(words, x, topk_idx, weights, None, out[:num_tokens])
        return out

    def _launch(
        self,
        words: tuple[list[int], list[int]],
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        weights: torch.Tensor,
        num_tokens: torch.Tensor | None,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        ops = torch.ops.xstage
        tensors = x, topk_idx, weights, self.w13, self.w2
        options = num_tokens, self.clamp, self.routed_scaling_factor, self.expert_load
        if out is None:
            y: torch.Tensor = ops.megamoe(*tensors, *words, *options)
            return y
        ops.megamoe_out(out, *tensors, *words, *options)
        return out

    def _fallback(self, given: Given) -> torch.Tensor:
        """By torch and the group's collectives."""
        assert self._roll_call is not None
        with self._roll_call.guard():
            given = accepted(given, self.w13, self.w2, self.device)
            check_shapes(self.problem, given)
        x, topk_idx, weights, num_tokens, out = given
        if num_tokens is not None:
            padding = torch.arange(x.shape[0], device=x.device) >= num_tokens
            topk_idx = topk_idx.masked_fill(padding[:, None], -1)
        y = reference.moe_unfused(
            x,
            topk_idx,
            weights,
            self.w13,
            self.w2,
            group=self.group,
            clamp=self.clamp,
            routed_scaling_factor=self.routed_scaling_factor,
            weight_layout=self.problem.weight_layout,
            expert_load=self.expert_load,
        )
        return y if out is None else out.copy_(y)

    def extra_repr(self) -> str:
        """What printing the module shows."""
        return f"{self.problem}, impl={self.impl}"
