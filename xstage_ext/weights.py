"""Layouts of expert weights: gate and up rows of w13."""

from __future__ import annotations

import torch

from .reference import split_gate_up


def convert_weights_(w13: torch.Tensor, source: str, target: str) -> torch.Tensor:
    """Reorder the rows of w13 in place, one expert at a time; reversible.

    Parameters
    ----------
    w13 : Tensor
        [experts, 2 * intermediate, hidden].
    source, target : str
        "gate_up", "up_gate" or "interleaved".

    Returns
    -------
    Tensor
        w13 itself.
    """
    with torch.no_grad():
        for expert in w13:
            halves = split_gate_up(expert.clone(), source)
            for rows, half in zip(split_gate_up(expert, target), halves, strict=True):
                rows.copy_(half)
    return w13
