"""What explains a decision: the law's numbers by hand, given fields, second opinions, timelines."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import pytest

import xstage_ext
from xstage_ext import _burst_report, _plan_report, machine
from xstage_ext._burst_report import BurstReport
from xstage_ext.errors import PlanError
from xstage_ext.model import BurstGap
from xstage_ext.planner.attention import even_split
from xstage_ext.planner.attention_cost import WAYS
from xstage_ext.planner.choose import choose
from xstage_ext.simulate import TYPICAL_ERROR

PROFILE = machine.load(pathlib.Path(__file__).parent / "data" / "h200x2_probe.json")
MOE = xstage_ext.MoEProblem(
    world=2, num_experts=32, topk=4, hidden=2048, intermediate=768, max_tokens=2048
)
TINY = xstage_ext.MoEProblem(
    world=1, num_experts=8, topk=2, hidden=64, intermediate=64, max_tokens=1
)


def attention(heads=24, rows=8192, world=2):
    return xstage_ext.AttentionProblem(heads, heads, 128, even_split(rows, world))


# --- the law --------------------------------------------------------------------------------------


def test_a_burst_report_by_hand():
    """V = 4 MB drains at 400 GB/s in 10 us; 3 MB fit into the pipe; a fence takes 2 us more."""
    law = BurstGap(T0_us=1.0, R_GBps=400.0, Q_bytes=3e6, V_bytes=4e6, visibility_us=2.0)
    got = BurstReport.of("wave", "st", law, 9.5, 7.25)
    assert dataclasses.asdict(got) == {
        "order": "wave",
        "mechanism": "st",
        "regime": "capacity",
        "V_bytes": 4e6,
        "drain_us": 10.0,
        "gap_us": 9.5,
        "T0_us": 1.0,
        "Q_bytes": 3e6,
        "capacity_term_us": 2.5,
        "recovery_gap_us": None,
        "T_iss_us": 2.5,
        "free_running_us": 1.0,
        "completion_coupled_us": 12.0,
        "shadow_us": 7.25,
    }
    cells = "capacity 4.00 10.0 9.5 1.00 3.00 inf 2.50 1.00 12.0 7.2"
    assert " ".join(got.cells().split()) == cells
    assert len(_burst_report.HEAD) == len(got.cells())
    drain = BurstReport.of("wave", "st", dataclasses.replace(law, Q_bytes=1e7), 4.0, None)
    assert (drain.regime, drain.T_iss_us, drain.recovery_gap_us) == ("drain", 6.0, 9.0)
    assert drain.cells().split()[-1] == "-"


def test_bursts_of_a_layer_have_their_shadow_and_both_issue_times():
    """132 SMs of 128 x 256 tiles, half of them remote, by the formulas of docs/model.md."""
    plan = choose(MOE, PROFILE, schedule=0, store=0).plan
    for burst in _plan_report.burst_reports(plan, PROFILE, 0.5):
        mechanism = PROFILE.mechanism(burst.mechanism)
        both = mechanism.R_both_GBps or mechanism.R_GBps
        rate, volume = float(both(132)) * 1e3, 132 * 65536 / 2
        drain, full = volume / rate, (volume - float(mechanism.Q_bytes(132))) / rate
        T0 = float(mechanism.T0_us(132, 65536))
        free = max(T0, drain - burst.gap_us)
        assert burst.free_running_us == pytest.approx(free)
        assert burst.T_iss_us == pytest.approx(max(free, full))
        assert burst.T_iss_us > burst.free_running_us
        # What the profile's law of shadows leaves of the queue, with one direction busy.
        shadow = PROFILE.shadow_of(burst.mechanism, "bulk_load")
        assert shadow.base_us < burst.shadow_us < shadow.base_us + drain * 1.1
        assert burst.shadow_us > 2.0


# --- mixture of experts ---------------------------------------------------------------------------


def test_given_fields_reach_every_alternative_and_the_reason():
    report = _plan_report.plan_report(MOE, PROFILE, num_sms=32)
    times = dict(report.alternatives)
    assert times[report.decision.family] == pytest.approx(report.simulation.total_us)
    free = dict(_plan_report.plan_report(MOE, PROFILE).alternatives)
    assert all(us > 1.5 * free[name] for name, us in times.items())
    reason = report.decision.reason
    assert reason.endswith("given: num_sms") and "measure" not in reason and "%" not in reason
    assert "without what is given (num_sms)" in report.text()
    assert report.as_dict()["decision"]["given"] == ("num_sms",)
    # The ranking knows who moves tokens.
    text = _plan_report.plan_report(MOE, PROFILE, num_sms=32, dispatch=1).text()
    assert "given: dispatch, num_sms" in text and "without what is given (num_sms)" in text


def test_families_that_contradict_what_is_given_are_left_out():
    report = _plan_report.plan_report(MOE, PROFILE, schedule=0)
    assert {name.split()[0] for name, _ in report.alternatives} == {"wave"}
    # A family's plan as it is was measured, whoever asked for it.
    assert "by measurements of" in report.decision.reason
    assert report.decision.reason.endswith("given: schedule")
    with pytest.raises(PlanError, match="ring_bytes: not a field"):
        _plan_report.plan_report(MOE, PROFILE, ring_bytes=1)


def opinion(problem, less, **fields):
    report = _plan_report.plan_report(problem, PROFILE, **fields)
    rest = next(name for name, _ in report.alternatives if name != report.decision.family)
    times = dict.fromkeys(dict(report.alternatives), 300.0) | {rest: 300.0 * (1.0 - less)}
    return dataclasses.replace(report, alternatives=tuple(times.items())).second_opinion()


def test_the_second_opinion_claims_only_what_holds():
    errs = "plans differ by less than the simulator errs"
    assert errs in opinion(MOE, 0.8 * TYPICAL_ERROR)
    more = opinion(MOE, 0.29)
    assert errs not in more and "29.0% less, more than it usually errs (3%)" in more
    assert "nobody measured this one" in more
    for less in (0.01, 0.29):
        assert errs not in opinion(TINY, less)
        assert "nobody measured a layer like this one" in opinion(TINY, less)
        assert "nobody measured such plans (given: num_sms)" in opinion(MOE, less, num_sms=32)


# --- attention ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "rows", "world"), [(24, 8192, 2), (40, 75600, 8), (6, 4608, 2), (24, 300, 4)]
)
def test_attention_alternatives_agree_with_the_decision(heads, rows, world):
    report = xstage_ext.plan_report(attention(heads, rows, world), PROFILE)
    decided = report.decision.predicted_us
    times = {way.name: way.us for way in report.ways}
    assert tuple(times) == WAYS and report.chosen in WAYS
    assert (times["serial"], times["fence"]) == (decided["serial"], decided["coupled"])
    fused = report.chosen if report.decision.action == "piggyback" else "whole tiles"
    assert times[fused] == decided["fused"]
    for name, us in times.items():
        spans = [span for span in report.timeline(name) if span.kind != "shadow"]
        assert max(span.begin_us + span.us for span in spans) == pytest.approx(us)
        computed = [span for span in spans if span.kind == "compute"]
        assert len(computed) == report.tiles.per_sm
    serial = [span.kind for span in report.timeline("serial")]
    assert serial[-2:] == ["drain", "signal"] and "store" not in serial


def test_attention_bursts_are_the_laws():
    report = xstage_ext.plan_report(attention(), PROFILE)
    whole, slices, fence, serial = report.bursts
    law = BurstGap.of(PROFILE.mechanism("tma"), 132, 32768, remote_share=0.5, both_directions=True)
    assert whole.V_bytes == 132 * 32768 / 2 and whole.gap_us == report.tiles.us
    assert whole.T_iss_us == pytest.approx(float(law.steady(report.tiles.us)))
    assert slices.V_bytes == whole.V_bytes / 4
    assert whole.shadow_us > slices.shadow_us > 0.0
    assert (fence.shadow_us, serial.shadow_us) == (None, None)
    assert (serial.regime, serial.V_bytes) == ("drain", report.problem.egress_bytes)
    adds = {way.name: way.shadow_adds_us for way in report.ways}
    covered = 2 * report.tiles.step_us
    waits = (report.tiles.per_sm - 1) * (whole.shadow_us - covered)
    assert adds["whole tiles"] == pytest.approx(waits) and waits > 0.0


def test_attention_report_in_all_forms(tmp_path):
    report = xstage_ext.plan_report(attention(), PROFILE)
    text = report.text()
    assert report.decision.reason in text and f"* {report.chosen} " in text
    for word in ("regime", "V/R", "G ", "T0", "Q MB", "shadow", "in step", "makespan"):
        assert word in text
    data = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert data["alternatives"][data["chosen"]] == data["predicted_us"]["fused"]
    assert [burst["order"] for burst in data["bursts"]] == list(WAYS)
    assert data["problem"]["dtype"] == "bfloat16"
    report.picture(tmp_path / "a" / "p.png")
    assert (tmp_path / "a" / "p.png").stat().st_size > 10_000


def test_attention_of_one_rank_has_no_alternatives(tmp_path):
    report = xstage_ext.plan_report(attention(world=1), PROFILE)
    assert report.ways == () and report.chosen is None
    assert "All-to-All of its own" not in report.text() and "serial" not in report.text()
    assert {span.kind for span in report.timeline("attention")} == {"compute"}
    report.picture(tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 5_000


def test_attention_says_when_the_law_would_choose_otherwise():
    long = xstage_ext.plan_report(attention(40, 75600, 8), PROFILE)
    assert long.chosen == "whole tiles" and "The law would take slices" in long.second_opinion()
    assert "The law would choose alike." in xstage_ext.plan_report(attention(), PROFILE).text()
    given = xstage_ext.plan_report(attention(), PROFILE, slice_bytes=0, slice_steps=0)
    assert given.second_opinion().endswith("less; given: slice_bytes, slice_steps.")
    with pytest.raises(PlanError, match="expected fields of block_m, .*, got 'speed'"):
        xstage_ext.plan_report(attention(), PROFILE, speed=3)
