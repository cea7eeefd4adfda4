"""Tiles of a megamoe trace as arrays, for statistics; `xstage_ext.trace` shows single spans."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import torch

_MATH_TRACKS = (1, 2)
_TILE = 1
_PROLOGUE, _TAIL, _COMBINE = 2, 4, 5
FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class TileTrace:
    """Tiles of one rank as its math warpgroups saw them; arrays of one length.

    Times in us; `begin_us` and `end_us` count from the first tile of the rank.

    Attributes
    ----------
    phase : int array
        1 for Linear-1, 2 for Linear-2.
    begin_us, end_us : float array
        First operands there; results handed over.
    first_wait_us, stage_wait_us : float array
        Waiting for the first stage (before `begin_us`), and for later stages.
    hand_over_us : float array
        Accumulators to results, stores and what they are held up by: the store span.
    clock_mhz : float array
        SM clock over the call.
    """

    cta: IntArray
    group: IntArray
    phase: IntArray
    block: IntArray
    n: IntArray
    begin_us: FloatArray
    end_us: FloatArray
    first_wait_us: FloatArray
    stage_wait_us: FloatArray
    hand_over_us: FloatArray
    clock_mhz: FloatArray

    def of_phase(self, phase: int) -> TileTrace:
        """Tiles of one phase."""
        keep = self.phase == phase
        values = {f.name: getattr(self, f.name)[keep] for f in dataclasses.fields(self)}
        return TileTrace(**values)

    def activity(self, bin_us: float) -> FloatArray:
        """Share of the math warpgroups that multiply, by bins of time.

        Waits for operands inside a main loop do not count; they are spread over it evenly.
        """
        workers = len(np.unique(self.cta * 2 + self.group))
        ends = self.end_us - self.hand_over_us
        share = 1.0 - self.stage_wait_us / np.maximum(ends - self.begin_us, 1e-9)
        return busy_share(self.begin_us, ends, workers, bin_us, np.clip(share, 0.0, 1.0))


def busy_share(
    begin_us: FloatArray,
    end_us: FloatArray,
    workers: int,
    bin_us: float,
    weights: FloatArray | None = None,
) -> FloatArray:
    """Share of `workers` that are inside one of the intervals [begin, end), by bins of time."""
    if not len(begin_us):
        return np.zeros(0)
    edges = np.arange(0.0, float(end_us.max()) + bin_us, bin_us)
    weighted = np.ones_like(begin_us) if weights is None else weights

    def before(times: FloatArray) -> FloatArray:
        """Sum over the intervals' ends of the time that lies behind them, at every edge."""
        order = np.argsort(times)
        count = np.searchsorted(times[order], edges)
        total = np.concatenate([[0.0], np.cumsum((weighted * times)[order])])[count]
        heads = np.concatenate([[0.0], np.cumsum(weighted[order])])[count]
        return np.asarray(heads * edges - total)

    covered = np.diff(before(begin_us) - before(end_us))
    return np.asarray(covered / (workers * bin_us))


def decode(trace: torch.Tensor) -> TileTrace:
    """The tiles in a trace, with cycles turned into us by the clock that the tiles themselves show.

    Parameters
    ----------
    trace : Tensor
        int64 [CTA, track, record, word], second result of `torch.ops.xstage.megamoe_traced`.
    """
    words = trace.cpu().numpy()
    math = words[:, _MATH_TRACKS]
    # A CTA without a tile of its own (phase 0) only keeps step with its partner.
    cta, group, record = np.nonzero((math[..., 0] == _TILE) & (math[..., 1] >> 48 > 0))
    rows = math[cta, group, record]
    tile = rows[:, 1]
    origin = rows[:, 2].min() if len(rows) else 0
    begin, end = ((rows[:, i] - origin) / 1e3 for i in (2, 3))
    cycles_per_us = rows[:, 7].sum() / max(float((end - begin).sum()), 1e-9) if len(rows) else 1.0
    first, stages, hand_over = (rows[:, i] / cycles_per_us for i in (4, 5, 6))
    return TileTrace(
        cta=cta.astype(np.int64),
        group=group.astype(np.int64),
        phase=tile >> 48,
        block=(tile >> 24) & 0xFFFFFF,
        n=tile & 0xFFFFFF,
        begin_us=begin,
        end_us=end,
        first_wait_us=first,
        stage_wait_us=stages,
        hand_over_us=hand_over,
        clock_mhz=np.full(len(rows), cycles_per_us),
    )


def phases_us(trace: torch.Tensor) -> dict[str, float]:
    """When the phases of a call end on this rank, us since its start.

    `counts_us`: counts of all sources known; `first_tile_us`: the median CTA's first tile begins;
    `tiles_us`: the last CTA's tiles done; `signal_us`: until all ranks are done, after that;
    `combine_us`: the combine's length.
    """
    words = trace.cpu().numpy()
    rows = words[:, 0].reshape(-1, words.shape[-1])
    rows = rows[rows[:, 0] != 0]
    if not len(rows):
        return {}
    origin = rows[:, 2].min()

    def of(kind: int, column: int) -> FloatArray:
        values = rows[rows[:, 0] == kind, column]
        return np.asarray((values - origin) / 1e3)

    math = words[:, _MATH_TRACKS[0], 0]
    first = (math[math[:, 0] == _TILE, 2] - origin) / 1e3
    prologue = rows[rows[:, 0] == _PROLOGUE]
    known = (prologue[:, 2] - origin + prologue[:, 6]) / 1e3
    return {
        "counts_us": float(np.median(known)),
        "first_tile_us": float(np.median(first)),
        "tiles_us": float(of(_TAIL, 2).max()),
        "signal_us": float(of(_TAIL, 3).max() - of(_TAIL, 2).max()),
        "combine_us": float(of(_COMBINE, 3).max() - of(_TAIL, 3).max()),
    }
