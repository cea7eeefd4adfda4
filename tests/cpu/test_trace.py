"""Traces of megamoe, read from records as the kernel writes them."""

from __future__ import annotations

import json
import pathlib

import pytest
import torch

from xstage_ext.trace import MegaMoETrace


def records() -> torch.Tensor:
    """Two CTAs: a prologue, a tile of each linear, an empty tile, a group of rows."""
    words = torch.zeros(2, 4, 3, 8, dtype=torch.int64)
    words[0, 0, 0] = torch.tensor([2, 0, 1000, 11_000, 0, 0, 0, 0])
    words[0, 1, 0] = torch.tensor([1, 1 << 48 | 5 << 24 | 7, 11_000, 61_000, 10, 20, 30, 90_000])
    words[0, 1, 1] = torch.tensor([1, 2 << 48 | 5 << 24 | 9, 61_000, 81_000, 1, 2, 3, 30_000])
    words[1, 2, 0] = torch.tensor([1, 0, 11_000, 12_000, 0, 0, 0, 5])
    words[1, 3, 0] = torch.tensor([3, 6 << 24, 12_000, 15_000, 0, 0, 0, 0])
    return words


def test_reads_every_used_record() -> None:
    trace = MegaMoETrace.read(records())
    assert [s.kind for s in trace.spans] == ["prologue", "linear-1", "linear-2", "empty", "rows"]
    tile = trace.of("linear-1")[0]
    assert (tile.cta, tile.track, tile.block, tile.n) == (0, "math 0", 5, 7)
    assert (tile.start_us, tile.end_us) == (10.0, 60.0)
    assert (tile.first_cycles, tile.other_cycles, tile.handing_cycles) == (10, 20, 30)
    rows = trace.of("rows", "rows")[0]
    assert (rows.cta, rows.block, rows.n) == (1, 6, 0)
    assert trace.of("rows", "math 0") == []


def test_chrome_json_and_picture(tmp_path: pathlib.Path) -> None:
    trace = MegaMoETrace.read(records())
    trace.save_chrome(tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) == 5
    assert spans[1]["dur"] == 50.0 and spans[1]["pid"] == 0 and spans[1]["tid"] == 1
    pytest.importorskip("matplotlib")
    trace.save_picture(tmp_path / "t.png")
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


def test_summary_counts_spans() -> None:
    summary = MegaMoETrace.read(records()).summary().splitlines()
    assert len(summary) == 6
    assert summary[2].split()[:4] == ["linear-1", "math", "0", "1"]


def test_other_tensors_are_refused() -> None:
    with pytest.raises(ValueError, match=r"int64 \[CTAs, 4, records, 8\]"):
        MegaMoETrace.read(torch.zeros(2, 4, 3, 7, dtype=torch.int64))


def test_breakdown_and_activity() -> None:
    trace = MegaMoETrace.read(records())
    lines = {line[:18].strip(): line[18:] for line in trace.breakdown().splitlines()}
    assert "p50    10.0" in lines["first tile begins"] and "max    80.0" in lines["last tile done"]
    first = next(line for line in trace.breakdown().splitlines() if line.startswith("linear-1"))
    assert "1 tiles, 90.01 kcycles each (1800 MHz)" in first and "handing over 0.03" in first
    begin, share = trace.activity(bin_us=10.0)
    # One warpgroup of two works from 10 to 80 us; the other has an empty tile at 10 to 11 us.
    assert begin[1] == 10.0 and 0.5 < share[1] < 0.56
    assert share[2:7] == pytest.approx(0.5, abs=0.01) and share[0] == 0.0
