"""Tables of a machine profile that are asked between their nodes, and outside of them."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Annotated

import numpy as np
import numpy.typing as npt

from ._json import Within
from .errors import ProfileError

FloatLike = npt.ArrayLike
FloatArray = npt.NDArray[np.float64]

# Limits far beyond any machine: what lies outside is a slip, and would only make absurd predictions
# that take for ever or all memory.
Microseconds = Annotated[float, Within(0, 1e4, "us")]
Bytes = Annotated[float, Within(0, 1e12, "bytes")]
RATES = Within(1, 1e6, "GB/s")
_Producers = Annotated[float, Within(0, 1024, "producers")]
_Value = Annotated[float, Within(0, 1e12)]


def _floats(values: FloatLike) -> FloatArray:
    return np.asarray(values, dtype=np.float64)


def _interpolate(x: FloatArray, nodes: tuple[float, ...], values: FloatArray) -> FloatArray:
    """Linear between nodes, constant below the first, last slope (>= 0) above the last."""
    inside: FloatArray = np.interp(x, nodes, values)
    if len(nodes) < 2:
        return inside
    slope = max(0.0, float(values[-1] - values[-2]) / (nodes[-1] - nodes[-2]))
    return inside + slope * np.maximum(0.0, x - nodes[-1])


@dataclasses.dataclass(frozen=True)
class ProducerCurve:
    """A quantity that depends on the number of producers K only; linear between the nodes.

    Below the first node it is proportional to K, above the last it is constant.
    """

    producers: tuple[_Producers, ...]
    values: tuple[_Value, ...]

    def __post_init__(self) -> None:
        _check_nodes("producers", self.producers, len(self.values))

    def __call__(self, K: FloatLike) -> FloatArray:
        k = _floats(K)
        below = np.minimum(1.0, k / self.producers[0])
        return np.asarray(np.interp(k, self.producers, self.values) * below)


@dataclasses.dataclass(frozen=True)
class IssueTable:
    """T0(K, B): issue time of one producer's burst without backpressure, in us.

    `us[i][j]` belongs to `producers[i]` and `nbytes[j]`. Linear in between; constant outside in K
    and below the smallest B; above the largest B the last slope goes on (an SM issues at a rate).
    """

    producers: tuple[_Producers, ...]
    nbytes: tuple[Bytes, ...]
    us: tuple[tuple[Microseconds, ...], ...]

    def __post_init__(self) -> None:
        _check_nodes("producers", self.producers, len(self.us))
        for row in self.us:
            _check_nodes("nbytes", self.nbytes, len(row))

    def __call__(self, K: FloatLike, B: FloatLike) -> FloatArray:
        k, b = np.broadcast_arrays(_floats(K), _floats(B))
        rows = np.stack([_interpolate(b, self.nbytes, _floats(row)) for row in self.us])
        position = np.interp(k, self.producers, np.arange(len(self.producers), dtype=np.float64))
        low = np.floor(position).astype(np.intp)
        high = np.minimum(low + 1, len(self.producers) - 1)
        weight = position - low
        lower = np.take_along_axis(rows, low[None], axis=0)[0]
        upper = np.take_along_axis(rows, high[None], axis=0)[0]
        return np.asarray((1.0 - weight) * lower + weight * upper)


def _check_nodes(what: str, nodes: tuple[float, ...], num_values: int) -> None:
    increasing = all(a < b for a, b in itertools.pairwise(nodes))
    if not nodes or nodes[0] <= 0 or not increasing or len(nodes) != num_values:
        raise ProfileError(
            f"machine profile: {what}: expected {num_values} positive increasing nodes, got {nodes}"
        )
