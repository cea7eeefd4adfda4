"""Can this machine run a problem natively? Answers before weights are loaded."""

from __future__ import annotations

import functools

import torch

from . import _binary
from .errors import PlanError

CAPABILITY = (9, 0)
"""What the kernels are compiled for: sm_90a (H100, H200)."""


def named_device(device: torch.device | str | int | None) -> torch.device:
    """The device meant: None is the current CUDA device where there is one, else the CPU."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    named = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if str(named) == "cuda" and torch.cuda.is_available():
        named = torch.device("cuda", torch.cuda.current_device())
    return named


def resolve_device(device: torch.device | str | int | None) -> torch.device:
    """`named_device`, for those who put something there.

    Raises
    ------
    PlanError
        A CUDA device, and torch sees none.
    """
    named = named_device(device)
    if named.type == "cuda" and not torch.cuda.is_available():
        raise PlanError(f'xstage: {device_reason(named)}; device="cpu" runs without')
    return named


def device_reason(device: torch.device) -> str | None:
    """Why the kernels cannot run on a device; None when they can. The CPU always can."""
    if device.type == "cpu":
        return None
    if device.type != "cuda":
        return f"device {device}: expected cuda or cpu"
    if not torch.cuda.is_available():
        return f"device {device}: torch sees no CUDA GPU"
    capability = torch.cuda.get_device_capability(device)
    if capability != CAPABILITY:
        name = torch.cuda.get_device_name(device)
        return (
            f"{name} has compute capability {capability[0]}.{capability[1]}; the kernels are "
            f"compiled for {CAPABILITY[0]}.{CAPABILITY[1]} (sm_90a)"
        )
    return _binary.CUDA_LIBRARY_ERROR


@functools.singledispatch
def why_not(problem: object, device: torch.device) -> str | None:
    """Why a problem cannot run natively on a device; None when it can.

    Every kind of problem registers its own rules here.
    """
    raise TypeError(
        "xstage: problem: expected a problem of xstage_ext (MoEProblem, AttentionProblem), got "
        f"{problem!r}"
    )


def natively(device: torch.device) -> str:
    """How native operators run on a device: the beginning of `describe`'s text."""
    if device.type == "cuda":
        return "runs natively"
    return "runs natively (here on the CPU, slow and exact; all that follows is of GPUs)"


@functools.singledispatch
def describe(problem: object, device: torch.device) -> str:
    """What would run natively, and why; called only when nothing stands against it."""
    return natively(device)


def is_supported(problem: object, device: torch.device | str | int | None = None) -> bool:
    """Whether a problem runs natively; without it, the user-level functions fall back.

    Parameters
    ----------
    problem
        A `MoEProblem` or an attention problem.
    device
        None: the current CUDA device where there is one, else the CPU.
    """
    return why_not(problem, named_device(device)) is None


def explain(problem: object, device: torch.device | str | int | None = None) -> str:
    """What would happen to a problem on a device, and why, in a few sentences.

    The numbers behind it, as text, JSON and picture: `plan_report`.
    """
    named = named_device(device)
    reason = why_not(problem, named)
    return describe(problem, named) if reason is None else f"falls back: {reason}"
