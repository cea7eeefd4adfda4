"""The exhibits' tables and pictures, from results of known content (nothing is measured here)."""

from __future__ import annotations

import importlib
import json
import pathlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from xstage_ext import machine, simulate

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROFILE = machine.load("h200x2")


@pytest.fixture
def evidence(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    report = importlib.import_module("_report")
    module = importlib.import_module("evidence")
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(module, "FOLDER", tmp_path / "evidence")
    return module


def write(path, lines):
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n")


def test_prediction_reports_median_error(evidence, tmp_path):
    line = {"op": "megamoe", "n": 20, "arm": "wave", "us_median": 100.0}
    ratios = (0.9, 1.0, 1.2)
    rows = [
        line | {"arm": arm, "predicted_us": 100.0 * r}
        for arm in evidence._sweep.ARMS
        for r in ratios
    ]
    write(tmp_path / "sweep_84.jsonl", [*rows, line | {"n": 0, "predicted_us": 900.0}])
    result = CliRunner().invoke(evidence.app, ["prediction"])
    assert result.exit_code == 0, result.output
    page = (tmp_path / "evidence" / "prediction.md").read_text()
    assert "| wave | 3 | 10.0% | 19.0% | 0.0% |" in page
    assert (tmp_path / "evidence" / "prediction.png").is_file()


def test_prediction_refuses_without_measurements(evidence, tmp_path):
    write(tmp_path / "sweep_84.jsonl", [{"op": "megamoe", "n": 0, "arm": "wave"}])
    result = CliRunner().invoke(evidence.app, ["prediction"])
    assert result.exit_code == 1
    assert "no measurements" in result.output


def test_attention_table(evidence, tmp_path):
    shape = {"sequence": 4096, "head_dim": 128}
    lines = [
        {"op": "fa3_a2a", "n": 20, "arm": arm, "shape": shape, "us_median": us}
        for arm, us in (("attention", 100.0), ("serial", 150.0), ("fused", 120.0))
    ]
    write(tmp_path / "attention.jsonl", lines)
    result = CliRunner().invoke(evidence.app, ["attention"])
    assert result.exit_code == 0, result.output
    assert "| 100.0 | 150.0 | 120.0 | 1.250x |" in result.output


def test_predicted_spans_and_activity(evidence, tmp_path):
    config = evidence._sweep.load_configs()[21]
    remote = evidence.predicted_spans(config, "wave/st", PROFILE, local=False)
    local = evidence.predicted_spans(config, "wave/st", PROFILE, local=True)
    spans = evidence.simulated_spans_us(remote)
    assert np.median(spans) > np.median(evidence.simulated_spans_us(local))
    assert local.store_bytes == 0.0
    tiles = {name: remote.tiles[:, i] for i, name in enumerate(simulate.TILE_COLUMNS)}
    whole = tiles["worker"].astype(np.int64)
    trace = importlib.import_module("_tile_trace").TileTrace(
        cta=whole,
        group=np.zeros_like(whole),
        phase=tiles["phase"].astype(np.int64),
        block=tiles["block"].astype(np.int64),
        n=tiles["n"].astype(np.int64),
        begin_us=tiles["main_begin_us"] - tiles["main_begin_us"].min(),
        end_us=tiles["end_us"] - tiles["main_begin_us"].min(),
        first_wait_us=np.zeros(len(whole)),
        stage_wait_us=np.zeros(len(whole)),
        hand_over_us=tiles["end_us"] - tiles["store_begin_us"],
        clock_mhz=np.full(len(whole), 1980.0),
    )
    evidence._draw_activity(config, dict.fromkeys(evidence.SPAN_ARMS, trace), PROFILE)
    page = (tmp_path / "evidence" / "timeline.md").read_text()
    row = next(line for line in page.splitlines() if line.startswith("| wave/st |"))
    seen, _, predicted = row.split("|")[2:5]
    assert seen.strip() == predicted.strip()


@pytest.fixture
def tile_trace(evidence):
    return importlib.import_module("_tile_trace")


def test_decode_reads_tiles_of_both_math_tracks(tile_trace):
    words = torch.zeros(3, 4, 5, 8, dtype=torch.int64)
    tile = 2 << 48 | 77 << 24 | 5
    words[1, 1, 0] = torch.tensor([1, tile, 10_000, 15_000, 1980, 990, 3960, 9900])
    words[2, 2, 3] = torch.tensor([1, 1 << 48, 12_000, 13_000, 0, 0, 0, 1980])
    words[0, 0, 0] = torch.tensor([2, 0, 1, 2, 3, 4, 5, 0])  # a phase record, not a tile
    words[0, 1, 0] = torch.tensor([1, 0, 1, 2, 3, 4, 5, 9])  # keeps step, has no tile
    tiles = tile_trace.decode(words)
    assert tiles.cta.tolist() == [1, 2]
    assert tiles.group.tolist() == [0, 1]
    assert tiles.phase.tolist() == [2, 1]
    assert (tiles.block[0], tiles.n[0]) == (77, 5)
    np.testing.assert_allclose(tiles.begin_us, [0.0, 2.0])
    np.testing.assert_allclose(tiles.clock_mhz, 1980.0)
    np.testing.assert_allclose(tiles.hand_over_us, [2.0, 0.0])
    np.testing.assert_allclose(tiles.first_wait_us, [1.0, 0.0])
    assert len(tiles.of_phase(2).cta) == 1
    np.testing.assert_allclose(tiles.activity(1.0), [0.5, 0.5, 1.0])
    empty = tile_trace.decode(torch.zeros(1, 4, 1, 8, dtype=torch.int64))
    assert len(empty.cta) == len(empty.activity(1.0)) == 0


@given(
    intervals=st.lists(st.tuples(st.floats(0, 50), st.floats(0, 20)), min_size=1, max_size=30),
    width=st.sampled_from([0.5, 1.0, 7.0]),
)
def test_busy_share_keeps_the_area(intervals, width):
    import sys

    sys.path.insert(0, str(ROOT / "benchmarks"))
    from _tile_trace import busy_share

    begin = np.array([a for a, _ in intervals])
    end = begin + np.array([b for _, b in intervals])
    share = busy_share(begin, end, 3, width)
    assert share.sum() * 3 * width == pytest.approx((end - begin).sum(), abs=1e-6)
    assert (share >= -1e-9).all()
