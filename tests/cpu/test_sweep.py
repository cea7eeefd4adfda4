"""The sweep: its configurations, bounds and report; one small real layer end to end."""

from __future__ import annotations

import dataclasses
import importlib
import json
import pathlib

import numpy as np
import pytest
from typer.testing import CliRunner

from xstage_ext import machine
from xstage_ext._faults import layout

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROFILE = machine.load("h200x2")


@pytest.fixture
def benchmarks(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    report = importlib.import_module("_report")
    monkeypatch.setattr(report, "LOCAL_RESULTS", tmp_path)
    return importlib.import_module


def test_84_configurations_with_sources(benchmarks):
    configs = benchmarks("_sweep").load_configs()
    assert len(configs) == 7 * 2 * 2 * 3 == len({json.dumps(c.key) for c in configs})
    data = json.loads((ROOT / "benchmarks" / "configs_84.json").read_text())
    assert all("/" in shape["source"] for shape in data["shapes"])
    assert len(data["held_out"]) == 2
    for config in configs:
        assert config.num_experts // config.world == config.experts // config.ranks
        assert config.problem.why_not() is None


@pytest.mark.parametrize("index", range(0, 84, 13))
def test_the_drawn_routing_is_what_the_configuration_says(benchmarks, index):
    sweep = benchmarks("_sweep")
    config = sweep.load_configs()[index]
    load = sweep.load_of(config, config.draw())
    assert load.remote_share == pytest.approx(config.remote_share, abs=0.02)
    assert load.counts.sum() == pytest.approx(config.tokens * config.topk, rel=0.15)
    skewed = load.counts.sum(0).max() / load.counts.sum(0).mean()
    assert (skewed > 1.4) == (config.routing == "skewed")
    ceiling = sweep.ceiling_of(load, PROFILE)
    assert ceiling.us == max(ceiling.compute_us, ceiling.link_us, ceiling.weights_us)
    # Dispatch and combine cross the link, each row once.
    remote = config.tokens * config.topk * config.remote_share
    assert load.egress_bytes == pytest.approx(2 * remote * 2 * config.hidden, rel=0.1)


def test_no_prediction_beats_its_ceiling(benchmarks):
    sweep = benchmarks("_sweep")
    for config in sweep.load_configs()[::11]:
        load = sweep.load_of(config, config.draw())
        bound = sweep.ceiling_of(load, PROFILE).us
        for arm in ("wave/st", "planner"):
            _, result = sweep.predict(config, load, arm, PROFILE)
            assert result.total_us > bound


def test_summary_lists_regressions(benchmarks):
    sweep = benchmarks("_sweep")
    times = [{"a": 10.0, "b": 5.0}, {"a": 10.0, "b": 20.0}]
    result = sweep.summarise(times, ["x", "y"], "a", "b")
    assert result.mean == pytest.approx(1.0)
    assert (result.best, result.worst) == ((2.0, "x"), (0.5, "y"))
    assert result.regressions == ((0.5, "y"),)
    assert np.isnan(sweep.geometric_mean([]))


@pytest.fixture
def run(benchmarks):
    """Runs sweep_84.py with arguments."""
    typer = importlib.import_module("typer")
    app = typer.Typer()
    app.command()(benchmarks("sweep_84").main)
    return lambda *arguments: CliRunner().invoke(app, arguments)


def write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_quick_run_resumes_merges_and_reports(benchmarks, run, tmp_path):
    read, shown = benchmarks("_report").read, benchmarks("_sweep_report")
    for part in ("1/2", "2/2"):
        result = run("--quick", "--only", "predict", "--part", part)
        assert result.exit_code == 0, result.output
    files = sorted(tmp_path.glob("*.part-*.jsonl"))
    assert len(files) == 2
    # A run of one's own never touches what the repository keeps.
    assert not list((ROOT / "benchmarks" / "results").glob("*.part-*"))
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert len(lines) == 12 * len(benchmarks("_sweep").ARMS)
    assert all(line["predicted"] and line["n"] == 0 and line["ok"] is None for line in lines)
    assert {line["provenance"] for line in lines} == {PROFILE.provenance}

    # One configuration is there, and what follows it is torn.
    before = files[0].read_text().splitlines()
    files[0].write_text("\n".join(before[:5]) + '\n{"torn')
    result = run("--quick", "--only", "predict", "--part", "1/2", "--resume")
    assert result.exit_code == 0, result.output
    found = shown.by_config(read(files[0]))
    assert len(found) == 6
    assert all(shown.Wanted(0, PROFILE.name).are_met(one) for one in found.values())
    # Nothing was lost behind the torn line, nothing predicted twice.
    kept = files[0].read_text().splitlines()
    assert kept[:5] == before[:5] and kept[5] == '{"torn' and len(kept) == 1 + len(before)
    # Half a configuration is replaced, not added to.
    files[0].write_text("\n".join(before[:7]) + "\n")
    assert run("--quick", "--only", "predict", "--part", "1/2", "--resume").exit_code == 0
    assert len(files[0].read_text().splitlines()) == len(before)

    result = run("--quick", "--only", "predict", "--part", "merge")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "sweep_84_quick_predicted.png").stat().st_size > 10_000
    path = tmp_path / "sweep_84_quick_predicted.jsonl"
    text = _console_text(benchmarks, path)
    assert "12 configurations, PREDICTED, profile h200x2 (measured)" in text
    # The same stands in a file.
    assert path.with_suffix(".txt").read_text() in "\n".join(map(str.rstrip, text.splitlines()))

    # What is slower than the baseline is listed where it was measured; predictions are counted.
    altered = [
        line | ({"us_median": 1e6} if line["arm"] == "planner" else {}) for line in read(path)
    ]
    for n, listed in ((0, 0), (20, 12)):
        write(path, [line | {"n": n, "ok": True} for line in altered])
        text = _console_text(benchmarks, path)
        assert "12 below 1" in text and text.count("regression") == listed


