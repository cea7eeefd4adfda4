"""`xstage calibrate`, `validate` and `doctor` without a GPU: synthetic machines of a known law."""

from __future__ import annotations

import itertools
import json
import math
import pathlib
from typing import Any

import numpy as np
import pytest

from xstage_ext import _scores, calibrate, machine, validate
from xstage_ext._measure import Row, label
from xstage_ext.burst import BurstLoopPlan, BurstPlan, Point, burst_plan, largest_row
from xstage_ext.errors import CalibrationError, ProfileError
from xstage_ext.planner import wire

NUM_SMS = 132
TRUTH = {"st": (372.0, 2.8e6), "bulk": (374.0, 1.3e6), "tma": (370.0, 1.2e6)}
VISIBILITY_US = 1.4
SHADOW_PASSED = 0.6e6
CROSS = {"st": None, "bulk": 6500.0, "tma": 6500.0}


def T0(nbytes: float) -> float:
    return 0.08 + nbytes / 60e3


def R(mechanism: str, K: int) -> float:
    return min(51.0 * K, TRUTH[mechanism][0])


def Q(mechanism: str, K: int) -> float:
    return TRUTH[mechanism][1] * K / NUM_SMS


def burst_row(kind: str, point: Point, both: bool = False) -> Row:
    """What a machine that obeys the law would show for one point."""
    K, V = point.producers, point.volume
    rate = R(point.mechanism, K) * (0.98 if both else 1.0)
    base = T0(point.nbytes)
    drain = V / rate / 1e3
    row = label(point, kind)
    if kind == "isolated" and not point.local:
        mean = max(base, (V - Q(point.mechanism, K)) / rate / 1e3)
        slow = max(base, (V - Q(point.mechanism, K) / 3) / rate / 1e3)
        visible = max(base, drain) + VISIBILITY_US
        row |= {"mean": mean, "slowest": slow, "median": mean, "p95": slow}
        row |= {"visible_mean": visible, "visible_slowest": visible}
        return row
    period = base + point.gap_us if point.local else max(base + point.gap_us, drain)
    T = period - point.gap_us
    row |= {"mean": T, "median": T, "R_GBps": V / period / 1e3}
    row["gap_seen_us"] = point.gap_us
    if point.gap_us == 0.0:
        row["shares"] = [0.8] * 8 + [1.0] + [1.2] * 8
        # Ahead of the drain by Q where the drain is what limits.
        ahead = Q(point.mechanism, K) if drain > base else 0.0
        times = np.geomspace(T + 1.0, 500.0, 24)
        row["accepted"] = [(float(t), round(ahead + V / period * t)) for t in times]
    return row


def machine_rows(noise: float, outliers: bool = False) -> list[Row]:
    rng = np.random.default_rng(8)
    rows = []
    for number in range(3):
        for kind, point in calibrate.fitted_points(NUM_SMS):
            rows.append(burst_row(kind, point) | {"round": number})
    for mechanism in TRUTH:
        for K in (33, NUM_SMS):
            for _ in range(6):
                rows.append(burst_row("both", Point(mechanism, K, 65536), both=True))
    for probe in ("load", "atomic", "bulk_load", "tma_load"):
        for delay in calibrate.SHADOW_DELAYS_US:
            rows.append(shadow_row(Point("st", 0, 4096), probe, delay))
            cases = itertools.product(TRUTH, (33, NUM_SMS), calibrate.SHADOW_BYTES)
            rows += [shadow_row(Point(*case), probe, delay) for case in cases]
    for row in rows:
        for key in ("mean", "median", "slowest", "visible_mean", "visible_slowest", "R_GBps"):
            if key in row:
                row[key] *= 1 + noise * rng.standard_normal()
    if outliers:
        for index in rng.choice(len(rows), 12, replace=False):
            for key in ("mean", "median", "visible_slowest"):
                if key in rows[index]:
                    rows[index][key] *= 10
    rng.shuffle(rows)
    return rows


def shadow_row(point: Point, probe: str, delay: float) -> Row:
    latency = 0.3
    if point.producers:
        rate = R(point.mechanism, point.producers) * 1e3
        passed = SHADOW_PASSED * point.producers / NUM_SMS
        wait = max(0.0, (point.volume - passed) / rate - delay)
        cross = CROSS[point.mechanism]
        if cross is not None:
            ceiling = point.producers * cross / rate
            wait = ceiling * math.tanh(wait / ceiling)
        latency += wait
    return label(point, "shadow") | {"probe": probe, "delay_us": delay, "median": latency}


