"""What words of the command line mean: a layer's shape, a law of routing, where to write."""

from __future__ import annotations

import math
import os
import pathlib

import numpy as np
import numpy.typing as npt
import torch
import typer

from .errors import PlanError, XStageError
from .planner.measured import try_folder
from .planner.problem import MoEProblem
from .testing import LAWS, make_routing

SHAPE_HELP = "hidden x intermediate x experts x topk, e.g. 4096x1536x192x8"

MOST = 1 << 40
"""Of integers without a limit of their own: what arithmetic with floats surely holds."""


def finite(value: float) -> float:
    """A number that is neither infinite nor none."""
    if not math.isfinite(value):
        raise typer.BadParameter(f"expected a finite number, got {value}")
    return value


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


def ranked_moe_problem(
    command: str, shape: str, tokens: int, world: int, remote_share: float | None
) -> MoEProblem:
    """`moe_problem` of the ranks at hand; what one rank cannot hold says how to start more."""
    try:
        return moe_problem(shape, tokens, world, remote_share)
    except PlanError as error:
        if world > 1 or "RANK" in os.environ:
            raise
        start = f"torchrun --nproc-per-node N -m xstage_ext {command} {shape} --tokens {tokens}"
        raise PlanError(f"{error} on one rank; for N ranks: {start}") from None


def head_counts(heads: str) -> tuple[int, int]:
    """Query and key heads, from `40` or `40/8`."""
    counts = heads.split("/")
    try:
        if len(counts) > 2:
            raise ValueError
        return int(counts[0]), int(counts[-1])
    except ValueError:
        raise typer.BadParameter(f"heads: expected e.g. 40 or 40/8, got {heads}") from None


def png(path: pathlib.Path | None) -> pathlib.Path | None:
    """The path of a picture to write; its folder is made and tried before the work begins."""
    if path is None:
        return None
    if path.suffix.lower() != ".png" or path.is_dir():
        raise typer.BadParameter(f"expected a file name that ends in .png, got {path}")
    try:
        try_folder(path)
    except OSError as error:
        raise typer.BadParameter(f"{path}: {error.strerror}") from None
    return path


def writable(path: pathlib.Path) -> pathlib.Path:
    """The file to write that `--out` names; its folder is made and tried before the work begins."""
    path = path.expanduser()
    try:
        try_folder(path)
    except OSError as error:
        raise typer.BadParameter(f"{path}: {error.strerror}", param_hint="'--out'") from None
    return path


def needs_gpu(command: str, instead: str) -> None:
    """Refuses to begin without a GPU, and leaves nothing behind."""
    if not torch.cuda.is_available():
        raise XStageError(f"xstage {command}: needs a GPU; {instead}")


def heaviest_rank(
    problem: MoEProblem, routing: str, seed: int
) -> tuple[npt.NDArray[np.int64], int]:
    """Rows by [source, expert] of the rank with most rows, and that rank."""
    law, colon, exponent = routing.partition(":")
    if law not in LAWS:
        raise typer.BadParameter(f"routing: expected one of {', '.join(LAWS)}, got {law}")
    if law == "balanced" and colon:
        raise typer.BadParameter(f"routing: expected nothing behind balanced, got {routing}")
    least = "of 0 or more" if law == "zipf" else "above 0"
    try:
        power = float(exponent or 0.5)
        if not (math.isfinite(power) and power >= 0.0) or (power == 0.0 and law != "zipf"):
            raise ValueError
    except ValueError:
        raise typer.BadParameter(
            f"routing: expected a number {least} behind {law}:, e.g. {law}:0.5, got {exponent}"
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