def _console_text(benchmarks, path):
    shown = benchmarks("_sweep_report")
    with shown.console.capture() as capture:
        shown.report(path, benchmarks("_sweep").load_configs())
    return capture.get()


def measured_lines(benchmarks, configs, **more):
    """Lines as a measured run writes them: 100 us for every arm."""
    rows = [
        row for config in configs for row in benchmarks("sweep_84").predicted_rows(config, PROFILE)
    ]
    facts = {"n": 20, "ok": True, "us_median": 100.0, "date": "2026-11-30", "commit": "abc"} | more
    lines = [row.as_dict() | facts for row in rows]
    for line in lines:
        del line["predicted"]
    lines += [line | {"arm": "serial", "n": 5} for line in lines if line["arm"] == "wave/st"]
    plans = [{"name": "wave st 128", "ok": True}]
    lines += [
        {"op": "megamoe_plans", "arm": "all", "shape": config.key, "world": 2, "plans": plans}
        | {name: facts[name] for name in ("n", "ok", "date", "commit")}
        for config in configs
    ]
    return sorted(lines, key=lambda line: line["shape"]["seed"])


def test_what_need_not_be_measured_again(benchmarks):
    shown = benchmarks("_sweep_report")
    lines = measured_lines(benchmarks, benchmarks("_sweep").load_configs()[:1])
    wanted = shown.Wanted(20, PROFILE.name, 5, ["abc"])

    def met(lines, wanted=wanted):
        return wanted.are_met(next(iter(shown.by_config(lines).values()), None))

    assert len(lines) == 7 and met(lines)
    assert not met([])
    for k, line in enumerate(lines):
        assert not met(lines[:k] + lines[k + 1 :]), f"without {line['arm']}"
        assert not met([*lines, line | {"ok": False}]) or line["op"] == "megamoe_plans"
        assert not met([*lines, line | {"commit": "other"}])
        if line["op"] == "megamoe":
            assert not met([*lines, line | {"profile": "other"}])
            assert not met([*lines, line | {"n": line["n"] - 1}])
    wrong = lines[-1] | {"plans": [{"name": "wave st 128", "ok": False}]}
    assert lines[-1]["op"] == "megamoe_plans" and not met([*lines, wrong])
    assert not met(lines, dataclasses.replace(wanted, since="2026-12-01"))
    assert not met(lines, shown.Wanted(0, PROFILE.name))
    predicted = [line | {"n": 0, "ok": None} for line in lines if line["arm"] in shown.ARMS]
    assert met(predicted, shown.Wanted(0, PROFILE.name)) and not met(predicted)
    assert not met(predicted, shown.Wanted(0, "other"))


