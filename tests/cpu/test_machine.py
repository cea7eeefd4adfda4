"""Machine profiles: strict reading, exact round trip, and refusal of another GPU's numbers."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from xstage_ext import machine
from xstage_ext.errors import ProfileError
from xstage_ext.model import drain_GBps


@pytest.mark.parametrize("name", machine.bundled())
def test_bundled_profiles_round_trip_and_say_where_they_come_from(name):
    profile = machine.load(name)
    assert machine.from_json(profile.to_json()) == profile
    assert profile.name == name
    assert len(profile.source) > 40
    assert {"st", "bulk"} <= set(profile.mechanisms)
    for mechanism in profile.mechanisms.values():
        rate = mechanism.R_GBps([1, 8, 132, 1000])
        assert (np.diff(rate) >= 0).all()
        assert rate[-1] <= profile.gpu.link_nominal_GBps


def test_few_producers_keep_their_rate_when_both_directions_are_busy():
    mechanism = machine.load("h200x2").mechanism("st")
    both = mechanism.R_both_GBps
    few = drain_GBps(mechanism, [1, 2, 4], both_directions=True)
    assert few.tolist() == mechanism.R_GBps([1, 2, 4]).tolist()
    rates = drain_GBps(mechanism, np.arange(1, 200), both_directions=True)
    assert (rates[: int(both.producers[0])] <= both.values[0]).all()
    assert rates[131] == both.values[-1] == rates[-1]
    assert drain_GBps(mechanism, 132).tolist() == mechanism.R_GBps(132).tolist()


def test_save_and_load_from_a_path(tmp_path):
    path = tmp_path / "mine.json"
    machine.load("h200x2").save(path)
    assert machine.load(path) == machine.load("h200x2")


def test_a_file_that_changes_is_read_and_checked_again(tmp_path):
    path = tmp_path / "mine.json"
    machine.load("h200x2").save(path)
    first = machine.load(path)
    assert machine.load(path) is first
    dataclasses.replace(first, source="another run").save(path)
    assert machine.load(path).source == "another run"
    path.write_text("{")
    with pytest.raises(ProfileError, match="mine.json: not JSON"):
        machine.load(path)
    path.unlink()
    with pytest.raises(ProfileError, match="expected a JSON file"):
        machine.load(path)


def test_environment_variable_chooses(tmp_path, monkeypatch):
    path = tmp_path / "mine.json"
    machine.load("h100").save(path)
    monkeypatch.setenv("XSTAGE_PROFILE", str(path))
    assert machine.load().gpu.name == "NVIDIA H100"
    with pytest.raises(ProfileError, match="describes NVIDIA H100, this GPU is NVIDIA H200"):
        machine.load(gpu_name="NVIDIA H200")


def test_finds_the_profile_of_a_gpu():
    assert machine.load(gpu_name="NVIDIA H200").name == "h200x2"
    assert machine.load(gpu_name="NVIDIA H100 80GB HBM3").name == "h100"
    for other in ("NVIDIA H200 NVL", "NVIDIA A100-SXM4-80GB", "NVIDIA H100 PCIe"):
        with pytest.raises(ProfileError, match="none bundled"):
            machine.load(gpu_name=other)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 99}, "schema: expected 1, got 99"),
        ({"world": "two"}, "world: expected an integer, got 'two'"),
        ({"provenance": "guess"}, "provenance: expected one of provisional, measured, default"),
        ({"extra": 1}, "expected fields schema, name"),
        ({"mechanisms": {}}, "mechanisms: expected at least one"),
        ({"gpu": {}}, "gpu: expected field name, got 'nothing'"),
    ],
)
def test_refuses_by_name(change, message):
    data = json.loads(machine.load("h200x2").to_json()) | change
    with pytest.raises(ProfileError, match=message):
        machine.from_json(json.dumps(data))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("rates hbm_GBps", -1.0, r"rates: hbm_GBps: expected a number of 1 to 1e\+06 GB/s, got -1"),
        ("rates hbm_GBps", 1e308, r"hbm_GBps: expected a number of 1 to 1e\+06 GB/s, got 1e\+308"),
        ("rates pull_GBps", 0, r"rates: pull_GBps: expected a number of 1 to 1e\+06 GB/s, got 0"),
        ("rates launch_us", -100.0, "launch_us: expected a number of 0 to 10000 us, got -100"),
        ("rates flag_us", 1e12, "rates: flag_us: expected a number of 0 to 10000 us, got 10000000"),
        ("rates l2_GBps", 10**400, "l2_GBps: expected a finite number, got 1000"),
        (
            "rates matrix_tflops bf16",
            0.0,
            r"bf16: expected a number of 10 to 1e\+06 TFLOP/s, got 0",
        ),
        ("rates matrix_tflops", {"fp8": 11.0}, "matrix_tflops: expected a bf16 rate, got fp8"),
        ("gpu num_sms", 0, "gpu: num_sms: expected a number of 2 to 1024 SMs, got 0"),
        ("gpu num_sms", 10**9, "gpu: num_sms: expected a number of 2 to 1024 SMs, got 10000000"),
        ("gpu l2_bytes", 10**400, "l2_bytes: expected an integer, got 1000"),
        ("gpu l2_bytes", 10**13, r"l2_bytes: expected a number of 0 to 1e\+12 bytes, got 1000000"),
        ("world", 0, "world: expected a number of 1 to 1024 GPUs, got 0"),
        ("mechanisms st visibility_us", -1.0, "visibility_us: expected a number of 0 to 10000 us"),
        ("mechanisms st Q_bytes values", [1, -5, 1], r"Q_bytes: values\[1\]: expected .* got -5"),
        (
            "mechanisms st T0_us us",
            [[1e9]],
            r"us\[0\]\[0\]: expected a number of 0 to 10000 us, got 1",
        ),
        (
            "mechanisms st T0_us producers",
            [1e9],
            r"producers\[0\]: expected .* 0 to 1024 producers",
        ),
        ("mechanisms st R_both_GBps values", [0.0, 9.0], r"R_both_GBps: expected rates of 1 to 1e"),
        ("mechanisms st R_GBps values", [1e7] * 7, r"R_GBps: expected rates of 1 to 1e\+06 GB/s"),
        ("shadow st/load base_us", 1e300, "st/load: base_us: expected a number of 0 to 10000 us"),
        ("shadow st/load cross_bytes", -1.0, "st/load: cross_bytes: expected a number of 0"),
    ],
)
def test_refuses_numbers_out_of_range_by_name(path, value, message):
    data = json.loads(machine.load("h200x2").to_json())
    *parents, last = path.split()
    place = data
    for name in parents:
        place = place[name]
    place[last] = value
    with pytest.raises(ProfileError, match=message):
        machine.from_json(json.dumps(data))


def test_profiles_are_equal_and_found_by_content():
    one, other = (machine.from_json(machine.load("h200x2").to_json()) for _ in range(2))
    assert one is not other and one == other and hash(one) == hash(other)
    slower = dataclasses.replace(one, rates=dataclasses.replace(one.rates, hbm_GBps=1.0))
    assert slower != one


def test_refuses_text_and_missing_files():
    for text in ("{", "[" * 100_000, '{"schema": ' + "1" * 5000 + "}"):
        with pytest.raises(ProfileError, match="not JSON"):
            machine.from_json(text)
    with pytest.raises(ProfileError, match="expected a JSON file or one of"):
        machine.load("nowhere")
    with pytest.raises(ProfileError, match="mechanism: expected one of"):
        machine.load("h200x2").mechanism("pigeon")
    with pytest.raises(ProfileError, match="shadow: expected one of"):
        machine.load("h200x2").shadow_of("st", "prayer")


def test_curves_interpolate_and_extrapolate_as_stated():
    curve = machine.ProducerCurve((4.0, 8.0), (200.0, 300.0))
    np.testing.assert_allclose(curve([2, 4, 6, 8, 99]), [100, 200, 250, 300, 300])
    table = machine.IssueTable((1.0, 100.0), (1e3, 2e3), ((1.0, 2.0), (3.0, 4.0)))
    np.testing.assert_allclose(table(1, [500, 1e3, 1500, 2e3, 4e3]), [1, 1, 1.5, 2, 4])
    np.testing.assert_allclose(table([1, 50.5, 100, 200], 1e3), [1, 2, 3, 3])
    with pytest.raises(ProfileError, match="increasing"):
        machine.ProducerCurve((8.0, 4.0), (1.0, 2.0))
