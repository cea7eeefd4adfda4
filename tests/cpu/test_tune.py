"""Plans timed on this machine: the table, what the planner makes of it, and `xstage tune`."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import types
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import xstage_ext
from xstage_ext import MegaMoE, _tune_moe, cli, machine
from xstage_ext._trace_moe import MoETensors
from xstage_ext.errors import PlanError
from xstage_ext.planner import measured, ranking
from xstage_ext.planner.choose import choose
from xstage_ext.planner.problem import MoEProblem

PROFILE = machine.load("h200x2")
GPU = PROFILE.gpu.name
LAYER = MoEProblem(
    world=2, num_experts=32, topk=4, hidden=2048, intermediate=768, max_tokens=4096, tokens=2048
)


def slowest_first() -> dict[str, float]:
    """The ranking's order upside down."""
    names = list(ranking.relative_times(LAYER, PROFILE, "pull"))
    return {name: 100.0 + us for us, name in enumerate(reversed(names))}


@pytest.fixture
def table(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    path = tmp_path / "folder" / "plans.json"
    measured.add(path, measured.entry(LAYER, GPU, slowest_first(), "made up"))
    monkeypatch.setenv("XSTAGE_PLANS", str(path))
    return path


def test_the_planner_follows_the_table(table: pathlib.Path) -> None:
    wanted = next(iter(slowest_first()))
    decision = choose(LAYER, PROFILE)
    assert decision.family == wanted
    assert dict(decision.expected)[wanted] == 1.0
    assert "by measurements of this one" in decision.reason
    other = dataclasses.replace(LAYER, hidden=4096)
    assert choose(other, PROFILE).family == next(
        iter(ranking.relative_times(other, PROFILE, "pull"))
    )


def test_a_changed_table_counts_at_once(table: pathlib.Path) -> None:
    for wanted in ("wave st 64", "mixed st 32 g8"):
        times = dict.fromkeys(ranking.FAMILIES, 7.0) | {wanted: 6.0}
        measured.add(table, measured.entry(LAYER, GPU, times))
        assert choose(LAYER, PROFILE).family == wanted
    assert len(measured.load(table)) == 1


def test_overrides_go_before_the_table(table: pathlib.Path) -> None:
    for schedule in (0, 1):
        plan = choose(LAYER, PROFILE, schedule=schedule, num_sms=64).plan
        assert (plan.schedule, plan.num_sms) == (schedule, 64)


def test_times_count_for_plans_that_move_tokens_alike(table: pathlib.Path) -> None:
    """Of several entries the nearest that does; where none does, the ranking decides."""
    wanted, ranked = next(iter(slowest_first())), ranking.relative_times(LAYER, PROFILE, "push")
    other = choose(LAYER, PROFILE, dispatch=1)
    assert (dict(other.expected), other.timed, other.covered) == (ranked, None, False)
    assert "measurements" not in other.reason
    pulled = choose(LAYER, PROFILE, dispatch=0)
    assert (pulled.family, pulled.timed, pulled.covered) == (wanted, "made up", True)
    times = dict.fromkeys(ranking.FAMILIES, 7.0) | {"wave paced 64": 6.0}
    more = dataclasses.replace(LAYER, tokens=2500)
    measured.add(table, measured.entry(more, GPU, times, "pushed", "push"))
    pushed = choose(LAYER, PROFILE, dispatch=1)
    assert (pushed.family, pushed.timed, pushed.covered) == ("wave paced 64", "pushed", True)
    assert "by measurements of this one" in pushed.reason and pushed.plan.dispatch == 1
    assert choose(more, PROFILE).timed == "made up"
    report = xstage_ext.plan_report(LAYER, PROFILE, dispatch=1)
    assert report.timed == "pushed" and report.as_dict()["timed"] == "pushed"
    assert "XSTAGE_PLANS: pushed), and" in report.text()


@given(st.integers(1, 1 << 20), st.lists(st.integers(1, 1 << 20), min_size=1, max_size=5))
def test_the_nearest_number_of_tokens_counts(tokens: int, timed: list[int]) -> None:
    problem = dataclasses.replace(LAYER, max_tokens=1 << 20, tokens=tokens)
    entries = [
        measured.entry(dataclasses.replace(problem, tokens=one), GPU, {"wave st 64": 1.0})
        for one in timed
    ]
    found = next(iter(measured.near(entries, problem, GPU)), None)
    ratios = [max(one / tokens, tokens / one) for one in timed]
    if found is None:
        assert min(ratios) > measured.NEAR * 0.999
    else:
        ratio = max(found.tokens / tokens, tokens / found.tokens)
        assert ratio == pytest.approx(min(ratios)) and ratio <= measured.NEAR * 1.001
    assert measured.near(entries, problem, "another GPU") == ()


def test_files_come_back_as_written(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "plans.json"
    entries = [
        measured.entry(dataclasses.replace(LAYER, tokens=tokens), GPU, slowest_first(), "x", how)
        for tokens, how in ((10, "pull"), (1000, "push"))
    ]
    measured.save(path, entries)
    assert measured.load(path) == tuple(entries)
    assert [one.name for one in tmp_path.iterdir()] == ["plans.json"]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("no JSON", "expected a file of `xstage tune`, got other"),
        ("[" * 100_000, "expected a file of `xstage tune`, got other"),
        ("[]", "expected an object, got"),
        ('{"plans": [{"gpu": "x"}]}', "plans.0.: expected field world, .*; write it anew"),
        (None, "No such file"),
    ],
)
def test_other_files_are_refused(
    content: str | None, expected: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plans.json"
    if content is not None:
        path.write_text(content)
    monkeypatch.setenv("XSTAGE_PLANS", str(path))
    with pytest.raises(PlanError, match=expected):
        choose(LAYER, PROFILE)


def alter(table: pathlib.Path, **fields: Any) -> None:
    """Overwrites fields of the table's only entry."""
    data = json.loads(table.read_text())
    data["plans"][0] |= fields
    table.write_text(json.dumps(data))


@pytest.mark.parametrize(
    "us", ["10.0", math.inf, math.nan, True, None, -1.0, 0, 10**400], ids=lambda us: str(us)[:5]
)
def test_times_are_positive_numbers(table: pathlib.Path, us: Any) -> None:
    alter(table, us={"wave st 64": 5.0, "wave st 128": us})
    with pytest.raises(PlanError, match="table of plans"):
        choose(LAYER, PROFILE)


@pytest.mark.parametrize(
    "field",
    [{"tokens": 64.9}, {"tokens": 0}, {"us": {}}, {"wrold": 2}, {"dispatch": "throw"}],
)
def test_entries_are_read_strictly(table: pathlib.Path, field: dict[str, Any]) -> None:
    alter(table, **field)
    with pytest.raises(PlanError, match="table of plans"):
        choose(LAYER, PROFILE)


def test_entries_without_a_dispatch_were_pulled(table: pathlib.Path) -> None:
    data = json.loads(table.read_text())
    assert data["plans"][0].pop("dispatch") == "pull"
    table.write_text(json.dumps(data))
    assert choose(LAYER, PROFILE).timed == "made up"


def test_families_of_other_versions_are_refused(table: pathlib.Path) -> None:
    alter(table, us={"spiral": 1.0})
    with pytest.raises(PlanError, match="tune the layer again, got .*spiral"):
        choose(LAYER, PROFILE)


def test_entries_may_repeat(table: pathlib.Path) -> None:
    again = measured.entry(LAYER, GPU, {"wave st 64": 1.0})
    measured.save(table, [*measured.load(table), again])
    assert measured.near(measured.load(table), LAYER, GPU)[0] == measured.load(table)[0]


def test_remote_shares_are_told_apart(table: pathlib.Path) -> None:
    other = dataclasses.replace(LAYER, remote_share=0.0)
    assert measured.near(measured.load(table), other, GPU) == ()
    measured.add(table, measured.entry(other, GPU, {"wave st 64": 1.0}))
    assert len(measured.load(table)) == 2
    same = dataclasses.replace(LAYER, remote_share=0.5)
    assert measured.near(measured.load(table), same, GPU)[0] == measured.load(table)[0]


def test_a_proxy_of_many_ranks_finds_nothing(table: pathlib.Path) -> None:
    proxy = dataclasses.replace(LAYER, token_sets=7)
    assert measured.near(measured.load(table), proxy, GPU) == ()


def test_a_gpu_takes_its_own_entries(table: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name, count in (("NVIDIA H200", 1), ("NVIDIA H100 80GB HBM3", 0)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda name=name: name)
        assert len(measured.asked_for()) == count


def test_a_tilde_is_the_home(table: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(table.parent))
    monkeypatch.setenv("XSTAGE_PLANS", f"~/{table.name}")
    assert measured.asked_for() == measured.load(table)


def test_tuning_times_every_family_and_layers_use_it(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = MoEProblem(world=1, num_experts=4, topk=2, hidden=128, intermediate=64, max_tokens=24)
    tensors = MoETensors.random(problem, 0, "cpu")
    entry = _tune_moe.tune(problem, PROFILE, tensors, pairs=2, device="cpu")
    assert {name for name, _ in entry.us} == ranking.FAMILIES.keys()
    assert entry.us[0][1] == min(us for _, us in entry.us) > 0
    assert entry.dispatch == "pull"
    text = _tune_moe.text(problem, PROFILE, entry)
    assert all(name in text for name in ranking.FAMILIES) and text.count("\n*") == 1
    path = tmp_path / "plans.json"
    measured.add(path, dataclasses.replace(entry, gpu=machine.load_here().gpu.name))
    monkeypatch.setenv("XSTAGE_PLANS", str(path))
    layer = MegaMoE(num_experts=4, topk=2, hidden=128, intermediate=64, max_tokens=24, device="cpu")
    assert layer.decision is not None
    assert "this one" in layer.decision.reason


@pytest.mark.skipif(torch.cuda.is_available(), reason="here it would measure")
@pytest.mark.parametrize("command", ["tune", "trace"])
def test_tune_and_trace_need_a_gpu(command: str) -> None:
    result = CliRunner().invoke(cli.app, [command, "128x64x4x2", "--tokens", "16"])
    assert str(result.exception).startswith(f"xstage {command}: needs a GPU; ")


def test_tuning_notes_who_moved_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer whose tokens are pushed, by the rule; nothing runs here."""
    link = dataclasses.replace(LAYER, intermediate=64)
    assert choose(link, PROFILE).dispatch == "push"
    took = types.SimpleNamespace(us_median=5.0)
    monkeypatch.setattr(_tune_moe, "time_arms", lambda calls, pairs: dict.fromkeys(calls, took))
    monkeypatch.setattr(_tune_moe, "SymmetricWorkspace", MagicMock())
    monkeypatch.setattr(torch.ops.xstage, "megamoe", lambda *_: torch.zeros(1))
    entry = _tune_moe.tune(link, PROFILE, MagicMock())
    assert entry.dispatch == "push"
    first = next(iter(ranking.relative_times(link, PROFILE, "push")))
    assert f"* {first}" in _tune_moe.text(link, PROFILE, entry)


def tune_on_the_cpu(monkeypatch: pytest.MonkeyPatch, out: pathlib.Path, order: list[str]) -> Any:
    """`xstage tune` with measurements that are made up; notes what it does in `order`."""

    def tuned(*_: Any, **__: Any) -> measured.Entry:
        order.append("measured")
        return measured.entry(LAYER, GPU, slowest_first())

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: GPU)
    monkeypatch.setattr(MoETensors, "random", lambda *_: None)
    monkeypatch.setattr(_tune_moe, "tune", tuned)
    shape = ["2048x768x32x4", "--tokens", "2048", "--out", str(out)]
    return CliRunner().invoke(cli.app, ["tune", *shape])


def test_tune_looks_at_its_table_first(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corrupt, order = tmp_path / "plans.json", list[str]()
    corrupt.write_text("{")
    for out in (corrupt, corrupt / "below_a_file.json", tmp_path):
        result = tune_on_the_cpu(monkeypatch, out, order)
        named = result.exit_code == 2 and "'--out'" in result.output
        assert isinstance(result.exception, PlanError) or named, result.output
    assert order == [] and [one.name for one in tmp_path.iterdir()] == ["plans.json"]


def test_tune_prints_before_it_writes(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError("the disk is full")

    out, order = tmp_path / "plans.json", list[str]()
    assert tune_on_the_cpu(monkeypatch, out, order).exit_code == 0
    assert order == ["measured"] and len(measured.load(out)) == 1
    monkeypatch.setattr(measured, "add", full)
    assert "wave st 64" in tune_on_the_cpu(monkeypatch, out, order).stdout
