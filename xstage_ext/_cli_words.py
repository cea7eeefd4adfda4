"""What words of the command line mean: a layer's shape, a law of routing."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import typer

from .planner.problem import MoEProblem
from .testing import LAWS, make_routing

SHAPE_HELP = "hidden x intermediate x experts x topk, e.g. 4096x1536x192x8"


def moe_problem(
    shape: str, tokens: int, world: int, remote_share: float | None = None
) -> MoEProblem:
    """From `hidden x intermediate x experts x topk`."""
    try:
        hidden, intermediate, experts, topk = (int(word) for word in shape.lower().split("x"))
    except ValueError:
        raise typer.BadParameter(f"shape: expected {SHAPE_HELP}, got {shape}") from None
    return MoEProblem(
        world=world,
        num_experts=experts,
        topk=topk,
        hidden=hidden,
        intermediate=intermediate,
        max_tokens=tokens,
        remote_share=remote_share,
    )


def heaviest_rank(
    problem: MoEProblem, routing: str, seed: int
) -> tuple[npt.NDArray[np.int64], int]:
    """Rows by [source, expert] of the rank with most rows, and that rank."""
    law, _, exponent = routing.partition(":")
    if law not in LAWS:
        raise typer.BadParameter(f"routing: expected one of {', '.join(LAWS)}, got {law}")
    try:
        power = float(exponent or 0.5)
        if not math.isfinite(power):
            raise ValueError
    except ValueError:
        raise typer.BadParameter(
            f"routing: expected a number behind {law}:, e.g. {law}:0.5, got {exponent}"
        ) from None
    world, experts = problem.world, problem.num_experts
    drawn = make_routing(
        world,
        problem.load,
        experts,
        problem.topk,
        law=law,
        exponent=power,
        seed=seed,
    )
    counts = drawn.counts(experts).reshape(world, world, experts // world)
    rank = int(counts.sum(axis=(0, 2)).argmax())
    return counts[:, rank], rank