def test_a_measurement_counts_once(benchmarks, tmp_path):
    configs = benchmarks("_sweep").load_configs()[:2]
    lines = measured_lines(benchmarks, configs)
    again = [line | {"us_median": 70.0, "n": 21} for line in lines[:7]]
    predicted = [line | {"predicted": True, "n": 0} for line in lines[:1]]
    write(tmp_path / "x.jsonl", [*lines, *again, *predicted])
    assert list(benchmarks("_report").read(tmp_path / "x.jsonl")) == [
        *lines[7:],
        *again,
        *predicted,
    ]


def test_wrong_results_are_shown_and_left_out(benchmarks, run, tmp_path):
    """They are in no mean, and a run that has them fails."""
    configs = benchmarks("_sweep").load_configs()[:3]
    lines = measured_lines(benchmarks, configs)
    for line in lines:
        if line["arm"] == "planner":
            line["us_median"] = 50.0
            if line["shape"] == configs[1].key:
                line |= {"us_median": 1.0, "ok": False}
    path = tmp_path / "sweep_84.part-1-of-1.jsonl"
    write(path, lines)
    text = _console_text(benchmarks, path)
    assert "planner over wave/st: geometric mean 2.000x" in text
    assert "WRONG results in 1 configurations: left out of all that follows" in text
    assert f"WRONG {configs[1].name}: planner\n" in text
    row = next(line for line in text.splitlines() if " 4096 " in line)
    assert row.count("WRONG") == 3 and "100.00x" not in text
    result = run("--part", "merge")
    assert result.exit_code == 1 and f"WRONG results in 1 configurations: {configs[1].name}" in (
        result.output.replace("\n", " ")
    )
    write(path, [line | {"ok": True} for line in lines])
    result = run("--part", "merge")
    assert result.exit_code == 3 and "81 of 84 configurations are left" in result.output


@pytest.mark.slow
def test_the_small_real_layer_agrees(benchmarks):
    check = benchmarks("_layer").check_layer()
    assert check.ok, str(check)
    assert check.difference.relative < 1e-2


def _measure_rank(rank, store, folder):
    """One rank of a sweep that is measured on the CPU (the clock means nothing there)."""
    import sys

    import torch
    import torch.distributed as dist

    sys.path.insert(0, str(ROOT / "benchmarks"))
    import _sweep
    import _sweep_gpu
    from _sweep_case import Stages

    from xstage_ext import SymmetricWorkspace
    from xstage_ext.workspace import region_bytes

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    config = dataclasses.replace(
        _sweep.load_configs()[4], tokens=96, hidden=128, intermediate=64, num_experts=8, topk=3
    )
    job = _sweep_gpu.Job([config], PROFILE, pathlib.Path(folder), False, 6, 2, 1e9)
    task = _sweep_gpu.task_of(config, job, predict=rank == 0)
    nbytes = region_bytes(plan.bytes() for plan in task.plans.values())
    with SymmetricWorkspace(nbytes=nbytes, device="cpu") as workspace:
        rows = _sweep_gpu.measure(task, rank, job, workspace, Stages())
    if rank == 0:
        lines = [json.dumps(row.as_dict()) for row in rows]
        (pathlib.Path(folder) / "rows.jsonl").write_text("\n".join(lines))
    dist.destroy_process_group()


@pytest.mark.slow
def test_measuring_checks_and_times_every_arm(benchmarks, tmp_path):
    import torch.multiprocessing as mp

    mp.spawn(_measure_rank, args=(str(tmp_path / "store"), str(tmp_path)), nprocs=2, join=True)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    *rows, grid = rows
    assert [row["arm"] for row in rows] == ["serial", *benchmarks("_sweep").ARMS]
    assert grid["op"] == "megamoe_plans"
    assert len({tuple(plan["plan"]) for plan in grid["plans"]}) == len(grid["plans"]) > 3
    times = {plan["name"]: plan for plan in grid["plans"]}
    for plan in grid["plans"]:
        assert plan["ok"] and plan["n"] == len(plan["samples_us"]) in (2, 6)
        assert 0 < plan["us_p10"] <= plan["us"] <= plan["us_p90"]
        assert plan["raw_us"] == pytest.approx(np.median(plan["samples_us"]), abs=0.1)
    for row in rows:
        assert row["ok"] is True
        assert "predicted" not in row
        # The floor of arithmetic is that of the product that ran in the same rounds.
        assert row["compute_floor_us"] == pytest.approx(row["flops"] / grid["matrix_tflops"] / 1e6)
        floors = (row[f"{name}_floor_us"] for name in ("compute", "link", "weights"))
        assert row["ceiling_us"] == max(floors)
        assert 0 < row["us_p10"] <= row["us_median"] <= row["us_p90"]
        assert ("predicted_us" in row) == (row["arm"] != "serial")
        if row["arm"] == "serial":
            assert row["n"] == 2
        else:
            assert row["n"] == 6
            assert row["us_median"] == pytest.approx(times[row["measured_as"]]["us"], abs=0.01)
            assert row["raw_us"] == pytest.approx(times[row["measured_as"]]["raw_us"], abs=0.01)


