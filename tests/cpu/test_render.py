"""Tables in pages come from benchmarks/results/, and pages are up to date."""

from __future__ import annotations

import importlib
import json
import pathlib
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXHIBITS = ROOT / "docs" / "evidence"
PAGES = ["README.md", *(str(p.relative_to(ROOT)) for p in ROOT.glob("docs/*.md"))]
PAGES += [str(p.relative_to(ROOT)) for p in ROOT.glob("csrc/*/README.md")]


@pytest.fixture
def render(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("render_readme")


@pytest.fixture
def results(render, monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.import_module("_report"), "RESULTS", tmp_path)
    return tmp_path


FACTS = {
    "gpu": "NVIDIA H200",
    "driver": "580",
    "torch": "2.11.0",
    "date": "2026-11-29T22:00:00+00:00",
    "command": "python benchmarks/x.py",
}


def lines_of_sweep(render, model, tokens, us, n):
    shape = {"model": model, "tokens": tokens}
    return [
        {"op": "megamoe", "arm": arm, "shape": shape, "world": 2, "n": n, "us_median": time}
        | {"ceiling_us": us[-1] / 2, "profile": "p", "provenance": "measured", "ok": True}
        | FACTS
        for arm, time in zip([*render._sweep.ARMS, "serial"], us, strict=False)
    ]


def test_sweep_table(render, results):
    rows = lines_of_sweep(render, "m", 1024, [100, 90, 95, 80, 80, 50, 300], 20)
    rows += lines_of_sweep(render, "m", 4096, [400, 400, 400, 400, 320, 200, 900], 20)
    (results / "sweep_84.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    text = render.render("a\n<!-- results: sweep -->\nold\n<!-- /results -->\nb\n")
    assert "old" not in text
    assert text.startswith("a\n<!-- results: sweep -->\n")
    assert text.endswith("<!-- /results -->\nb\n")
    assert "| m | 2 | 200 | 190 |" in text
    assert "| 1.054x | 1.250x | 1.25x | 1.25x | 2.000x |" in text
    assert "2 x NVIDIA H200, driver 580; torch 2.11.0, 2026-11-29" in text
    assert render.render(text) == text


def test_wrong_results_enter_no_mean(render, results):
    right = lines_of_sweep(render, "m", 1024, [100, 90, 95, 80, 80, 50, 300], 20)
    wrong = lines_of_sweep(render, "m", 4096, [1, 1, 1, 1, 1, 1, 1], 20)
    for name in ("planner", "serial"):
        lines = [line | {"ok": line["arm"] != name} for line in wrong]
        for rows, cells in (
            (
                [*right, *lines],
                "| 100 | 90 | 95 | 80 | 80 | 50 | 300 | 1.111x | 1.250x | 1.25x | 1.25x | 2.000x |",
            ),
            (lines, "|" + " - |" * 12),
        ):
            (results / "sweep_84.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
            text = render.sweep()
            assert text.count(cells) == 2 and text.count("1 WRONG") == 2, text


def test_levelled_times_stand_beside_those_of_the_clock(render, results):
    rows = lines_of_sweep(render, "m", 1024, [100, 90, 95, 80, 80, 50, 300], 20)
    for row in rows:
        row["raw_us"] = {"wave/st": 110.0, "planner": 100.0}.get(row["arm"])
    (results / "sweep_84.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    text = render.sweep()
    assert "by samples as they were, wave/st over planner is 1.100x." in text
    assert "| 1.250x |" in text


def test_predictions_are_no_results(render, results):
    rows = lines_of_sweep(render, "m", 1024, [100, 90, 95, 80, 80], 0)
    (results / "sweep_84.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    assert render.TABLES["sweep"]().startswith("No results yet")


def test_origin_names_every_commit(render):
    line = FACTS | {"world": 2, "commit": "aaa"}
    text = render.origin([line])
    assert text == (
        "2 x NVIDIA H200, driver 580; torch 2.11.0, 2026-11-29, commit aaa, "
        "`python benchmarks/x.py`."
    )
    later = line | {"commit": "bbb+", "date": "2026-12-01T01:00:00+00:00", "command": "y"}
    text = render.origin([line, later, line])
    assert "2026-11-29 to 2026-12-01, commits aaa, bbb+ (+: with uncommitted changes)" in text
    assert text.endswith("`python benchmarks/x.py`, `y`.")
    text = render.origin([line, line | {"labelled": "ccc"}])
    assert "commit aaa, `python benchmarks/x.py`. Which measured plan" in text
    assert "follow commit ccc (`sweep_84.py --part label`)." in text


def test_tables_by_arm(render, results):
    shape = {"direction": "heads", "rows": 1024, "heads": 24, "D": 128}
    row = {"op": "ulysses_a2a", "shape": shape, "world": 2, "n": 20, "ok": True} | FACTS
    lines = [row | {"arm": "bulk", "us_median": 12.34}, row | {"arm": "nccl", "us_median": 99.0}]
    other = row | {"shape": shape | {"rows": 2048}}
    lines.append(other | {"arm": "bulk", "us_median": 5.0, "ok": False})
    (results / "a2a.jsonl").write_text("".join(json.dumps(r) + "\n" for r in lines))
    text = render.TABLES["a2a"]()
    assert "| to heads, 1,024 rows, 24 x 128 | 12.3 | 99.0 |" in text
    assert "| to heads, 2,048 rows, 24 x 128 | 5.0 (WRONG) | - |" in text
    lines.append(row | {"op": "other", "shape": {"MB": 4}, "arm": "fused", "us_median": 7.0})
    (results / "a2a.jsonl").write_text("".join(json.dumps(r) + "\n" for r in lines))
    assert "| other | fused, us |\n|---|---:|\n| MB=4 | 7.0 |" in render.TABLES["a2a"]()
    assert "No results yet" in render.TABLES["attention"]()


def test_tables_of_ratios(render, results):
    shape = {"name": "s", "rows": 4096, "heads": 12, "head_dim": 128, "causal": False}
    row = {"op": "attention", "shape": shape, "world": 1, "n": 20, "ok": True} | FACTS
    lines = [
        row | {"arm": "fa3", "us_median": 100.0, "tflops": 700.4},
        row | {"arm": "cudnn", "us_median": 110.0, "tflops": 636.7},
    ]
    fused = row | {"op": "attention_a2a", "world": 2}
    lines += [
        fused | {"arm": arm, "us_median": us}
        for arm, us in (("fa3", 100.0), ("fused", 104.0), ("fa3 + a2a", 130.0))
    ]
    (results / "attention.jsonl").write_text("".join(json.dumps(r) + "\n" for r in lines))
    assert "| s: 4,096 rows, 12 x 128 | 700 | 1.100 | - |" in render.TABLES["attention-rates"]()
    ratios = render.TABLES["fused-ratios"]()
    assert "| s: 4,096 rows, 12 x 128 | 100.0 | 104.0 | 1.040 | - | - | 1.250 | - | - |" in ratios
    lines[1] |= {"over_fa3": 1.0951, "over_low": 1.09, "over_high": 1.1}
    (results / "attention.jsonl").write_text("".join(json.dumps(r) + "\n" for r in lines))
    assert "| 700 | 1.095 [1.090 1.100] | - |" in render.TABLES["attention-rates"]()
    shape = {"direction": "heads", "rows": 1024, "heads": 24, "D": 128}
    row = {"op": "ulysses_a2a", "shape": shape, "world": 2, "n": 20, "remote_MB": 32.0} | FACTS
    line = row | {"arm": "auto-0", "us_median": 94.2, "egress_GBps": 339.7}
    (results / "a2a.jsonl").write_text(json.dumps(line) + "\n")
    assert "| 32.00 MB to heads, 24 heads | 94.2 (340) | - |" in render.TABLES["a2a-rates"]()


def test_unknown_place_is_refused(render):
    with pytest.raises(ValueError, match="expected one of sweep"):
        render.render("<!-- results: nothing -->\n<!-- /results -->")


def git(*arguments):
    if not (ROOT / ".git").exists():
        return ""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else ""


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A folder of results, and the text of the pages that belong to them.

    Those at hand, but while a run writes new results those of the last commit.
    """
    if not git("status", "--porcelain", "--", "benchmarks/results"):
        return ROOT / "benchmarks" / "results", lambda page: (ROOT / page).read_text("utf-8")
    folder = tmp_path_factory.mktemp("committed")
    for name in git("ls-tree", "--name-only", "HEAD", "benchmarks/results/").splitlines():
        if name.endswith(".jsonl"):
            (folder / pathlib.Path(name).name).write_text(git("show", f"HEAD:{name}"), "utf-8")
    return folder, lambda page: git("show", f"HEAD:{page}")


@pytest.mark.parametrize("page", PAGES)
def test_pages_match_results(render, monkeypatch, kept, page):
    folder, text_of = kept
    monkeypatch.setattr(importlib.import_module("_report"), "RESULTS", folder)
    text = text_of(page)
    assert render.render(text) == text, f"run python benchmarks/render_readme.py {page}"


def test_exhibits_match_results(render, monkeypatch, tmp_path, kept):
    """Pages by their text; pictures differ between versions of what draws them."""
    folder, text_of = kept
    evidence = importlib.import_module("evidence")
    monkeypatch.setattr(importlib.import_module("_report"), "RESULTS", folder)
    monkeypatch.setattr(evidence, "FOLDER", tmp_path)
    pages = {page.stem for page in EXHIBITS.glob("*.md")} - {"README"}
    assert pages == set(evidence.EXHIBITS)
    stale = []
    for name, draw in evidence.EXHIBITS.items():
        draw()
        if (tmp_path / f"{name}.md").read_text("utf-8") != text_of(f"docs/evidence/{name}.md"):
            stale.append(name)
        assert (EXHIBITS / f"{name}.png").stat().st_size > 10_000
    assert not stale, "run python benchmarks/evidence.py all"
