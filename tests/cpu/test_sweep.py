"""The sweep: its configurations, bounds and report; one small real layer end to end."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib

import numpy as np
import pytest

from xstage_ext import machine
from xstage_ext._faults import layout
from xstage_ext.testing import Routing

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROFILE = machine.load("h200x2")


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
    # Combine crosses the link, and dispatch: a row per choice, or per token and set of experts.
    remote = config.tokens * config.topk * config.remote_share
    pulled, pushed = (
        dataclasses.replace(sweep.plan_of(config, "planner", PROFILE), dispatch=dispatch)
        for dispatch in (0, 1)
    )
    assert load.egress_bytes(pulled) == pytest.approx(2 * remote * 2 * config.hidden, rel=0.1)
    told = config.problem.egress_bytes("push")
    assert load.egress_bytes(pushed) == load.least_bytes == pytest.approx(told, rel=0.1)
    once = load.egress_bytes(dataclasses.replace(pushed, token_sets=1)) - load.result_bytes
    assert once <= 2 * config.hidden * config.tokens


def with_rates(tflops, memory_GBps, link_GBps):
    """The profile with round numbers; one direction alone is twice as fast."""
    bulk = PROFILE.mechanism("bulk")
    one, both = (type(bulk.R_GBps)((132.0,), (rate,)) for rate in (2 * link_GBps, link_GBps))
    return dataclasses.replace(
        PROFILE,
        rates=dataclasses.replace(
            PROFILE.rates, matrix_tflops={"bf16": tflops}, hbm_GBps=memory_GBps
        ),
        mechanisms={"bulk": dataclasses.replace(bulk, R_GBps=one, R_both_GBps=both)},
    )


def test_floors_by_hand(benchmarks):
    """Three tokens, two ranks with three experts each, every row counted by hand."""
    sweep, sweep_84 = benchmarks("_sweep"), benchmarks("sweep_84")
    config = dataclasses.replace(
        sweep.load_configs()[0],
        **{"tokens": 3, "topk": 2, "hidden": 256, "intermediate": 128, "num_experts": 6},
        **{"ranks": 4, "experts": 8},
    )
    ids = np.array([[[0, 3], [0, 4], [3, 2]], [[0, 3], [0, 2], [0, 5]]])
    load = sweep.load_of(config, Routing(ids, np.full(ids.shape, 0.5), 7 / 12, 2.5, 7 / 6))
    # Rank 0 has 3 rows of its own and 4 of rank 1's, by experts 0 and 2; rank 1 has 5.
    assert load.rank == 0 and load.counts.tolist() == [[2, 0, 1], [3, 0, 1]]
    facts = sweep_84.config_facts(config, load, with_rates(500.0, 4000.0, 400.0))
    # Three matrices of 256 x 128, two operations or two bytes each.
    assert facts["flops"] == 7 * 3 * 2 * 256 * 128
    assert facts["compute_floor_us"] == pytest.approx(7 * 196608 / 500e6)
    assert facts["weights_floor_us"] == pytest.approx(2 * 196608 / 4000e3)
    # Out go results of 4 rows and 3 tokens that rank 1 pulls, 512 bytes each, both ways at once. No
    # token is wanted twice by one of the three sets, which hold an expert each.
    assert load.token_sets == 3 and load.row_bytes == 3 * 512
    assert facts["least_bytes"] == 7 * 512
    assert facts["link_floor_us"] == pytest.approx(7 * 512 / 400e3)
    assert sweep.sent_tokens(np.array([[0, 3], [4, 5], [3, 3]]), 0, 3, 3) == 4
    assert sweep.sent_tokens(np.array([[0, 3], [4, 5], [3, 3]]), 0, 3, 1) == 3
    assert (facts["ceiling_us"], facts["ceiling_by"]) == (facts["weights_floor_us"], "weights")
    for rates, by in (((5.0, 4000.0, 400.0), "compute"), ((500.0, 4000.0, 4.0), "link")):
        other = sweep_84.config_facts(config, load, with_rates(*rates))
        floor = 7 * 196608 / 5e6 if by == "compute" else 7 * 512 / 4e3
        assert other["ceiling_us"] == pytest.approx(floor) and other["ceiling_by"] == by
    # What a dense product reached beside the measurements goes before the profile's rate.
    beside = sweep.ceiling_of(load, PROFILE, 250.0)
    assert beside.compute_us == pytest.approx(7 * 196608 / 250e6)
    # The real layer: two of eight experts on four ranks, a token once to each other rank that has
    # one of them, all results back.
    visits = [len({e // 2 for e in two} - {0}) for two in itertools.combinations(range(8), 2)]
    rows = 3 * (np.mean(visits) + 2 * 3 / 4)
    assert facts["real_link_floor_us"] == pytest.approx(rows * 512 / 400e3)


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
    result = benchmarks("_sweep_report").summarise(times, ["x", "y"], "a", "b")
    assert result.mean == pytest.approx(1.0)
    assert (result.best, result.worst) == ((2.0, "x"), (0.5, "y"))
    assert result.regressions == ((0.5, "y"),)
    assert np.isnan(sweep.geometric_mean([]))


def test_every_layer_timed_alone_counts(benchmarks):
    """Whether its other arms were timed alone too or not."""
    report = benchmarks("_sweep_report")
    configs = benchmarks("_sweep").load_configs()[:3]
    times = [
        {"wave/st": 110.0, "planner": 100.0, "interleaved": 105.0},
        {"wave/st": 90.0, "planner": 100.0},
        {"wave/st": 90.0},
    ]
    shown = [
        (
            config,
            report.Found(
                {arm: {"alone_us": us} for arm, us in arms.items()}
                | {"planner": {"alone_us": arms.get("planner")}}
            ),
        )
        for config, arms in zip(configs, times, strict=True)
    ]
    head, *slower = report._alone(shown)
    assert "(2 of 3 configurations)" in head and f"mean {(1.1 * 0.9) ** 0.5:.3f}x" in head
    assert slower == [f"    alone 0.900x {configs[1].name}"]


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
    assert len({tuple(plan["plan"].values()) for plan in grid["plans"]}) == len(grid["plans"]) > 3
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

    assert len(first) == 16 and names(first) == names(second)
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
    config = next(c for c in sweep.load_configs() if c.tokens == 8192)
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


def test_labels_follow_the_planner(benchmarks, monkeypatch):
    sweep, label = benchmarks("_sweep"), benchmarks("_label")
    config = sweep.load_configs()[3]
    families = sweep.grid_plans(config, PROFILE)
    plans = [
        {"name": name, "plan": dataclasses.asdict(plan), "ok": True, "n": 20}
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
    monkeypatch.setattr(sweep.ranking, "relative_times", lambda *_: ranked)
    sweep.choose._cached.cache_clear()
    planner, serial, rest = label.relabel(lines, PROFILE)
    sweep.choose._cached.cache_clear()
    assert (serial, rest) == (lines[1], lines[2])
    assert planner["measured_as"] == wanted and planner["gpu"] == "NVIDIA H200"
    us = next(plan["us"] for plan in plans if plan["name"] == wanted)
    assert (planner["us_median"], planner["n"]) == (us, 20)
    assert planner["predicted_us"] > 0 and planner["held_out"] is False
    assert planner["labelled"] == benchmarks("_report").commit()