def _run_rank(rank, store, folder):
    """One rank of a run that is cut, goes on, and ends with its budget; on the CPU."""
    import functools
    import sys

    import torch.distributed as dist

    sys.path.insert(0, str(ROOT / "benchmarks"))
    import _sweep
    import _sweep_gpu

    from xstage_ext import SymmetricWorkspace

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    _sweep_gpu.SymmetricWorkspace = functools.partial(SymmetricWorkspace, device="cpu")
    configs = [
        dataclasses.replace(
            config, tokens=16, hidden=128, intermediate=64, num_experts=4, topk=2, seed=config.seed
        )
        for config in _sweep.load_configs()[:3]
    ]
    path = pathlib.Path(folder) / "run.jsonl"
    job = _sweep_gpu.Job(configs[:2], PROFILE, path, False, 4, 1, 1e9)
    _sweep_gpu._rank(rank, job)
    whole = path.read_text() if rank == 0 else ""
    if rank == 0:
        (path.parent / "whole.jsonl").write_text(whole)
        path.write_text(whole[: whole.index("\n") + 9])  # the second line is torn
    dist.barrier()
    for more in ({}, {"configs": configs, "budget_s": -1.0}):
        _sweep_gpu._rank(rank, dataclasses.replace(job, resume=True, **more))
        dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
def test_a_measured_run_goes_on_where_it_was_cut(benchmarks, tmp_path):
    import torch.multiprocessing as mp

    mp.spawn(_run_rank, args=(str(tmp_path / "store"), str(tmp_path)), nprocs=2, join=True)
    read, shown = benchmarks("_report").read, benchmarks("_sweep_report")
    first, second = (list(read(tmp_path / name)) for name in ("whole.jsonl", "run.jsonl"))

    def names(lines):
        return sorted((line["shape"]["seed"], line["op"], line["arm"]) for line in lines)

    assert len(first) == 14 and names(first) == names(second)
    wanted = shown.Wanted(4, PROFILE.name, 1, [first[0]["commit"]])
    # The budget had ended before the third.
    assert [wanted.are_met(one) for one in shown.by_config(second).values()] == [True] * 2


def turns(times, rounds, level):
    """Samples of plans in rounds of random order, on a machine whose state is `level(k)`."""
    random = np.random.default_rng(3)
    sequence = []
    for _ in range(rounds):
        for name in random.permutation(list(times)):
            noise = float(np.exp(1e-3 * random.standard_normal()))
            sequence.append((str(name), times[name] * level(len(sequence)) * noise))
    return sequence


def test_levels_take_out_what_neighbours_share(benchmarks):
    """A machine that wanders by 8%, as at a power limit, hides half a percent."""
    level = benchmarks("_level")
    times = {"a": 4000.0, "b": 4020.0, "c": 4400.0, "d": 4010.0, "e": 3990.0}

    def wander(k):
        return 1.0 + 0.08 * np.sin(k / 9.0) * np.sin(k / 31.0)

    sequence = turns(times, 20, wander)
    found = level.levelled(sequence)
    raw = {name: [us for one, us in sequence if one == name] for name in times}
    assert [len(found[name]) for name in times] == [20] * 5

    def spread(samples):
        """Of the plans' errors: what they have in common does not count."""
        return np.std([np.log(np.median(samples[name]) / times[name]) for name in times])

    assert spread(found) < 1e-3 and 3 * spread(found) < spread(raw)
    seen = level.levels(sequence)
    assert np.corrcoef(seen, [wander(k) for k in range(len(seen))])[0, 1] > 0.97


