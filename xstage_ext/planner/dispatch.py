"""Who moves tokens to the owners of their experts: pull or push (csrc/megamoe/README.md)."""

from __future__ import annotations

import functools

from .. import machine
from .floors import egress_us, floors
from .problem import MoEProblem

LINK_FROM = 0.9
"""Tokens are pushed where pulled rows and results would keep the link busy for this share of the
time of arithmetic or weights: a push puts fewer bytes on it, and copies once more."""
LEAST_REUSE = 1.1
"""So many rows that a token serves once it was sent, or a push saves nothing."""
LEAST_ROWS, LINK_WITH_FEWER, REUSE_WITH_FEWER = 64, 1.5, 3.0
"""A first token takes longer by that copy. It is worth it where a dispatch warp has so many rows,
or the link takes so much, or a token that was sent serves so many rows: docs/perf_log.md."""
WARPS = 2
"""Dispatch warps of an SM: kDispatchWarps of csrc/megamoe/plan.h."""


@functools.lru_cache(maxsize=256)  # a decision asks several times
def dispatch_of(
    problem: MoEProblem, profile: machine.MachineProfile, num_sms: int | None = None
) -> str:
    """Which of `DISPATCHES`, by what was measured of both; `num_sms`: at work, None: all."""
    if problem.remote == 0.0:
        return "pull"
    sms = profile.gpu.num_sms if num_sms is None else num_sms
    least = floors(problem, profile)
    # Fewer SMs take longer for arithmetic; memory and the link are busy with few.
    busy = max(least.compute_us * profile.gpu.num_sms / sms, least.weights_us)
    link = egress_us(problem, profile, "pull") / max(busy, 1e-9)
    many = problem.rows >= LEAST_ROWS * WARPS * sms
    rows, tokens = problem.remote * problem.topk, problem.sent_tokens  # of a token, on the link
    if link < LINK_FROM or rows < LEAST_REUSE * tokens:
        return "pull"
    enough = many or link >= LINK_WITH_FEWER or rows >= REUSE_WITH_FEWER * tokens
    return "push" if enough else "pull"