RATES = {
    "matrix_bf16_tflops": 745.0,
    "hbm_GBps": 4055.0,
    "pull_GBps": 371.0,
    "copy_engine_GBps": 385.0,
}


def environment() -> dict[str, Any]:
    return {
        "gpu": {
            "name": "NVIDIA H200",
            "capability": "9.0",
            "num_sms": NUM_SMS,
            "sm_clock_mhz": 1980.0,
            "power_limit_w": 700.0,
            "l2_bytes": 62914560,
            "smem_bytes": 232448,
            "link": "NV18",
            "link_nominal_GBps": 478.1,
            "driver": "580",
        },
        "world": 2,
        "command": "xstage calibrate",
        "date": "2026-01-01T00:00:00+00:00",
    }


@pytest.fixture(scope="module", params=[False, True], ids=["noise", "noise and outliers"])
def calibration(request: pytest.FixtureRequest) -> calibrate.Calibration:
    return calibrate.fit(machine_rows(0.03, request.param), RATES, environment(), "synthetic")


def test_parameters_within_five_percent(calibration: calibrate.Calibration) -> None:
    for name in TRUTH:
        found = calibration.profile.mechanism(name)
        for K in (66, NUM_SMS):
            assert float(found.R_GBps(K)) == pytest.approx(R(name, K), rel=0.05)
        # Too few producers to fill the link: only the slope of a few us tells, 3% of noise each.
        for K in (1, 8):
            assert float(found.R_GBps(K)) == pytest.approx(R(name, K), rel=0.15)
        # Q is a small difference of large volumes: noise of 3% in time is noise in V, not in Q.
        for K in (66, NUM_SMS):
            assert abs(float(found.Q_bytes(K)) - Q(name, K)) < 0.03 * K * 65536
        for nbytes in (2048, 32768, 131072):
            assert float(found.T0_us(NUM_SMS, nbytes)) == pytest.approx(T0(nbytes), rel=0.05)
        assert found.R_both_GBps is not None
        assert float(found.R_both_GBps(NUM_SMS)) == pytest.approx(0.98 * R(name, 132), rel=0.05)


def test_shares_of_the_producers(calibration: calibrate.Calibration) -> None:
    for name in TRUTH:
        shares = calibration.profile.mechanism(name).shares
        assert shares == pytest.approx((0.8,) * 8 + (1.0,) + (1.2,) * 8)


def routes_to(calibration: calibrate.Calibration, quantity: str) -> dict[str, float]:
    """Values by route."""
    found = [f.estimate for f in calibration.findings if f.quantity == quantity]
    assert all(e.low <= e.value <= e.high for e in found), quantity
    return {e.route: e.value for e in found}


def test_every_parameter_has_an_interval_and_a_second_route(
    calibration: calibrate.Calibration,
) -> None:
    for name in TRUTH:
        intervals = calibration.profile.mechanism(name).intervals
        assert intervals["R_GBps@132"].low <= R(name, 132) * 1.02
        assert intervals["R_GBps@132"].high >= R(name, 132) * 0.98
        for K in calibrate.producers_for(NUM_SMS):
            assert len(routes_to(calibration, f"{name}/R_GBps@{K}")) == 2
        for K in (33, 66, NUM_SMS):
            assert len(routes_to(calibration, f"{name}/Q_bytes@{K}")) == 2


def test_second_routes_find_the_truth() -> None:
    calibration = calibrate.fit(machine_rows(0.0), RATES, environment(), "synthetic")
    for name in TRUTH:
        for K in (1, 2, 4, 8):
            routes = routes_to(calibration, f"{name}/R_GBps@{K}")
            assert routes["throughput of bursts of 4 MiB"] == pytest.approx(R(name, K), rel=0.01)
        for K in (33, 66, NUM_SMS):
            routes = routes_to(calibration, f"{name}/Q_bytes@{K}")
            lead = routes["lead of a saturated train over the drain"]
            assert lead == pytest.approx(Q(name, K), rel=0.02)


