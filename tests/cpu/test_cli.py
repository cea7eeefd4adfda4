"""The `xstage` command: what it prints is what the library says, and errors are one line."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import xstage_ext
from xstage_ext import _plan_report, cli, machine
from xstage_ext.errors import CalibrationError
from xstage_ext.model import BurstGap
from xstage_ext.planner import measured
from xstage_ext.planner.choose import choose
from xstage_ext.planner.problem import MoEProblem

MOE = ["2048x768x32x4", "--tokens", "2048", "--world", "2"]
PROBE = str(pathlib.Path(__file__).parent / "data" / "h200x2_probe.json")
PROFILE = machine.load(PROBE)


@pytest.fixture(autouse=True)
def probe_profile(monkeypatch):
    """What is asserted below must not change with the next calibration."""
    monkeypatch.setenv("XSTAGE_PROFILE", PROBE)


def run(*arguments):
    result = CliRunner().invoke(cli.app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.stdout


def test_plan_moe_in_all_forms(tmp_path):
    picture = tmp_path / "plan.png"
    text = run("plan", "moe", *MOE, "--picture", str(picture))
    report = json.loads(run("plan", "moe", *MOE, "--json"))
    decision = choose(
        MoEProblem(world=2, num_experts=32, topk=4, hidden=2048, intermediate=768, max_tokens=2048),
        PROFILE,
    )
    assert report["decision"]["action"] == decision.action
    assert report["decision"]["plan"]["lead_blocks"] == decision.plan.lead_blocks
    family, _ = decision.expected[0]
    assert report["predicted"]["total_us"] == pytest.approx(report["alternatives"][family])
    assert decision.reason in text
    assert f"({PROFILE.provenance})" in text
    assert picture.stat().st_size > 10_000


def test_plan_report_states_the_law():
    problem = MoEProblem(
        world=2, num_experts=32, topk=4, hidden=2048, intermediate=768, max_tokens=2048
    )
    report = _plan_report.plan_report(problem, PROFILE, schedule=0, store=0)
    plan = report.decision.plan
    gaps = _plan_report.gaps_us(plan, PROFILE)
    assert gaps["interleaved"] > 2 * gaps["wave"]
    for burst in report.bursts:
        law = BurstGap.of(
            PROFILE.mechanism(burst.mechanism),
            plan.num_sms,
            2 * plan.block_m * plan.block_n,
            remote_share=0.5,
            both_directions=True,
        )
        assert burst.gap_us == gaps[burst.order]
        assert burst.T_iss_us == pytest.approx(float(law.steady(burst.gap_us)))
        assert burst.completion_coupled_us >= burst.T_iss_us


def test_plans_for_larger_worlds_say_what_was_not_measured():
    words = f"profile {PROFILE.name} knows bursts between 2 GPUs"
    for command in (
        ["plan", "moe", "2048x768x32x4", "--tokens", "2048"],
        ["plan", "attention", "40", "--head-dim", "128", "--sequence", "8192"],
    ):
        assert words in run(*command, "--world", "8")
        assert words in json.loads(run(*command, "--world", "8", "--json"))["not_measured"]
        assert "Not measured" not in run(*command, "--world", "2")
        assert json.loads(run(*command, "--world", "2", "--json"))["not_measured"] is None


def test_plan_report_without_a_profile(tmp_path):
    problem = MoEProblem(
        world=2, num_experts=8, topk=2, hidden=256, intermediate=128, max_tokens=64
    )
    report = xstage_ext.plan_report(problem, store=0)
    assert report.decision.profile == PROFILE.name
    assert json.loads(json.dumps(report.as_dict()))["decision"]["plan"]["store"] == 0
    report.picture(tmp_path / "a" / "p.png")
    assert (tmp_path / "a" / "p.png").stat().st_size > 10_000


def test_plan_report_compares_ranking_and_simulator():
    problem = MoEProblem(
        world=2, num_experts=32, topk=4, hidden=2048, intermediate=768, max_tokens=2048
    )
    report = _plan_report.plan_report(problem, PROFILE)
    assert f"* {report.decision.family} " in report.text()
    times = dict(report.alternatives)
    rest = max(times, key=times.get)
    for fastest in (report.decision.family, rest):
        altered = dict.fromkeys(times, 300.0) | {fastest: 270.0}
        altered = dataclasses.replace(report, alternatives=tuple(altered.items()))
        if fastest == report.decision.family:
            assert altered.second_opinion() == "The simulator would choose alike."
        else:
            assert f"would take {fastest}, 10.0% less" in altered.second_opinion()
            assert altered.second_opinion() in altered.text()


def test_plan_report_credits_the_table_that_decided(tmp_path, monkeypatch):
    problem = MoEProblem(
        world=2, num_experts=32, topk=4, hidden=2048, intermediate=768, max_tokens=2048
    )
    assert "a ranking fitted to measurements" in _plan_report.plan_report(problem, PROFILE).text()
    times = {"wave st 64": 2.0, "wave st 128": 1.0}
    table = tmp_path / "plans.json"
    measured.add(table, measured.entry(problem, PROFILE.gpu.name, times, "by hand"))
    monkeypatch.setenv("XSTAGE_PLANS", str(table))
    report = _plan_report.plan_report(problem, PROFILE)
    altered = dataclasses.replace(report, alternatives=(("wave st 128", 9.0), ("wave st 64", 8.0)))
    assert "in the table of XSTAGE_PLANS: by hand" in report.text()
    assert "The table decides" in altered.second_opinion()
    assert "ranking" not in report.text() and report.as_dict()["timed"] == "by hand"


def test_plan_report_names_what_it_cannot_take():
    with pytest.raises(TypeError, match="expected a MoEProblem or an AttentionProblem, got str"):
        xstage_ext.plan_report("attention")
    problem = MoEProblem(world=1, num_experts=4, topk=2, hidden=64, intermediate=64, max_tokens=8)
    with pytest.raises(TypeError, match="profile: expected a MachineProfile, got str"):
        xstage_ext.plan_report(problem, "h100")


def strict(text):
    """Parsed JSON, without the numbers that only Python takes."""

    def refuse(name):
        raise ValueError(name)

    return json.loads(text, parse_constant=refuse)


def test_plan_attention(tmp_path):
    shape = ["16/4", "--head-dim", "128", "--sequence", "4096", "--world", "2"]
    picture = tmp_path / "new" / "plan.png"
    text = run("plan", "attention", *shape, "--picture", str(picture))
    assert "Predicted us" in text and "regime" in text and "makespan" in text
    assert picture.stat().st_size > 10_000
    report = strict(run("plan", "attention", *shape, "--json"))
    assert {burst["regime"] for burst in report["bursts"]} <= {"free", "drain", "capacity"}
    decision = json.loads(run("plan", "attention", *shape, "--json"))
    assert decision["action"] in ("piggyback", "serial")
    assert decision["predicted_us"]["fused"] > decision["predicted_us"]["attention"]


def test_plans_of_attention_say_where_no_kernel_would_run():
    shape = ["plan", "attention", "8", "--sequence", "100000", "--head-dim"]
    assert strict(run(*shape, "128", "--json"))["no_kernel"] is None
    told = "No kernel for head size 96 (compiled: 64 and 128)"
    assert strict(run(*shape, "96", "--json"))["no_kernel"] == told
    assert run(*shape, "96").startswith(f"{told}: torch and NCCL run.")


def test_the_parts_of_a_prediction_add_up():
    line = next(line for line in run("plan", "moe", *MOE).splitlines() if "Predicted" in line)
    total, told = re.match(r"Predicted (\d+) us .*?: (.*); egress", line).groups()
    parts = dict(part.rsplit(" ", 1) for part in told.split(", "))
    assert {"arithmetic", "combine", "other"} <= parts.keys()
    assert sum(map(int, parts.values())) == int(total)


def test_explain_prints_the_law():
    values = json.loads(run("explain", "--producers", "132", "--bytes", "16384", "--json"))
    law = BurstGap.of(PROFILE.mechanism("st"), 132, 16384)
    assert values["T_iss_us"] == pytest.approx(float(law.steady(10.0)))
    assert values["regime"] == "free"
    assert "capacity-bound" in run("explain", "--bytes", "65536", "--gap", "40")
    assert "drain-bound" in run("explain", "--bytes", "32768", "--gap", "2")


def test_explain_writes_json_that_every_parser_takes():
    # One burst overfills the pipe: no gap recovers.
    assert strict(run("explain", "--json"))["recovery_gap_us"] is None
    free = strict(run("explain", "--bytes", "1024", "--gap", "99", "--json"))
    assert free["bursts_until_onset"] is None and free["recovery_gap_us"] >= 0.0


@pytest.mark.parametrize(
    "command",
    [["plan", "moe", *MOE], ["plan", "attention", "8", "--head-dim", "64", "--sequence", "64"]],
)
def test_unwritable_pictures_are_refused_before_the_work(command, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(cli, "plan_report", lambda *args: pytest.fail("it planned first"))
    (tmp_path / "file").touch()
    (tmp_path / "folder.png").mkdir()
    for path in (tmp_path / "file" / "p.png", tmp_path / "folder.png"):
        result = CliRunner().invoke(cli.app, [*command, "--picture", str(path)])
        assert result.exit_code == 2 and "--picture" in result.output, result.output
    assert [path.name for path in tmp_path.iterdir()] == ["file", "folder.png"]


def test_simulate_lists_every_schedule_and_store():
    rows = json.loads(run("simulate", *MOE, "--routing", "zipf:0.8", "--json"))["predicted"]
    assert {(row["schedule"], row["store"]) for row in rows} == {
        (a, b) for a in ("wave", "interleaved") for b in ("st", "bulk", "paced")
    }
    assert all(row["total_us"] > row["math_us"] > 0 for row in rows)


def test_simulate_fits_into_eighty_columns(monkeypatch):
    monkeypatch.setattr(cli, "console", Console(width=80))
    text = run("simulate", "4096x1536x128x8", "--tokens", "8192")
    assert text.count("interleaved") == 3 and "…" not in text
    assert f"profile {PROFILE.name} knows bursts between 2" in text


@pytest.mark.parametrize("command", ["plan moe", "simulate"])
def test_a_token_goes_to_different_experts(command):
    bad = [*command.split(), "2048x768x4x8", "--tokens", "64", "--world", "2"]
    result = CliRunner().invoke(cli.app, bad)
    assert (
        str(result.exception) == "xstage.MoEProblem: topk: expected at most num_experts (4), got 8"
    )


def test_what_one_rank_cannot_hold_says_how_to_start_more(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for command in ("tune", "trace"):
        result = CliRunner().invoke(cli.app, [command, "512x64x256x8", "--tokens", "64"])
        start = f"torchrun --nproc-per-node N -m xstage_ext {command} 512x64x256x8 --tokens 64"
        assert str(result.exception).endswith(f"got 256 on one rank; for N ranks: {start}")


def test_the_package_is_the_command_and_has_a_version():
    command = [sys.executable, "-m", "xstage_ext", "--version"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout == f"{xstage_ext.__version__}\n"


def test_info_names_versions_and_profiles():
    facts = json.loads(run("info", "--json"))
    assert facts["profiles"]["h200x2"] == machine.load("h200x2").provenance
    assert facts["kernels"]


def test_errors_are_one_line():
    bad = ["2048x768x33x4", "--tokens", "64", "--world", "2"]
    command = [sys.executable, "-m", "xstage_ext.cli", "plan", "moe", *bad]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr.startswith("error: xstage.MoEProblem: num_experts: expected a multiple")
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("error", "told"),
    [(MemoryError(), "error: out of memory"), (CalibrationError("busy"), "error: busy")],
)
def test_what_ends_a_command_is_one_line(error, told, monkeypatch, capsys):
    def fail():
        raise error

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(SystemExit):
        cli.main()
    assert capsys.readouterr().err.strip() == told
    error = RuntimeError("a bug")
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main()


def test_missing_libraries_are_one_line(tmp_path):
    for run in (["-m", "xstage_ext"], ["-m", "xstage_ext.cli"], ["-mxstage_ext"]):
        done = subprocess.run(
            [sys.executable, "-u", *run, "info"],
            env=os.environ | {"XSTAGE_LIB_DIR": str(tmp_path)},
            capture_output=True,
            text=True,
        )
        told = f"error: {tmp_path}/_C.abi3.so is missing; XSTAGE_LIB_DIR names that folder: "
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith(told) and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["simulate", *MOE, "--routing", "zipf:x"], "expected a number of 0 or more behind zipf:"),
        (
            ["simulate", *MOE, "--routing", "zipf:nan"],
            "expected a number of 0 or more behind zipf:",
        ),
        (["simulate", *MOE, "--routing", "zipf:-3"], "expected a number of 0 or more behind zipf:"),
        (["simulate", *MOE, "--routing", "even"], "routing: expected one of"),
        (["simulate", *MOE, "--routing", "balanced:3"], "nothing behind balanced, got balanced:3"),
        (["simulate", *MOE, "--routing", "dirichlet:0"], "a number above 0 behind dirichlet:"),
        (["plan", "moe", *MOE, "--picture", "plan.xyz"], "a file name that ends in .png"),
        (["plan", "attention", "40/8/2", "--head-dim", "64", "--sequence", "64"], "got 40/8/2"),
        (["bench"], "got none"),
        (["simulate", *MOE, "--seed", "-1"], "--seed"),
        (["plan", "attention", "8", "--head-dim", "0", "--sequence", "64"], "--head-dim"),
        (["explain", "--producers", "0"], "--producers"),
        (["explain", "--bytes", "0"], "--bytes"),
        (["explain", "--remote-share", "3"], "--remote-share"),
        (["explain", "--gap", "-1"], "--gap"),
        (["explain", "--gap", "inf"], "'--gap': expected a finite number, got inf"),
        (["explain", "--gap", "nan"], "--gap"),
        (["explain", "--remote-share", "nan"], "--remote-share"),
        (["explain", "--bytes", str(10**400)], "--bytes"),
        (["plan", "attention", "8", "--head-dim", "64", "--sequence", str(10**400)], "--sequence"),
    ],
)
def test_wrong_arguments_are_named(arguments, expected, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 2
    assert expected in result.output and isinstance(result.exception, SystemExit)


def test_calibrations_that_do_not_exist_are_named(tmp_path):
    path = tmp_path / "nosuch.json"
    result = CliRunner().invoke(cli.app, ["calibrate", "--refit", str(path)])
    assert isinstance(result.exception, CalibrationError)
    assert str(result.exception).startswith(f"{path}: expected a .calibration.json file")
    assert "No such file" in str(result.exception)


@pytest.mark.parametrize("name", ["bench_handshake", "bench_a2a"])
def test_bench_of_ranks_says_how_to_start(name, monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    result = CliRunner().invoke(cli.app, ["bench", name])
    assert f"torchrun --nproc-per-node 2 benchmarks/{name}.py" in str(result.exception)


@pytest.mark.skipif(torch.cuda.is_available(), reason="here it would measure")
@pytest.mark.parametrize(
    "name", ["bench_attention", "bench_megamoe", "bench_burst", "trace_megamoe"]
)
def test_bench_of_gpus_says_that_there_is_none(name, monkeypatch):
    result = CliRunner().invoke(cli.app, ["bench", name])
    assert str(result.exception) == f"{name} measures GPUs, and none is visible here"


def test_bench_of_text_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "all_minilm_l6_v2", None)
    result = CliRunner().invoke(cli.app, ["bench", "text_routing"])
    told = "text_routing needs all_minilm_l6_v2: pip install -e .[text-routing]"
    assert str(result.exception) == told


def test_fits_name_the_fields_there_are():
    result = CliRunner().invoke(cli.app, ["bench", "fit_simulator", "--fit", "nope"])
    assert result.exit_code == 2 and "invalid choice: 'nope' (choose from" in result.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="here they would measure")
@pytest.mark.parametrize("command", ["validate", "calibrate"])
def test_without_a_gpu_nothing_is_left_behind(command, tmp_path):
    result = CliRunner().invoke(cli.app, [command, "--out", str(tmp_path / "new" / "p.json")])
    assert str(result.exception).startswith(f"xstage {command}: needs a GPU; ")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "command", [["validate"], ["calibrate"], ["tune", *MOE[:3]], ["trace", *MOE[:3]]]
)
def test_unwritable_places_are_refused_by_option(command, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    (tmp_path / "file").touch()
    result = CliRunner().invoke(cli.app, [*command, "--out", str(tmp_path / "file" / "new" / "x")])
    assert result.exit_code == 2 and "'--out'" in result.output, result.output


def test_bench_refuses_unknown_names():
    result = CliRunner().invoke(cli.app, ["bench", "nothing"])
    assert result.exit_code == 2
    assert "sweep_84" in result.output


def test_doctor_says_what_is_missing():
    if torch.cuda.is_available():
        pytest.skip("this machine has GPUs; tests/gpu runs the doctor there")
    result = CliRunner().invoke(cli.app, ["doctor"])
    assert result.exit_code == 1
    assert "torch sees no CUDA device" in result.output
