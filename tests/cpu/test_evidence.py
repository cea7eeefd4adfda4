"""The exhibits' tables and pictures, from results of known content (nothing is measured here)."""

from __future__ import annotations

import dataclasses
import importlib
import json
import pathlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from xstage_ext import machine

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


FACTS = {"gpu": "NVIDIA H200", "driver": "580", "torch": "2.11.0", "world": 2, "n": 20} | {
    "date": "2026-11-29T22:00:00+00:00",
    "command": "python benchmarks/x.py",
}


def test_prediction_reports_median_error(evidence, tmp_path):
    line = FACTS | {"op": "megamoe", "arm": "wave", "us_median": 100.0, "held_out": False}
    ratios = (0.9, 1.0, 1.2)
    rows = [
        line | {"arm": arm, "predicted_us": 100.0 * r}
        for arm in evidence._exhibits._sweep.ARMS
        for r in ratios
    ]
    write(tmp_path / "sweep_84.jsonl", [*rows, line | {"n": 0, "predicted_us": 900.0}])
    result = CliRunner().invoke(evidence.app, ["prediction"])
    assert result.exit_code == 0, result.output
    page = (tmp_path / "evidence" / "prediction.md").read_text()
    assert "| wave | 3 | 10.0% | 19.0% | 0.0% |" in page
    assert "2 x NVIDIA H200, driver 580; torch 2.11.0, 2026-11-29" in page
    assert (tmp_path / "evidence" / "prediction.png").is_file()


def test_prediction_refuses_without_measurements(evidence, tmp_path):
    write(tmp_path / "sweep_84.jsonl", [{"op": "megamoe", "n": 0, "arm": "wave"}])
    result = CliRunner().invoke(evidence.app, ["prediction"])
    assert result.exit_code == 1
    assert "no measurements" in result.output


def test_regret_of_the_planners_choice(evidence, tmp_path):
    exhibits = evidence._exhibits
    config = exhibits._sweep.load_configs()[23]
    chosen = exhibits.choose.choose(config.problem, PROFILE).plan
    other = dataclasses.replace(chosen, x_ring_blocks=chosen.x_ring_blocks + 1)
    plans = [
        {"name": name, "plan": dataclasses.astuple(plan), "us": us, "ok": True, "n": 20}
        | {"halves_us": halves, "us_p10": us, "us_p90": us}
        for name, plan, us, halves in (
            ("ours", chosen, 102.0, (103.0, 101.0)),
            ("other", other, 100.0, (100.0, 100.0)),
        )  # fmt: skip
    ]
    line = FACTS | {"op": "megamoe_plans", "arm": "all", "shape": config.key, "plans": plans}
    write(tmp_path / "sweep_84.jsonl", [line])
    result = CliRunner().invoke(evidence.app, ["regret"])
    assert result.exit_code == 0, result.output
    assert "| held out | 1 | 2.0% | 2.0% | 2.0% | 2.0% |" in result.output
    assert f"| {config.name} | 2.0% | ours | other |" in result.output


