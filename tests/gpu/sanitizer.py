"""Runs a small program of this folder under compute-sanitizer."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

import pytest

TOOLS = ("memcheck", "racecheck")


def expect_nothing_found(tool: str, program: str, level: int) -> None:
    """Asserts that `tests.gpu.PROGRAM` ends well under the tool and that the tool found nothing."""
    sanitizer = shutil.which("compute-sanitizer")
    if level < 2 or sanitizer is None:
        pytest.skip("needs compute-sanitizer and up to a minute; XSTAGE_TEST_LEVEL=2 runs it")
    # With backtraces of the host the tool keeps what the launching function held alive: results,
    # and so their slots.
    options = ["--tool", tool, "--show-backtrace", "device"]
    command = [sanitizer, *options, sys.executable, "-m", f"tests.gpu.{program}"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert f"{program}: ok" in result.stdout, result.stdout[-3000:] + result.stderr[-1000:]
    found = [line for line in result.stdout.splitlines() if "SUMMARY" in line]
    assert found and all(re.search(r"\b0 errors", line) for line in found), result.stdout[-3000:]