def test_every_issue_time_has_a_second_route_that_agrees(
    calibration: calibrate.Calibration,
) -> None:
    """In step where the burst fits into the pipe, on local memory for 1, 33 and 132 producers."""
    fits = 0
    for name in TRUTH:
        table = calibration.profile.mechanism(name).T0_us
        assert table.producers == tuple(map(float, calibrate.producers_for(NUM_SMS)))
        for K, B in itertools.product(map(int, table.producers), map(int, table.nbytes)):
            routes = routes_to(calibration, f"{name}/T0_us@{K},{B}")
            assert ("local memory" in routes) == (K in (1, 33, NUM_SMS))
            stalls = (K * B - Q(name, K)) / R(name, K) / 1e3 > T0(B)
            assert not (stalls and "in step, empty pipe" in routes), (K, B)
            fits += "in step, empty pipe" in routes
            for value in routes.values():
                assert value == pytest.approx(T0(B), rel=0.08)
    assert fits > 60


def test_shadow_is_recovered(calibration: calibrate.Calibration) -> None:
    assert max(calibration.shadow_errors.values()) < 0.2
    assert calibration.profile.shadow["st/load"].cross_bytes is None
    assert calibration.profile.shadow["bulk/load"].cross_bytes == pytest.approx(6500, rel=0.1)


def test_files_round_trip_and_refit(
    calibration: calibrate.Calibration, tmp_path: pathlib.Path
) -> None:
    written = calibration.save(tmp_path / "synthetic.json")
    assert [path.suffix for path in written] == [".json", ".json", ".md"] + [".png"] * 4
    assert all(path.stat().st_size > 1000 for path in written)
    loaded = machine.load(tmp_path / "synthetic.json")
    assert loaded == calibration.profile
    assert loaded.provenance == "measured"
    again = calibrate.refit(tmp_path / "synthetic.calibration.json", tmp_path / "synthetic.json")
    assert again.profile == calibration.profile


def test_a_profile_of_another_gpu_is_refused(calibration: calibrate.Calibration) -> None:
    with pytest.raises(ProfileError, match="describes NVIDIA H200, this GPU is NVIDIA H100"):
        calibration.profile.require("NVIDIA H100 80GB HBM3")


def test_a_query_far_outside_is_flagged(calibration: calibrate.Calibration) -> None:
    st = calibration.profile.mechanism("st")
    assert st.extrapolates(66, 32768) == []
    assert st.extrapolates(66, 100 * 131072) == [
        "1.31072e+07 bytes per burst; measured from 1024 to 131072"
    ]
    assert st.extrapolates(1000, 128) == [
        "1000 producers; measured from 1 to 132",
        "128 bytes per burst; measured from 1024 to 131072",
    ]


def test_a_file_of_something_else_is_refused(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"rows": []}')
    with pytest.raises(CalibrationError, match="calibration.json file of `xstage calibrate`"):
        calibrate.refit(path, tmp_path / "y.json")
    path.write_text("no JSON")
    with pytest.raises(CalibrationError, match="got something else"):
        calibrate.refit(path, tmp_path / "y.json")


def test_too_few_rows_are_refused() -> None:
    rows = [row for row in machine_rows(0.0) if row["kind"] != "plateau" or row["B"] == 1024]
    with pytest.raises(CalibrationError, match="3 or more sizes"):
        calibrate.fit(rows, RATES, environment(), "synthetic")


def test_nothing_held_out_was_fitted(calibration: calibrate.Calibration) -> None:
    fitted = {
        (kind, p.mechanism, p.producers, p.nbytes, p.gap_us)
        for kind, p in calibrate.fitted_points(NUM_SMS)
    }
    held = validate.held_out_points(calibration.profile)
    assert len(held) > 500
    assert {h.family for h in held} == set(validate.FAMILIES)
    for h in held:
        kind = "isolated" if h.family == "aligned" else "train"
        p = h.point
        assert (kind, p.mechanism, p.producers, p.nbytes, p.gap_us) not in fitted


