"""Documents say what is so: snippets run, named files exist, error texts and variables match."""

from __future__ import annotations

import ast
import os
import pathlib
import re
import subprocess
import sys

import pytest

from xstage_ext import _binary, _env

ROOT = pathlib.Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(
    path
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("csrc/**/*.md")]
    if path.is_file()
)
RESULT_TABLES = re.compile(r"<!-- results: .*?<!-- /results -->", re.S)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)


def run_python(code: str, timeout: int = 240) -> subprocess.CompletedProcess[str]:
    """Runs a program on the CPU, as a reader would paste it."""
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "XSTAGE_LIB_DIR": str(_binary.library_folder()),
        "CUDA_VISIBLE_DEVICES": "",
    }
    return subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        cwd=ROOT / "examples",
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def snippets(path: pathlib.Path, language: str) -> list[str]:
    """Code blocks of a document in one language."""
    return [code for tag, code in FENCE.findall(path.read_text()) if tag == language]


@pytest.mark.parametrize("impl", ["native", "fallback"])
@pytest.mark.parametrize("index", range(len(snippets(ROOT / "README.md", "python"))))
def test_readme_snippets_run(monkeypatch: pytest.MonkeyPatch, index: int, impl: str) -> None:
    monkeypatch.setenv("XSTAGE_IMPL", impl)
    code = snippets(ROOT / "README.md", "python")[index]
    assert len(code.strip().splitlines()) <= 12, "a README example has about ten lines"
    done = run_python(code)
    assert done.returncode == 0, done.stderr


def test_readme_commands_exist() -> None:
    from typer.testing import CliRunner

    from xstage_ext.cli import app

    for block in snippets(ROOT / "README.md", "bash"):
        for line in block.splitlines():
            words = line.split("#")[0].split()
            if "xstage_ext" in words:  # torchrun ... -m xstage_ext COMMAND
                words = ["xstage", *words[words.index("xstage_ext") + 1 :]]
            if words[:1] == ["xstage"]:
                command = [word for word in words[1:3] if not word.startswith("-")]
                assert CliRunner().invoke(app, [*command, "--help"]).exit_code == 0, line
            elif words[:1] == ["make"] and len(words) > 1:
                assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.M), line


@pytest.mark.parametrize("name", [path.name for path in sorted(ROOT.glob("examples/*.py"))])
def test_examples_run_on_one_process(name: str) -> None:
    code = f"import runpy; runpy.run_path({str(ROOT / 'examples' / name)!r}, run_name='__main__')"
    done = run_python("import torch\nwith torch.inference_mode():\n    " + code)
    assert done.returncode == 0, done.stderr
    assert "largest difference" in done.stdout


def test_variables_in_the_readme_are_those_of_the_table() -> None:
    table = re.findall(r"^\| `(XSTAGE_\w+)` \| (.*) \|$", (ROOT / "README.md").read_text(), re.M)
    assert dict(table) == _env.VARIABLES


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_documents_name_only_variables_that_exist(path: pathlib.Path) -> None:
    named = set(re.findall(r"\bXSTAGE_[A-Z_]+\b", path.read_text()))
    only_tests = {"XSTAGE_TEST_LEVEL"}
    assert named <= _env.VARIABLES.keys() | only_tests


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_named_files_exist(path: pathlib.Path) -> None:
    text = path.read_text()
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text)]
    missing = [
        link
        for link in links
        if link and not link.startswith("http") and not (path.parent / link).exists()
    ]
    plain = FENCE.sub("", text)
    for word in re.findall(r"`([\w./-]+/[\w.-]+\.(?:py|sh|md|h|cuh|cu|cpp|txt|json))`", plain):
        # Relative to the document, to the repository, or to csrc/ as includes are.
        if not any((folder / word).exists() for folder in (path.parent, ROOT, ROOT / "csrc")):
            missing.append(word)
    assert not missing


def source_texts() -> str:
    """Every string of the sources in one text; values that are filled in become an ellipsis."""
    texts = []
    folders = ("xstage_ext", "tools", "benchmarks")
    for path in [path for folder in folders for path in (ROOT / folder).rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (p.value if isinstance(p, ast.Constant) else "…" for p in node.values)
                texts.append("".join(str(part) for part in parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    for path in (ROOT / "csrc").rglob("*"):
        if path.suffix in (".h", ".cuh", ".cpp", ".cu"):
            literals = re.findall(r'"((?:[^"\\\n]|\\.)*)"', path.read_text())
            texts.append("…".join(literals))
    return "\n".join(texts)


def headings() -> list[str]:
    """Error texts that TROUBLESHOOTING.md is indexed by."""
    text = (ROOT / "docs" / "TROUBLESHOOTING.md").read_text()
    return [line[5:-1] for line in text.splitlines() if line.startswith("### `")]


@pytest.mark.parametrize("heading", headings())
def test_error_texts_exist_in_the_sources(heading: str) -> None:
    fragments = [part.strip() for part in re.split(r"…", heading) if len(part.strip()) > 3]
    assert fragments
    texts = source_texts()
    missing = [fragment for fragment in fragments if fragment not in texts]
    assert not missing


def test_documents_keep_the_line_length_of_the_house() -> None:
    long = [
        f"{path.name}:{number}"
        for path in DOCUMENTS
        for number, line in enumerate(RESULT_TABLES.sub("", path.read_text()).splitlines(), 1)
        if len(line) > 130 and not line.startswith(("|", "#"))
    ]
    assert not long
