"""What a traced megamoe call did, per SM: Chrome/Perfetto JSON, a picture, distributions of spans.

y, records = torch.ops.xstage.megamoe_traced(x, ids, weights, w13, w2, plan, workspace, 512)
trace = MegaMoETrace.read(records)
trace.save_chrome("trace.json"); trace.save_picture("trace.png"); print(trace.summary())
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import torch

from ._json import dumps

TRACKS = ("phases", "math 0", "math 1", "rows")
KINDS = ("", "tile", "prologue", "rows", "tail", "combine")
_PHASES = ("", "linear-1", "linear-2")
_COLORS = {
    "linear-1": "tab:blue",
    "linear-2": "tab:orange",
    "prologue": "tab:gray",
    "rows": "tab:green",
    "tail": "lightgray",
    "combine": "tab:purple",
}


@dataclasses.dataclass(frozen=True)
class Span:
    """One record.

    Attributes
    ----------
    cta : int
        Block of the grid.
    track, kind : str
        Of `TRACKS`; "linear-1", "linear-2" or one of `KINDS`.
    block, n : int
        m-block and column tile; for "rows", a group that is copied into the x ring: the block of
        the first of its batch, and 0.
    start_us, end_us : float
        From the first record of the call on.
    first_cycles, other_cycles, handing_cycles, all_cycles : int
        SM cycles of a tile: waiting for its first stage, waiting for its other stages, handing over
        its results, in all.
    """

    cta: int
    track: str
    kind: str
    block: int
    n: int
    start_us: float
    end_us: float
    first_cycles: int
    other_cycles: int
    handing_cycles: int
    all_cycles: int

    @property
    def us(self) -> float:
        """Duration."""
        return self.end_us - self.start_us


@dataclasses.dataclass(frozen=True)
class MegaMoETrace:
    """All spans of one call of one rank, by CTA, track and time."""

    spans: tuple[Span, ...]

    @classmethod
    def read(cls, records: torch.Tensor) -> MegaMoETrace:
        """From the second result of `megamoe_traced`: int64 [CTAs, tracks, records, words].

        Raises
        ------
        ValueError
            Another shape or dtype.
        """
        if records.dtype != torch.int64 or records.dim() != 4 or records.shape[3] != 8:
            text = f"{records.dtype} {list(records.shape)}"
            raise ValueError(f"MegaMoETrace: expected int64 [CTAs, 4, records, 8], got {text}")
        words: npt.NDArray[np.int64] = records.cpu().numpy()
        used = words[..., 0] != 0
        start = int(words[..., 2][used].min()) if used.any() else 0
        return cls(tuple(_spans(words, used, start)))

    def of(self, kind: str, track: str | None = None) -> list[Span]:
        """Spans of a kind, and of a track where it is given."""
        return [s for s in self.spans if s.kind == kind and track in (None, s.track)]

    def save_chrome(self, path: str | pathlib.Path) -> None:
        """For chrome://tracing or ui.perfetto.dev: a process per CTA, a thread per track."""
        events = [
            {
                "name": f"{s.kind} block {s.block} n {s.n}" if s.block or s.n else s.kind,
                "cat": s.kind,
                "ph": "X",
                "pid": s.cta,
                "tid": TRACKS.index(s.track),
                "ts": s.start_us,
                "dur": s.us,
                "args": {
                    "wait_first_cycles": s.first_cycles,
                    "wait_other_cycles": s.other_cycles,
                    "handing_cycles": s.handing_cycles,
                    "cycles": s.all_cycles,
                },
            }
            for s in self.spans
        ]
        names = [
            {"name": "thread_name", "ph": "M", "pid": cta, "tid": i, "args": {"name": track}}
            for cta in sorted({s.cta for s in self.spans})
            for i, track in enumerate(TRACKS)
        ]
        pathlib.Path(path).write_text(dumps({"traceEvents": names + events}), "utf-8")

    def save_picture(self, path: str | pathlib.Path, ctas: int = 16) -> None:
        """A timeline of the first CTAs: math warpgroups and phases of each."""
        from matplotlib.figure import Figure

        shown = sorted({s.cta for s in self.spans})[:ctas]
        figure = Figure(figsize=(14, 0.5 * len(shown) + 3.0), layout="constrained")
        axes, below = figure.subplots(
            2, 1, sharex=True, height_ratios=[0.5 * len(shown) + 1.5, 1.5]
        )
        rows = {"math 0": 0.55, "math 1": 0.3, "phases": 0.05, "rows": 0.8}
        bars: dict[tuple[float, str], list[tuple[float, float]]] = {}
        for s in self.spans:
            if s.cta in shown:
                low = shown.index(s.cta) + rows[s.track]
                bars.setdefault((low, s.kind), []).append((s.start_us, s.us))
        for (low, kind), found in bars.items():  # a call per span would take half a minute
            axes.broken_barh(found, (low, 0.2), facecolors=_COLORS.get(kind, "black"))
        axes.set_yticks([i + 0.5 for i in range(len(shown))], [f"CTA {c}" for c in shown])
        times, share = self.activity()
        below.fill_between(times, share, step="post", color="tab:blue")
        below.set_ylim(0.0, 1.0)
        below.set_ylabel("in products")
        below.set_xlabel("us")
        for kind, color in _COLORS.items():
            axes.broken_barh([], (0, 0), facecolors=color, label=kind)
        axes.legend(loc="upper right", ncols=len(_COLORS))
        figure.savefig(path, dpi=120)

    def activity(
        self, bin_us: float = 10.0
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Starts of bins, and the share of math warpgroups inside a main loop: tensor cores busy.

        Waits for stages inside a main loop count as products.
        """
        tiles = [s for s in self.spans if s.track.startswith("math") and s.all_cycles > 0]
        if not tiles:
            return np.zeros(0), np.zeros(0)
        begin = np.array([s.start_us for s in tiles])
        loop = np.array([1.0 - s.handing_cycles / s.all_cycles for s in tiles])
        end = begin + loop * np.array([s.us for s in tiles])
        edges = np.arange(0.0, end.max() + bin_us, bin_us)
        workers = len({(s.cta, s.track) for s in tiles})
        covered = [
            float((np.minimum(end, t + bin_us) - np.maximum(begin, t)).clip(0.0).sum())
            for t in edges
        ]
        return edges, np.array(covered) / (workers * bin_us)

    def summary(self) -> str:
        """Distributions by kind: how many, us and cycles at 10, 50 and 90%."""
        lines = [
            "kind       track      spans   us p10   p50   p90   wait first  others  handing kcyc"
        ]
        for kind in dict.fromkeys(s.kind for s in self.spans):
            for track in TRACKS:
                spans = self.of(kind, track)
                if not spans:
                    continue
                us = np.percentile([s.us for s in spans], [10, 50, 90])
                cycles = [
                    np.mean([getattr(s, name) for s in spans]) / 1e3
                    for name in ("first_cycles", "other_cycles", "handing_cycles")
                ]
                lines.append(
                    f"{kind:10} {track:9} {len(spans):6}  {us[0]:7.2f} {us[1]:5.2f} {us[2]:5.2f}"
                    f"   {cycles[0]:10.2f} {cycles[1]:7.2f} {cycles[2]:8.2f}"
                )
        return "\n".join(lines)

    def breakdown(self) -> str:
        """Where the time of the call went: its ends, and a mean tile of each phase; us."""
        lines = [
            _spread(
                "counts known", [s.start_us + s.handing_cycles / 1e3 for s in self.of("prologue")]
            ),
            _spread("first tile begins", _by_cta(self._tiles(), min, "start_us")),
            _spread("last tile done", _by_cta(self._tiles(), max, "end_us")),
            _spread("all ranks done", [s.end_us for s in self.of("tail")]),
            _spread("combine", [s.us for s in self.of("combine")]),
            _spread("call ends", [s.end_us for s in self.of("combine")]),
            _spread("last row moved", _by_cta(self.of("rows"), max, "end_us")),
            _spread("a group of rows", [s.us for s in self.of("rows")]),
        ]
        for kind in ("linear-1", "linear-2"):
            tiles = [s for s in self.of(kind) if s.track == "math 0"]
            if tiles:
                lines.append(f"{kind}: {_mean_tile(tiles)}")
        return "\n".join(lines)

    def _tiles(self) -> list[Span]:
        """Tiles as the first math warpgroup saw them."""
        return [s for s in self.spans if s.track == "math 0" and s.kind.startswith("linear")]


def _by_cta(spans: list[Span], which: Callable[[list[float]], float], name: str) -> list[float]:
    """The first or last time of every CTA."""
    times: dict[int, list[float]] = {}
    for s in spans:
        times.setdefault(s.cta, []).append(getattr(s, name))
    return [which(values) for values in times.values()]


def _spread(name: str, values: list[float]) -> str:
    if not values:
        return f"{name:18} -"
    low, half, high = np.percentile(values, [10, 50, 90])
    return f"{name:18} p10 {low:7.1f}  p50 {half:7.1f}  p90 {high:7.1f}  max {max(values):7.1f}"


def _mean_tile(tiles: list[Span]) -> str:
    """Mean kilocycles of a tile by what the warpgroup did, p50 and p90 of waits, and SM clock."""
    words = np.array(
        [(s.first_cycles, s.other_cycles, s.handing_cycles, s.all_cycles) for s in tiles]
    )
    first, others, handing, everything = words.mean(axis=0) / 1e3
    half, high = np.percentile(words / 1e3, [50, 90], axis=0)
    clock = everything * 1e3 / float(np.mean([s.us for s in tiles]))
    return (
        f"{len(tiles)} tiles, {everything + first:.2f} kcycles each ({clock:.0f} MHz): waits for "
        f"the first stage {first:.2f} ({half[0]:.2f} {high[0]:.2f}), others {others:.2f} "
        f"({half[1]:.2f} {high[1]:.2f}), products {everything - others - handing:.2f}, "
        f"handing over {handing:.2f} ({half[2]:.2f} {high[2]:.2f})"
    )


def _spans(words: npt.NDArray[np.int64], used: npt.NDArray[np.bool_], start: int) -> Iterator[Span]:
    for cta, track, record in np.argwhere(used):
        kind, tile, begin, end, *cycles = (int(word) for word in words[cta, track, record][:8])
        name = KINDS[kind]
        if name == "tile":
            name = _PHASES[tile >> 48] or "empty"
        yield Span(
            int(cta),
            TRACKS[track],
            name,
            (tile >> 24) & 0xFFFFFF,
            tile & 0xFFFFFF,
            (begin - start) / 1e3,
            (end - start) / 1e3,
            *cycles,
        )