def test_held_out_points_are_always_the_same(calibration: calibrate.Calibration) -> None:
    first, second = (validate.held_out_points(calibration.profile) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert (a.family, a.point.nbytes, a.point.gap_us) == (
            b.family,
            b.point.nbytes,
            b.point.gap_us,
        )
        if a.point.gaps_us is not None:
            assert np.array_equal(a.point.gaps_us, b.point.gaps_us)


def test_every_plan_is_accepted_by_the_binary(calibration: calibrate.Calibration) -> None:
    wire.verify("burst", BurstPlan)
    wire.verify("burst_loop", BurstLoopPlan)
    points = [point for _, point in calibrate.fitted_points(NUM_SMS)]
    points += [held.point for held in validate.held_out_points(calibration.profile)]
    for point in points:
        plan = burst_plan(point, 0, 2, 1980.0)
        assert plan.bytes % plan.chunk_bytes == 0
        assert plan.chunk_bytes & (plan.chunk_bytes - 1) == 0
        if point.mechanism == "tma":
            rows = plan.bytes // plan.chunk_bytes
            assert rows % min(64, rows) == 0
        wire.pack("burst", plan)


def test_destinations_of_a_plan() -> None:
    assert burst_plan(Point("st", 4, 1024), 1, 2, 1980.0).destinations == 1
    assert burst_plan(Point("st", 4, 1024, local=True), 1, 2, 1980.0).destinations == 2
    several = Point("st", 4, 1024, destinations=(0, 2, 3))
    assert burst_plan(several, 1, 4, 1980.0).destinations == 0b1101
    assert largest_row(24576, 4096) == 4096
    assert largest_row(4096 + 256, 4096) == 256


def test_law_in_step_and_free_running(calibration: calibrate.Calibration) -> None:
    bench = validate.BenchGap(0.3, 0.1)
    point = Point("st", NUM_SMS, 49152, gap_us=60.0)
    free = validate.predict(calibration.profile, validate.Held("train", point), bench)["predicted"]
    step = validate.predict(calibration.profile, validate.Held("aligned", point), bench)[
        "predicted"
    ]
    assert free["ours"] == pytest.approx(T0(49152), rel=0.1)
    assert step["ours"] == pytest.approx((NUM_SMS * 49152 - 2.8e6) / 372e3, rel=0.1)
    assert free["three_term"] == pytest.approx(step["ours"], rel=1e-9)
    assert step["completion_coupled"] > step["ours"] > step["unbounded_async"]


def test_gaps_of_the_bench() -> None:
    bench = validate.BenchGap(0.5, 0.1)
    assert bench.mean(0.0) == 0.5
    assert bench.mean(5.0) == pytest.approx(5.1)
    assert bench.mean(np.array([[0.0, 10.0]])) == pytest.approx((0.5 + 10.1) / 2)


def held_rows() -> list[Row]:
    rows = []
    for index, family in enumerate(("train", "train", "aligned", "both")):
        measured = {"mean": 1.0 + index, "R_GBps": 371.0}
        rows.append(
            {
                "family": family,
                "mechanism": "st",
                "K": NUM_SMS,
                "B": 32768,
                "gap_us": 2.0,
                "T0_us": 0.5,
                "V_over_R_us": 11.6,
                "predicted": {law: 1.0 + index + (law != "ours") for law in validate.LAWS},
                "measured": measured,
            }
        )
    return rows


def test_scores(calibration: calibrate.Calibration, tmp_path: pathlib.Path) -> None:
    shadows = [
        {
            "mechanism": "st", "probe": "load", "K": 132, "B": 24576, "delay_us": 1.5,
            "base_us": 0.2, "predicted_us": 5.5, "measured_us": 5.0,
        }
    ]  # fmt: skip
    scores = _scores.score(held_rows(), shadows, calibration.profile)
    assert scores["all"]["ours"]["mae_us"] == 0.0
    assert scores["all"]["two_term"]["bias_us"] == 1.0
    assert scores["all"]["ours"]["onset_right"] == 1.0
    assert scores["rate"]["points"] == 3
    assert scores["shadow_all"]["median"] == pytest.approx(0.1)
    report = _scores.markdown(scores, calibration.profile, validate.FAMILIES)
    assert "| MAE of the mean issue time | 0.5 us | 0.00 us |" in report
    _scores.picture(held_rows(), calibration.profile, tmp_path / "scores.png")
    assert (tmp_path / "scores.png").stat().st_size > 1000
    json.dumps(scores)


def test_onset_is_scored_as_a_classifier() -> None:
    predicted = np.array([1.0, 0.1, 1.0, 0.1])
    measured = np.array([1.0, 1.0, 0.1, 0.1])
    s = _scores.law_scores(predicted, measured, np.full(4, 0.1))
    assert (s["onset_right"], s["onset_precision"], s["onset_recall"]) == (0.5, 0.5, 0.5)