def test_levels_of_plans_with_few_samples_come_from_the_others(benchmarks):
    level = benchmarks("_level")
    times = {"a": 100.0, "b": 101.0, "c": 110.0, "d": 99.0, "rare": 105.0}
    sequence = turns(times, 20, lambda k: 1.2 if k < 20 else 1.0)
    few = [pair for k, pair in enumerate(sequence) if pair[0] != "rare" or k < 20]
    assert np.median(level.levelled(few)["rare"]) == pytest.approx(105.0, rel=5e-3)


def test_without_neighbours_samples_stay(benchmarks):
    level = benchmarks("_level")
    sequence = [("a", 3.0), ("b", 4.0), ("a", 5.0)]
    assert level.levelled(sequence) == {"a": [3.0, 5.0], "b": [4.0]}
    assert level.levelled([]) == {}


def test_trials_vary_what_families_leave_alone(benchmarks):
    sweep = benchmarks("_sweep")
    # Rows are pulled: a ring for pushed ones holds the whole load, whatever the family says.
    config = next(c for c in sweep.load_configs() if c.hidden > 2048 and c.tokens == 8192)
    usual = set(sweep.grid_plans(config, PROFILE).values())
    named = sweep.grid_plans(config, PROFILE, trials=True)
    trials = {name: named[name] for name in sweep.TRIALS}
    assert len(set(trials.values()) - usual) == len(sweep.TRIALS)
    # A workspace has so many channels, and every plan takes one.
    most = layout().max_channels
    for config in sweep.load_configs():
        for alone in (False, True):
            assert len(set(sweep.grid_plans(config, PROFILE, alone).values())) <= most
    fewer = trials["mixed st 32 g8, idle_sms 24"]
    assert fewer.num_sms == PROFILE.gpu.num_sms - 24
    assert named["mixed st 32 g8"].num_sms == PROFILE.gpu.num_sms
    assert trials["mixed paced 32, slice_rows 4"].slice_rows == 4


def test_the_shipped_ranking_holds_on_shapes_that_it_was_not_fitted_to(benchmarks):
    """On what is recorded: two of seven models; the issue's bounds."""
    report, plans, fit = (benchmarks(name) for name in ("_report", "_plans", "fit_planner"))
    cases = [case for case in plans.read(report.read("sweep_84.jsonl")) if case.config.held_out]
    assert len(cases) == 24
    costs = [cost for cost, *_ in fit.regrets(cases, PROFILE, fit.ranking.fitted())]
    assert np.median(costs) < 0.01
    assert max(costs) < 0.05


def test_labels_follow_the_planner(benchmarks, monkeypatch):
    sweep, label = benchmarks("_sweep"), benchmarks("_label")
    config = sweep.load_configs()[3]
    families = sweep.grid_plans(config, PROFILE)
    plans = [
        {"name": name, "plan": dataclasses.astuple(plan), "ok": True, "n": 20}
        | {"us": us, "us_p10": us - 1, "us_p90": us + 1, "halves_us": [us, us]}
        for us, (name, plan) in enumerate(families.items(), start=500)
    ]
    facts = {"shape": config.key, "gpu": "NVIDIA H200", "measured_as": "old", "world": 2}
    lines = [
        facts | {"op": "megamoe", "arm": "planner", "us_median": 1.0, "held_out": 5.0},
        facts | {"op": "megamoe", "arm": "serial", "us_median": 9000.0},
        facts | {"op": "megamoe_plans", "arm": "all", "plans": plans},
    ]
    wanted = "wave st 128"
    ranked = dict.fromkeys([wanted, *sweep.ranking.FAMILIES], 1.0)
    monkeypatch.setattr(sweep.ranking, "relative_times", lambda problem, profile: ranked)
    sweep.choose._cached.cache_clear()
    planner, serial, rest = label.relabel(lines, PROFILE)
    sweep.choose._cached.cache_clear()
    assert (serial, rest) == (lines[1], lines[2])
    assert planner["measured_as"] == wanted and planner["gpu"] == "NVIDIA H200"
    us = next(plan["us"] for plan in plans if plan["name"] == wanted)
    assert (planner["us_median"], planner["n"]) == (us, 20)
    assert planner["predicted_us"] > 0 and planner["held_out"] is False
    assert planner["labelled"] == benchmarks("_report").commit()
