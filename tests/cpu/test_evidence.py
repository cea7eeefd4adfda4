"""The exhibits' tables and pictures, from results of known content (nothing is measured here)."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import pathlib

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from xstage_ext import machine
from xstage_ext.errors import CalibrationError

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROFILE = machine.load("h200x2")


@pytest.fixture
def evidence(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    report = importlib.import_module("_report")
    module = importlib.import_module("evidence")
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(report, "LOCAL_RESULTS", tmp_path / "local")
    monkeypatch.setattr(module, "FOLDER", tmp_path / "evidence")
    monkeypatch.setattr(module, "LOCAL_FOLDER", tmp_path / "local_evidence")
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


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.fixture
def measured(evidence, monkeypatch, two_gpus):
    """Calls of what measures; each leaves one line of the sweep."""
    gpu = importlib.import_module("_evidence_gpu")
    calls = []

    def measure(*arguments):
        calls.append(arguments)
        line = FACTS | {"op": "megamoe", "us_median": 100.0, "predicted_us": 103.0}
        lines = [line | {"arm": arm, "held_out": False} for arm in evidence._exhibits._sweep.ARMS]
        file, folder, _ = arguments
        folder.mkdir(exist_ok=True)
        write(folder / file, lines)
        return 0

    monkeypatch.setattr(gpu, "measure", measure)
    monkeypatch.setattr(evidence.machine, "load_here", lambda: PROFILE)
    return calls


def test_measured_here_is_drawn_here(evidence, tmp_path, measured):
    result = CliRunner().invoke(evidence.app, ["prediction", "--measure"])
    assert result.exit_code == 0, result.output
    assert measured == [("sweep_84.jsonl", tmp_path / "local", evidence.USUAL)]
    assert (tmp_path / "local_evidence" / "prediction.md").is_file()
    assert not (tmp_path / "evidence").exists()
    result = CliRunner().invoke(evidence.app, ["prediction", "--measure", "--record"])
    assert result.exit_code == 0, result.output
    assert measured[1:] == [("sweep_84.jsonl", tmp_path, evidence.USUAL)]
    assert "| **all** | 6 | 3.0% |" in (tmp_path / "evidence" / "prediction.md").read_text()


def test_a_benchmark_that_fails_ends_the_exhibit(evidence, monkeypatch, tmp_path, measured):
    monkeypatch.setattr(importlib.import_module("_evidence_gpu"), "measure", lambda *_: 3)
    result = CliRunner().invoke(evidence.app, ["regret", "--measure"])
    assert result.exit_code == 1
    assert result.output == "regret --measure: the benchmark ended with status 3\n"


def test_what_measures_an_exhibit(evidence, monkeypatch, tmp_path):
    """Every file of an exhibit has a command, whose script takes its options."""
    gpu = importlib.import_module("_evidence_gpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert set(evidence.FILES) == set(evidence.EXHIBITS)
    assert set(evidence.FILES.values()) == {gpu.TRACES, *gpu.SCRIPTS}
    command = gpu.command_of("sweep_84.jsonl", tmp_path)
    assert command[1:] == [*command[1:4], "--record"] and command[2] == "--budget-s"
    known = inspect.signature(importlib.import_module("sweep_84").main).parameters
    assert {"record", "budget_s"} <= set(known)
    assert "--record" not in gpu.command_of("sweep_84.jsonl", tmp_path / "local")
    for file in ("attention.jsonl", "burst_loop.jsonl"):
        assert gpu.command_of(file, tmp_path)[-1] == file
        command = gpu.command_of(file, tmp_path / "local")
        assert command[-1] == str(tmp_path / "local" / file)
        script = pathlib.Path(command[-3])
        monkeypatch.setattr("sys.argv", command[-3:])
        with pytest.raises((SystemExit, CalibrationError), match="measures GPUs"):
            importlib.import_module(script.stem).main()
    assert gpu.command_of("attention.jsonl", tmp_path)[1:3] == ["-m", "torch.distributed.run"]


@pytest.mark.parametrize("name", ["spans", "timeline", "attention", "pacing", "regret"])
def test_measuring_needs_two_gpus(evidence, monkeypatch, name):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(evidence.app, [name, "--measure"])
    assert result.exit_code == 1
    assert result.output == f"{name} --measure: expected two GPUs, got 0\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["spans", "--measure", "--index", "999"], ("--index", "999")),
        (["spans", "--index", "7"], ("--index", "--measure")),
        (["attention", "--record"], ("--record", "--measure")),
    ],
)
def test_refused_by_name(evidence, two_gpus, arguments, words):
    result = CliRunner().invoke(evidence.app, arguments)
    assert result.exit_code == 2
    assert all(word in result.output for word in words), result.output


def test_regret_of_the_planners_choice(evidence, tmp_path):
    exhibits = evidence._exhibits
    config = exhibits._sweep.load_configs()[23]
    decision = exhibits.choose.choose(config.problem, PROFILE)
    chosen = decision.plan
    other = dataclasses.replace(chosen, x_ring_blocks=chosen.x_ring_blocks + 1)
    plans = [
        {"name": name, "plan": dataclasses.asdict(plan), "us": us, "ok": True, "n": 20}
        | {"halves_us": halves, "us_p10": us, "us_p90": us}
        for name, plan, us, halves in (
            ("ours", chosen, 102.0, (103.0, 101.0)),
            ("other", other, 100.0, (100.0, 100.0)),
            # Fewer bytes on the link than among the real layer's ranks: no rival.
            ("two ranks", dataclasses.replace(other, token_sets=1), 90.0, (90.0, 90.0)),
        )  # fmt: skip
    ]
    line = FACTS | {"op": "megamoe_plans", "arm": "all", "shape": config.key, "plans": plans}
    write(tmp_path / "sweep_84.jsonl", [line])
    result = CliRunner().invoke(evidence.app, ["regret"])
    assert result.exit_code == 0, result.output
    assert "| held out | 1 | 2.0% | 2.0% | 2.0% | 2.0% |" in result.output
    # The choice is a family's plan, whatever it was measured as; the other is nobody's.
    assert f"| {config.name} | 2.0% | {decision.family} | other |" in result.output
    assert "No weight of its ranking was fitted to the held-out shapes" in result.output
    assert "*Alone*" not in result.output


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
    line |= {"plan": dataclasses.asdict(plan), "kernel_clock_mhz": 1600.0}
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
        for arm, us in zip(sweep.ARMS, (220.0, 210.0, 215.0, 205.0, 200.0, 150.0), strict=True)
    ]  # fmt: skip
    seen = {"name": "a", "plan": dataclasses.asdict(plan), "us": 190.0, "ok": True, "n": 20}
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
    sweep = evidence._exhibits._sweep
    config = sweep.load_configs()[0]
    profile = machine.load("h200x2")
    plan, once = (sweep.plan_of(config, arm, profile) for arm in ("planner", sweep.AS_IT_IS))
    thrifty = plans.Measured("a", plan, 100.0, (100.0, 100.0), alone_us=(104.0, 106.0))
    hungry = plans.Measured("b", plan, 98.0, (98.0, 98.0), alone_us=(110.0, 108.0))
    slow = plans.Measured("c", plan, 120.0, (120.0, 120.0))
    two_ranks = plans.Measured("d", once, 90.0, (90.0, 90.0), alone_us=(180.0, 180.0))
    case = plans.Case(config, None, (thrifty, hungry, slow, two_ranks))
    assert case.typical_us(thrifty) == pytest.approx(100.0**0.8 * 105.0**0.2)
    # Not timed alone: as much slower as the others are.
    assert case.typical_us(slow) == pytest.approx(120.0 * ((1.05 + 109 / 98) / 2) ** 0.2)
    assert plans.regret_alone(case.rivals, hungry) == pytest.approx((110 / 104 + 108 / 106) / 2 - 1)
    assert plans.regret_alone(case.rivals, slow) is None
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
    # Neighbours in time say less than medians do: they are what counts.
    lines[1] |= {"over_fa3": 1.02, "over_low": 0.99, "over_high": 1.05}
    write(tmp_path / "attention.jsonl", lines)
    result = CliRunner().invoke(evidence.app, ["attention"])
    assert "| 100.0 | +2.0 [-1.0 +5.0] | - | +20.0 | +50.0 | - |" in result.output
    assert "cost cannot be told from zero for s4096." in result.output


def test_predicted_overheads_by_hand(evidence):
    """4,096 rows, 12 heads of 128 per rank of two, from the profile's numbers alone."""
    shape = {"name": "s4096", "rows": 4096, "heads": 12, "head_dim": 128, "causal": False}
    profile = json.loads((ROOT / "xstage_ext/profiles/h200x2.json").read_text())
    tma, rates = profile["mechanisms"]["tma"], profile["rates"]
    assert tma["R_GBps"]["producers"][-1] == tma["R_both_GBps"]["producers"][-1] == 132
    # 12 x 32 tiles on 132 SMs: three rounds. Half of a round's tiles of 32 KiB crosses the link.
    round_us = 132 * 32768 / 2 / (tma["R_both_GBps"]["values"][-1] * 1e3)
    signal_us = tma["visibility_us"] + rates["flag_us"]
    # Rows come in parts of 3 KiB, which reach 0.79 of the link's rate.
    a2a_us = 12 * 2048 * 128 * 2 / (0.79 * tma["R_GBps"]["values"][-1] * 1e3)
    told = evidence._exhibits.predicted_overheads_us(shape, 2, PROFILE)
    assert told["fused"] == pytest.approx(signal_us, rel=1e-3)
    assert told["coupled"] == pytest.approx(
        signal_us + 2 * (round_us + tma["visibility_us"]), rel=1e-3
    )
    assert told["serial"] == pytest.approx(rates["launch_us"] + a2a_us + signal_us, rel=1e-3)


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
        line["plan"] = dataclasses.asdict(plan)
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
    traced |= {"plan": dataclasses.asdict(plan), "linear2_span_us": 2.0}
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
    # The arms are the simulator's own, the sweep's line is not.
    told = float(cells[0][5])
    words = (
        f"the sweep, wave/st, remote 0.875: median 2.00 us, predicted {told:.2f} ({2 / told:.2f}x)"
    )
    text = next(row for row in rows if "the prediction fails" in row)
    assert text.count("predicted") == 2 and words in text
    rows = (tmp_path / "evidence" / "timeline.md").read_text().splitlines()
    row = next(row for row in rows if row.startswith("| wave/st"))
    assert row.split(" | ")[1] == row.split(" | ")[-1].strip(" |")


def test_misses_are_named(evidence):
    tiles = evidence._exhibit_tiles
    assert tiles.misses("wave", (1.49, 3.1), (1.0, 2.0)) == [
        "wave: p90 3.10 us, predicted 2.00 (1.55x)"
    ]
    assert tiles.misses("wave", (1.0, 2.0), (1.6, 2.9)) == [
        "wave: median 1.00 us, predicted 1.60 (0.62x)"
    ]


def test_longest_run(evidence):
    assert evidence._exhibit_tiles.longest(np.array([True, True, False, True])) == 2
    assert evidence._exhibit_tiles.longest(np.array([], dtype=bool)) == 0