def test_a_call_in_parts(evidence, tmp_path):
    """Every tile has a known length: shares can be counted by hand."""
    sweep, shown = evidence._exhibits._sweep, evidence._exhibit_ceiling
    config = sweep.load_configs()[12]
    plan = sweep.plan_of(config, "wave/st", PROFILE)
    blocks = (-(-config.draw().counts(config.num_experts).sum(axis=0) // 128))[
        : config.local_experts
    ].sum()
    per_sm = [blocks * n / plan.num_sms for n in (plan.linear1_tiles, plan.linear2_tiles)]
    tiles = 50.0 + per_sm[0] * (20 + 3 + 2) + per_sm[1] * (10 + 1 + 4) + 30.0
    line = FACTS | {"op": "megamoe_trace", "arm": "wave/st", "shape": config.key}
    line |= {"plan": dataclasses.astuple(plan), "kernel_clock_mhz": 1600.0}
    line |= {"linear1_tile_us": 20.0, "linear1_stage_wait_us": 3.0, "linear1_hand_over_us": 2.0}
    line |= {"linear2_tile_us": 10.0, "linear2_stage_wait_us": 1.0, "linear2_hand_over_us": 4.0}
    line |= {"first_tile_us": 50.0, "tiles_us": tiles, "signal_us": 5.0, "combine_us": 15.0}
    part = shown.parts_of(line, config)
    whole = tiles + 20.0
    shares = dict(zip(shown.PARTS, part.shares, strict=True))
    assert sum(part.shares) == pytest.approx(1.0)
    assert shares["before the first tile"] == pytest.approx(50.0 / whole)
    assert shares["epilogues"] == pytest.approx((2 * per_sm[0] + 4 * per_sm[1]) / whole)
    assert shares["waiting for operands"] == pytest.approx((3 * per_sm[0] + per_sm[1]) / whole)
    assert shares["waiting for rows, the end"] == pytest.approx(30.0 / whole)
    assert shares["combine"] == pytest.approx(20.0 / whole)
    rows = config.draw().counts(config.num_experts).sum(axis=0)[: config.local_experts].sum()
    flops = 6.0 * rows * config.hidden * config.intermediate
    assert part.arithmetic == pytest.approx(flops / (132 * 4096 * 1600.0) / whole)
    assert 0.5 < shares["full rows"] / (shares["full rows"] + shares["empty rows of tiles"]) < 1
    arms = [
        FACTS | {"op": "megamoe", "arm": arm, "shape": config.key, "us_median": us}
        | {"ceiling_us": 100.0, "compute_floor_us": 80.0, "flops": 56e9}
        for arm, us in zip(sweep.ARMS, (220.0, 210.0, 215.0, 205.0, 200.0), strict=True)
    ]  # fmt: skip
    seen = {"name": "a", "plan": dataclasses.astuple(plan), "us": 190.0, "ok": True, "n": 20}
    seen |= {"halves_us": [190.0, 190.0], "us_p10": 190.0, "us_p90": 190.0}
    plans = FACTS | {"op": "megamoe_plans", "arm": "all", "shape": config.key, "plans": [seen]}
    write(tmp_path / "sweep_84.jsonl", [*arms, line, plans])
    result = CliRunner().invoke(evidence.app, ["ceiling"])
    assert result.exit_code == 0, result.output
    assert "| **all** | 1 | 1.100x | 1.100x | 1.158x | 2.200x | 50% | 700 |" in result.output
    assert "under 1.18x the wave with plain stores in 0 of 1 configurations" in result.output
    assert f"| {config.model} {config.tokens} | {whole:.0f} | 1600 |" in result.output


def test_luck_is_no_regret(evidence):
    plans = importlib.import_module("_plans")
    lucky = plans.Measured("a", None, 99.0, (98.0, 100.0))
    steady = plans.Measured("b", None, 99.0, (99.0, 99.0))
    # Half 0 calls a best, which half 1 denies; half 1 calls b best.
    assert plans.regret([lucky, steady], steady) == pytest.approx((99 / 100 - 1) / 2)
    assert plans.regret([lucky, steady], lucky) == pytest.approx((98 / 99 - 1) / 2)


def test_plans_that_follow_themselves(evidence):
    plans = importlib.import_module("_plans")
    config = evidence._exhibits._sweep.load_configs()[0]
    thrifty = plans.Measured("a", None, 100.0, (100.0, 100.0), alone_us=(104.0, 106.0))
    hungry = plans.Measured("b", None, 98.0, (98.0, 98.0), alone_us=(110.0, 108.0))
    slow = plans.Measured("c", None, 120.0, (120.0, 120.0))
    case = plans.Case(config, None, (thrifty, hungry, slow))
    assert case.typical_us(thrifty) == pytest.approx((100.0 * 105.0) ** 0.5)
    # Not timed alone: as much slower as the others are.
    assert case.typical_us(slow) == pytest.approx(120.0 * ((1.05 + 109 / 98) / 2) ** 0.5)
    assert plans.regret_alone(case.plans, hungry) == pytest.approx((110 / 104 + 108 / 106) / 2 - 1)
    assert plans.regret_alone(case.plans, slow) is None
    assert plans.Case(config, None, (slow,)).typical_us(slow) == 120.0


def test_attention_table(evidence, tmp_path):
    shape = {"name": "s4096", "rows": 4096, "heads": 12, "head_dim": 128, "causal": False}
    times = {"fa3": 100.0, "fused": 104.0, "fused coupled": 120.0, "fa3 + a2a": 150.0}
    lines = [
        FACTS | {"op": "attention_a2a", "arm": arm, "shape": shape, "us_median": us}
        for arm, us in times.items()
    ]
    write(tmp_path / "attention.jsonl", lines)
    result = CliRunner().invoke(evidence.app, ["attention"])
    assert result.exit_code == 0, result.output
    assert "| s4096 12x128 | 4096 | 100.0 | +4.0 | - | +20.0 | +50.0 | - |" in result.output
    expected = evidence._exhibits.predicted_overheads_us(shape, 2, PROFILE)
    assert 0 < expected["fused"] < expected["coupled"]


def test_pacing_table(evidence, tmp_path):
    shape = {"tile_bytes": 32768, "steps": 32, "repeats": 2, "pulls": 0}
    line = FACTS | {"op": "burst_loop", "shape": shape, "load_wait_max_us": 3.0}
    lines = [
        line | {"arm": arm, "us_median": us, "over_no_store": us / 20 - 1, "egress_GBps": 200.0}
        | {"load_wait_p99_us": wait}
        for arm, us, wait in (("none", 20.0, 0.1), ("bulk", 21.0, 2.5))
    ]  # fmt: skip
    write(tmp_path / "burst_loop.jsonl", lines)
    result = CliRunner().invoke(evidence.app, ["pacing"])
    assert result.exit_code == 0, result.output
    assert "| bulk | 21.00 | +5.0% | 200 | 2.50 | 3.00 |" in result.output


def tile_lines(exhibits):
    """Lines as the GPU writes them, from the simulator's own tiles."""
    lines = []
    for arm in ("wave/st", "interleaved/st", "local control"):
        known = arm if arm in exhibits._sweep.ARMS else "wave/st"
        plan = exhibits._sweep.plan_of(exhibits._sweep.load_configs()[21], known, PROFILE)
        line = {"op": "megamoe_tiles", "arm": arm, "index": 21, "bin_us": 10.0, "commit": "abc"}
        line["plan"] = dataclasses.astuple(plan)
        result = exhibits.simulated(line, PROFILE)
        spans = exhibits.simulated_spans_us(result)
        activity = exhibits.simulated_activity(result, 10.0)
        line |= {"percentiles_us": np.percentile(spans, range(101)).tolist()}
        lines.append(FACTS | line | {"activity": activity.tolist(), "kernel_clock_mhz": 1980.0})
    return lines


def test_spans_and_timeline_show_predictions_beside_what_was_seen(evidence, tmp_path):
    write(tmp_path / "tile_traces.jsonl", tile_lines(evidence._exhibit_tiles))
    config = evidence._exhibits._sweep.load_configs()[21]
    plan = evidence._exhibits._sweep.plan_of(config, "wave/st", PROFILE)
    traced = FACTS | {"op": "megamoe_trace", "arm": "wave/st", "shape": config.key}
    traced |= {"plan": dataclasses.astuple(plan), "linear2_span_us": 2.0}
    write(tmp_path / "sweep_84.jsonl", [traced | {"linear2_span_p90_us": 9.0}])
    for name in ("spans", "timeline"):
        result = CliRunner().invoke(evidence.app, [name])
        assert result.exit_code == 0, result.output
    rows = (tmp_path / "evidence" / "spans.md").read_text().splitlines()
    cells = [row.split(" | ") for row in rows if row.startswith(("| wave/st |", "| local"))]
    assert len(cells) == 2
    for _, median, _, p90, _, predicted, predicted_p90, _ in cells:
        assert (median, p90) == (predicted, predicted_p90)
    assert float(cells[0][1]) > float(cells[1][1])  # the link costs something
    over = next(
        row for row in rows if row.startswith("| wave/st, remote 0.875 | 1 | 2.00 | 9.00 |")
    )
    assert over.split(" | ")[-1].strip(" |") == cells[0][6]
    rows = (tmp_path / "evidence" / "timeline.md").read_text().splitlines()
    row = next(row for row in rows if row.startswith("| wave/st"))
    assert row.split(" | ")[1] == row.split(" | ")[-1].strip(" |")


def test_longest_run(evidence):
    assert evidence._exhibit_tiles.longest(np.array([True, True, False, True])) == 2
    assert evidence._exhibit_tiles.longest(np.array([], dtype=bool)) == 0


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
    # Half a microsecond of the first tile's three waits for operands.
    np.testing.assert_allclose(tiles.activity(1.0), np.array([5, 5, 11]) / 12)
    empty = tile_trace.decode(torch.zeros(1, 4, 1, 8, dtype=torch.int64))
    assert len(empty.cta) == len(empty.activity(1.0)) == 0


def test_phases_of_a_call(tile_trace):
    words = torch.zeros(2, 4, 3, 8, dtype=torch.int64)
    for cta, late in ((0, 0), (1, 2_000)):
        words[cta, 0, 0] = torch.tensor([2, 0, 1_000, 99_000, 0, 0, 47_000, 0])
        words[cta, 0, 1] = torch.tensor([4, 0, 60_000 + late, 71_000, 0, 0, 0, 0])
        words[cta, 0, 2] = torch.tensor([5, 0, 71_000, 81_000 - late, 0, 0, 0, 0])
        words[cta, 1, 0] = torch.tensor([1, 1 << 48, 51_000 + late, 60_000, 0, 0, 0, 0])
    phases = tile_trace.phases_us(words)
    assert phases == {
        "counts_us": 47.0, "first_tile_us": 51.0, "tiles_us": 61.0, "signal_us": 9.0,
        "combine_us": 10.0,
    }  # fmt: skip
    assert tile_trace.phases_us(torch.zeros(1, 4, 1, 8, dtype=torch.int64)) == {}


def test_waits_for_operands_are_not_activity(tile_trace):
    ones = np.ones(2)
    begin, end = np.array([0.0, 2.0]), np.array([2.0, 4.0])
    halves = tile_trace.busy_share(begin, end, 1, 1.0, 0.5 * ones)
    np.testing.assert_allclose(halves, 0.5)
    words = torch.zeros(1, 4, 1, 8, dtype=torch.int64)
    words[0, 1, 0] = torch.tensor([1, 1 << 48, 0, 4_000, 0, 990, 1980, 7920])
    # 4 us: 1 us of hand-over, half a microsecond of the main loop waits for operands.
    activity = tile_trace.decode(words).activity(1.0)
    np.testing.assert_allclose(activity, [2.5 / 3] * 3, rtol=1e-6)


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
