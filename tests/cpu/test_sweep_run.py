"""Runs of the sweep: files, parts, what is measured again, what a report says, exit status."""

from __future__ import annotations

import dataclasses
import importlib
import json
import pathlib

import pytest
from typer.testing import CliRunner

from xstage_ext import machine

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROFILE = machine.load("h200x2")


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
    one = len(benchmarks("_sweep").ARMS)
    files[0].write_text("\n".join(before[:one]) + '\n{"torn')
    result = run("--quick", "--only", "predict", "--part", "1/2", "--resume")
    assert result.exit_code == 0, result.output
    found = shown.by_config(read(files[0]))
    assert len(found) == 6
    assert all(shown.Wanted(0, PROFILE.name).are_met(one) for one in found.values())
    # Nothing was lost behind the torn line, nothing predicted twice.
    kept = files[0].read_text().splitlines()
    assert kept[:one] == before[:one] and kept[one] == '{"torn' and len(kept) == 1 + len(before)
    # Half a configuration is replaced, not added to.
    files[0].write_text("\n".join(before[: one + 2]) + "\n")
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

    assert len(lines) == 8 and met(lines)
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
    assert "wave/st over planner: geometric mean 2.000x" in text
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


def test_a_measured_run_ends_with_its_status(benchmarks, run, monkeypatch, tmp_path):
    """As on two GPUs: what is left, what was wrong, and what is only of an earlier run."""
    sweep_84, gpu, report = (benchmarks(name) for name in ("sweep_84", "_sweep_gpu", "_report"))
    monkeypatch.setattr(sweep_84.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sweep_84.torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(sweep_84.machine, "load_here", lambda name: PROFILE)
    configs = benchmarks("_sweep").load_configs()
    path = tmp_path / "sweep_84.only-0-1.jsonl"
    jobs = []

    def measures(*numbers, **more):
        """The next run measures these and no more."""
        facts = {"commit": report.commit()} | more

        def launch(job):
            jobs.append(job)
            if numbers:
                fresh = {"date": report.now()} | facts
                write(path, measured_lines(benchmarks, [configs[i] for i in numbers], **fresh))

        monkeypatch.setattr(gpu, "launch", launch)

    def status(*arguments):
        result = run("--only", "0,1", *arguments)
        return result.exit_code, result.output

    measures()
    code, output = status()
    assert code == 3 and "no complete configuration" in output
    assert "2 of 2 configurations are left: go on with --resume" in output
    measures(0)
    code, output = status()
    assert code == 3 and "1 of 2 configurations are left: go on with --resume" in output
    measures(0, 1)
    assert status()[0] == 0
    assert [config.index for config in jobs[-1].configs] == [0, 1] and jobs[-1].pairs == 20
    # Nothing is missing when the run goes on; more samples or another commit are.
    measures()
    assert status("--resume")[0] == 0
    assert "2 of 2 configurations are left" in status("--resume", "--pairs", "21", "3")[1]
    measures(0, 1, commit="other")
    assert "2 of 2 configurations are left" in status("--resume")[1]
    # A run that measured nothing does not answer for the file it found.
    measures(0, 1, date="2026-01-01T00:00:00+00:00")
    assert "2 of 2 configurations are left" in status()[1]
    measures(0, 1, ok=False)
    code, output = status()
    assert code == 1 and "WRONG results in 2 configurations: Qwen" in output


def test_a_picture_shows_every_ratio_and_ceiling(benchmarks, monkeypatch, tmp_path):
    plt = importlib.import_module("matplotlib.pyplot")
    shown = benchmarks("_sweep_report")
    configs = benchmarks("_sweep").load_configs()[:2]
    lines = measured_lines(benchmarks, configs, egress_bytes=1e6)
    for line in lines:
        if line["arm"] in shown.ARMS:
            first = line["shape"] == configs[0].key
            line |= (
                {"flops": 3e9, "ceiling_us": 40.0} if first else {"flops": 5e9, "ceiling_us": 60.0}
            )
            line["us_median"] = {"wave/st": 120.0, "planner": 80.0 if first else 150.0}.get(
                line["arm"], 100.0
            )
    write(tmp_path / "x.jsonl", lines)
    monkeypatch.setattr(plt, "close", lambda figure: None)
    text = _console_text(benchmarks, tmp_path / "x.jsonl")
    figure = plt.gcf()
    assert figure.axes[0].get_title().endswith("measured, profile h200x2 (measured)")
    marks = [
        (mark.get_marker(), *map(float, (*mark.get_xdata(), *mark.get_ydata())))
        for mark in figure.axes[0].lines
        if len(mark.get_xdata()) == 1
    ]
    assert sorted(marks) == [
        ("_", 3000.0, 3.0),
        ("_", 5000.0, 2.0),
        ("o", 3000.0, 1.5),
        ("o", 5000.0, 0.8),
    ]
    assert f"regression 0.800x {configs[1].name}: 120.0 us, 150.0 us\n" in text


def test_the_second_table_has_floors_bytes_and_spans(benchmarks, tmp_path):
    config = benchmarks("_sweep").load_configs()[0]
    floors = {"compute_floor_us": 11.1, "link_floor_us": 22.2, "weights_floor_us": 33.3}
    floors |= {"real_link_floor_us": 44.4, "egress_bytes": 55.5e6, "least_bytes": 44.1e6}
    lines = measured_lines(benchmarks, [config], **floors)
    lines[-1]["matrix_tflops"] = 666.0
    for line in lines:
        if line["arm"] == "planner":
            line["measured_as"] = "mixed st 32 g8"
    trace = {"op": "megamoe_trace", "shape": config.key, "world": 2, "n": 20, "commit": "abc"}
    for arm, spans in (("wave/st", (3.25, 9.5)), ("mixed st 32 g8", (2.0, 4.5))):
        names = ("linear2_span_us", "linear2_span_p90_us")
        lines.append(trace | {"arm": arm, "ok": None} | dict(zip(names, spans, strict=True)))
    write(tmp_path / "x.jsonl", lines)
    text = " ".join(_console_text(benchmarks, tmp_path / "x.jsonl").split())
    assert "balanced 55.5 44.1 11.1 22.2 33.3 44.4 666 100 3.2/9.5 2.0/4.5" in text


def test_parts_that_do_not_fit_are_refused(benchmarks, run, tmp_path):
    lines = measured_lines(benchmarks, benchmarks("_sweep").load_configs()[:2])
    write(tmp_path / "sweep_84.part-1-of-3.jsonl", lines[:7])

    def refused(*words):
        result = run("--part", "merge")
        output = " ".join(result.output.replace("│", " ").split())
        assert result.exit_code == 2 and all(word in output for word in words), output
        assert not (tmp_path / "sweep_84.jsonl").exists()

    refused("lacks part 2/3, 3/3")
    write(tmp_path / "sweep_84.part-2-of-3.jsonl", [])
    write(tmp_path / "sweep_84.part-3-of-3.jsonl", [x | {"profile": "other"} for x in lines[7:]])
    refused("expected parts of one profile, got h200x2, other")
    write(tmp_path / "sweep_84.part-3-of-3.jsonl", lines[7:])
    write(tmp_path / "sweep_84.part-1-of-2.jsonl", lines[:7])
    refused("expected parts of one n, got parts of 2 and 3")
    (tmp_path / "sweep_84.part-1-of-2.jsonl").unlink()
    # Measured parts count before predicted ones, on a machine without GPUs too.
    write(tmp_path / "sweep_84_predicted.part-1-of-1.jsonl", [x | {"n": 0} for x in lines])
    result = run("--part", "merge")
    assert result.exit_code == 3 and "2 configurations, measured" in result.output
    assert "82 of 84 configurations are left" in result.output


def test_arguments_that_do_not_fit_are_refused_in_a_line(run, tmp_path):
    for arguments, said in (
        (("--profile", "nosuch"), "got nosuch"),
        (("--part", "label"), "label: expected measured plans"),
        (("--part", "merge"), "merge: no parts sweep_84"),
        (("--only", "-1"), "only: expected predict or numbers of 0 to 83, got -1"),
        (("--only", "3,84"), "got 3,84"),
        (("--only", "3,,4"), "got 3,,4"),
        (("--pairs", "0", "0"), "1 or more samples and 0 or more rounds, got 0 0"),
        (("--pairs", "1", "-1"), "got 1 -1"),
        (("--budget-s", "nan"), "expected 0 seconds or more, got nan"),
    ):
        result = run(*arguments)
        output = " ".join(result.output.replace("│", " ").split())
        assert result.exit_code == 2 and said in output, (arguments, output)
        assert isinstance(result.exception, SystemExit)
    assert not list(tmp_path.iterdir())


def test_a_choice_of_configurations_replaces_no_others(benchmarks, run, monkeypatch, tmp_path):
    sweep_84 = benchmarks("sweep_84")
    assert sweep_84.file_name("a", None, None) == sweep_84.file_name("a", None, "predict")
    assert sweep_84.file_name("a", None, "3, 17") == "a.only-3-17.jsonl"
    assert sweep_84.file_name("a", "1/2", "3") == "a.part-1-of-2.only-3.jsonl"
    assert sweep_84.file_name("a", "trials", None) == "a.trials.jsonl"
    whole = tmp_path / "sweep_84_predicted.jsonl"
    whole.write_text("{}\n")
    monkeypatch.setattr(sweep_84, "_real_layer", lambda: True)
    result = run("--only", "5,3,5")
    assert result.exit_code == 0, result.output
    assert whole.read_text() == "{}\n"
    lines = list(benchmarks("_report").read(tmp_path / "sweep_84_predicted.only-5-3-5.jsonl"))
    assert [line["shape"]["seed"] - 84 for line in lines] == [5] * 6 + [3] * 6


def test_bad_parts_are_refused(benchmarks):
    sweep_84 = benchmarks("sweep_84")
    typer = importlib.import_module("typer")
    for part in ("3/2", "0/2", "half"):
        with pytest.raises(typer.BadParameter):
            sweep_84.select([], False, part)
