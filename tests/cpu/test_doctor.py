"""`xstage doctor` without a GPU: what it says about machines that differ from their profile."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch

from xstage_ext import _gpu_facts, _session, doctor, machine
from xstage_ext.errors import CalibrationError

PROFILE = pathlib.Path(__file__).parent / "data" / "h200x2_probe.json"


@pytest.fixture(scope="module")
def profile() -> machine.MachineProfile:
    return machine.load(PROFILE)


def facts(**changes: Any) -> _gpu_facts.GpuFacts:
    values: dict[str, Any] = {
        "name": "NVIDIA H200", "uuid": "GPU-1234567890", "driver": "580", "sm_clock_mhz": 1980.0,
        "sm_clock_max_mhz": 1980.0, "power_limit_w": 700.0, "utilization_percent": 0.0,
        "memory_used_mib": 500.0, "links_GBps": (26.562,) * 18, "others": (),
    }  # fmt: skip
    return _gpu_facts.GpuFacts(**(values | changes))


def verdicts(checks: list[doctor.Check]) -> set[str]:
    return {check.verdict for check in checks}


def test_doctor_is_content_with_a_healthy_machine(profile: machine.MachineProfile) -> None:
    assert verdicts(doctor.check_facts([facts(), facts()], profile)) == {"ok"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"links_GBps": (26.562,) * 10}, "10 links are up, profile says NV18"),
        ({"links_GBps": ()}, "no active NVLink"),
        ({"power_limit_w": 400.0}, "limited to 400 W"),
        ({"others": (4711,)}, "used by other processes: 4711"),
        ({"utilization_percent": 98.0}, "98% busy"),
        ({"name": "NVIDIA H100"}, "this GPU is NVIDIA H100"),
    ],
)
def test_doctor_says_what_is_off(
    profile: machine.MachineProfile, changes: dict[str, Any], words: str
) -> None:
    checks = doctor.check_facts([facts(**changes)], profile)
    assert any(words in check.text and check.verdict != "ok" for check in checks), checks


def test_doctor_finds_a_slow_link(profile: machine.MachineProfile) -> None:
    seen = {
        "clock_mhz": 1980.0, "T0_local_us": 0.6, "T0_local_expected_us": 0.6,
        "matrix_tflops": 740.0, "visible_us": 1.4, "visible_expected_us": 1.4,
        "rates": [{"st": 371.0, "bulk": 372.0, "both": 366.0},
                  {"st": 210.0, "bulk": 212.0, "both": 205.0}],
    }  # fmt: skip
    checks = doctor.check_measured(seen, profile)
    wrong = {check.what for check in checks if check.verdict == "wrong"}
    assert wrong == {
        "rank 1 to the next, st", "rank 1 to the next, bulk", "rank 1, all ranks sending",
    }  # fmt: skip
    text = next(check.text for check in checks if check.what == "rank 1 to the next, st")
    assert text.startswith("210 GB/s, profile 37")
    assert "below what it should be" in text


def test_doctor_compares_both_ways() -> None:
    assert doctor.compare("x", 99.0, 100.0, "u", "h").verdict == "ok"
    assert doctor.compare("x", 90.0, 100.0, "u", "h").verdict == "warning"
    assert doctor.compare("x", 60.0, 100.0, "u", "h").verdict == "wrong"
    assert doctor.compare("x", 60.0, 100.0, "u", "h", more_is_better=False).verdict == "ok"
    assert doctor.compare("x", 130.0, 100.0, "u", "h", more_is_better=False).verdict == "wrong"


def test_links_are_parsed() -> None:
    text = "GPU 0: NVIDIA H200 (UUID: GPU-1)\n\t Link 0: 26.562 GB/s\n\t Link 1: <inactive>\n"
    assert _gpu_facts.parse_links(text) == (26.562,)


def test_commands_that_measure_say_what_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(CalibrationError, match="no CUDA device"):
        _session.on_all_gpus(print)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(CalibrationError, match="at least 2 GPUs .* got 1"):
        _session.on_all_gpus(print)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there a rank would not fail")
def test_a_rank_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(CalibrationError, match=r"rank [01] failed: .*(CUDA|cuda)"):
        _session.on_all_gpus(print)


def test_doctor_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    checks = doctor.run()
    assert [check.verdict for check in checks] == ["wrong"]
    assert "no CUDA device" in checks[0].text
    assert not doctor.report(checks)


def test_doctor_looks_at_the_profile_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (check,) = doctor.run("nope")
    assert (check.what, check.verdict) == ("profile", "wrong") and "got nope" in check.text
