"""`benchmarks/bench_model.py`: predictions anywhere, measurement between processes."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

SCRIPT = pathlib.Path(__file__).parents[2] / "benchmarks" / "bench_model.py"


def test_predicts_without_ranks() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "flux", "--world", "4"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith(("piggyback:", "serial:"))
    assert sum("predicted" in text for text in lines) == 4


def test_command_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "xstage_ext.cli", "bench", "--model", "wan2.2-720p"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "rows=75600 heads=40" in done.stdout


def test_measures_between_processes() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(SCRIPT), "cogvideox-2b"]
    done = subprocess.run(
        [*command, "--rows", "65", "--pairs", "2"],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    lines = [text for text in done.stdout.splitlines() if text.startswith("ulysses_attention")]
    assert len(lines) == 3 and all(text.endswith("ok") for text in lines), done.stdout
