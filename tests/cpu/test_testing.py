"""The shared helpers of tests and benchmarks: timing, comparison, routing laws, result lines."""

from __future__ import annotations

import importlib
import json
import pathlib
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xstage_ext import testing

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture
def report(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("_report")


def test_arms_are_interleaved_and_ranked():
    order = []

    def arm(name, seconds):
        return lambda: (order.append(name), time.sleep(seconds))

    times = testing.time_arms({"a": arm("a", 0.004), "b": arm("b", 0.0)}, pairs=6, warmup=1)
    assert order == ["a", "b", *"abba", *"baab", *"abba"]
    assert times["a"].n == 6
    assert times["a"].us_median > 3500 > times["b"].us_median
    assert times["a"].us_p10 <= times["a"].us_median <= times["a"].us_p90


def test_every_arm_takes_every_place():
    order = []
    arms = {name: lambda name=name: order.append(name) for name in "abc"}
    testing.time_arms(arms, pairs=6, warmup=0)
    for place in range(3):
        assert sorted(order[place::3]) == list("aabbcc")


def test_ratios_are_of_the_same_round():
    drift = np.linspace(1.0, 2.0, 20)
    slow, fast = testing.Timing.of(103.0 * drift), testing.Timing.of(100.0 * drift)
    ratio = slow.over(fast)
    assert ratio.median == pytest.approx(1.03)
    assert ratio.low == pytest.approx(1.03) == ratio.high
    noisy = testing.Timing.of(100.0 * drift * np.where(np.arange(20) % 2, 0.9, 1.1))
    assert noisy.over(fast).low == pytest.approx(0.9)
    assert noisy.over(fast).high == pytest.approx(1.1)


def test_compare_counts_nan_and_wrong_elements():
    wanted = torch.arange(6.0).reshape(2, 3)
    assert testing.compare(wanted, wanted, 0.0, 0.0).ok
    bad = wanted.clone()
    bad[1, 2] = float("nan")
    bad[1, 0] += 1
    difference = testing.compare(bad, wanted, 1e-3, 1e-3)
    assert (difference.ok, difference.wrong, difference.first_wrong) == (False, 2, (1, 0))
    assert "WRONG: 2 elements" in str(difference)
    with pytest.raises(ValueError, match="expected shape"):
        testing.compare(wanted, wanted[0], 0.0, 0.0)


@given(
    world=st.integers(1, 8),
    tokens=st.integers(0, 40),
    local=st.integers(1, 12),
    topk=st.integers(1, 8),
    law=st.sampled_from(["balanced", "zipf", "dirichlet"]),
    seed=st.integers(0, 9),
)
@settings(max_examples=60, deadline=None)
def test_routing_is_valid(world, tokens, local, topk, law, seed):
    experts = world * local
    topk = min(topk, experts)
    routing = testing.make_routing(world, tokens, experts, topk, law=law, seed=seed)
    assert routing.topk_idx.shape == (world, tokens, topk)
    assert ((routing.topk_idx >= 0) & (routing.topk_idx < experts)).all()
    assert all(len(set(row)) == topk for row in routing.topk_idx.reshape(-1, topk).tolist())
    np.testing.assert_allclose(routing.topk_weights.sum(-1), 1.0, rtol=1e-5)
    assert routing.counts(experts).sum() == routing.topk_idx.size
    again = testing.make_routing(world, tokens, experts, topk, law=law, seed=seed)
    np.testing.assert_array_equal(routing.topk_idx, again.topk_idx)


@pytest.mark.parametrize("share", [0.0, 0.5, 0.875])
@pytest.mark.parametrize("law", ["balanced", "zipf"])
def test_routing_keeps_the_remote_share(share, law):
    routing = testing.make_routing(2, 4000, 64, 4, law=law, remote_share=share, seed=1)
    assert routing.remote_share == pytest.approx(share, abs=0.06)
    assert routing.rank_max_over_mean < 1.05
    if law == "zipf":
        assert routing.load_max_over_mean > 1.8
    else:
        assert routing.load_max_over_mean < 1.2


def test_result_lines_carry_the_facts(report, tmp_path):
    writer = report.ResultWriter(tmp_path / "x.jsonl")
    writer.write(report.Row("op", "arm", {"tokens": 3}, 2, 10.0, 9.0, 11.0, 20, ok=True))
    writer.write(report.Row.predicted("op", "arm", {"tokens": 3}, 2, 10.0, extra={"stall_us": 1.0}))
    with writer.path.open("a") as file:
        file.write('{"torn": ')
    measured, predicted = report.read(writer.path)
    order = "op arm shape world us_median us_p10 us_p90 n tflops egress_GBps ok"
    assert " ".join(list(measured)[:11]) == order
    assert {"gpu", "driver", "torch", "clock_mhz", "date", "commit", "command"} <= set(measured)
    assert (predicted["predicted"], predicted["n"], predicted["stall_us"]) == (True, 0, 1.0)
    assert json.dumps(measured)
    report.ResultWriter(writer.path, append=True)
    assert len(list(report.read(writer.path))) == 2
    again = report.ResultWriter(writer.path)  # a run that measures nothing loses nothing
    assert len(list(report.read(writer.path))) == 2
    again.write(report.Row("other", "arm", {}, 2, 5.0, 5.0, 5.0, 1))
    assert [line["op"] for line in report.read(writer.path)] == ["op", "op", "other"]
    again = report.ResultWriter(writer.path)
    again.write(report.Row("op", "arm", {}, 2, 7.0, 7.0, 7.0, 1))
    assert [line["us_median"] for line in report.read(writer.path)] == [5.0, 7.0]
    assert "predicted" in report.line(report.Row.predicted("op", "arm", {}, 2, 1.0))
