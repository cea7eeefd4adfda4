"""Checks of arguments that several classes share; every refusal names what was given."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Iterable

import torch
import torch.distributed as dist

from .errors import PlanError, WorkspaceError


def integer(value: object, what: str, error: type[Exception] = PlanError) -> int:
    """`value` as an int, also of numpy's types; an error for anything else, truth values too."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    try:
        if not isinstance(value, bool):
            return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        pass
    raise error(f"{what}: expected an integer, got {value!r}")


def set_integers(problem: object, names: Iterable[str]) -> None:
    """Replace fields of a frozen dataclass by what `integer` makes of them."""
    for name in names:
        what = f"xstage.{type(problem).__name__}: {name}"
        object.__setattr__(problem, name, integer(getattr(problem, name), what))


def is_number(value: object) -> bool:
    """Whether it is a real number, also one of numpy or torch: no text, no truth value."""
    if isinstance(value, torch.Tensor):
        return value.dim() == 0 and not value.is_complex() and value.dtype != torch.bool
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def brief(value: object) -> str:
    """A value of another type than expected, in one line: its type where it may be long."""
    short = value is None or isinstance(value, numbers.Number)
    return repr(value) if short else type(value).__name__


def lies_on(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether a tensor lies on a device. Operators are asked only then: a meta tensor among the
    arguments would make torch run an operator's shape function in its place."""
    here = tensor.device
    if here == device:
        return True
    return here.type == device.type and None in (here.index, device.index)


def check_place(tensor: torch.Tensor, device: torch.device, who: str, name: str) -> None:
    """TypeError unless a tensor lies on a device."""
    if not lies_on(tensor, device):
        raise TypeError(f"{who}: {name}: expected a tensor on {device}, got one on {tensor.device}")


def check_group(group: object, what: str) -> None:
    """A group that exists, with this process in it; None means that there is none to check."""
    if group is None:
        return
    if not (dist.is_available() and dist.is_initialized()):
        raise WorkspaceError(f"{what}: group: torch.distributed is not initialised, got {group!r}")
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise WorkspaceError(
            f"{what}: group: this process (global rank {dist.get_rank()}) is not a member"
        )
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"{what}: group: expected a ProcessGroup, got {group!r}")
