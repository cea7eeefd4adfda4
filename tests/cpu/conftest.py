"""What several files of tests/cpu share."""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.conftest import REPOSITORY


@pytest.fixture
def benchmarks(monkeypatch, tmp_path):
    """Imports a module of benchmarks/; what it writes lands in `tmp_path`."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    report = importlib.import_module("_report")
    monkeypatch.setattr(report, "LOCAL_RESULTS", tmp_path)
    return importlib.import_module


@pytest.fixture
def fastest_tenth() -> Callable[[Callable[[Any], object], Sequence[Any]], float]:
    """Seconds per decision of the fastest tenth of many problems, by time of this thread: other
    processes share the cores and their caches."""

    def measure(decide: Callable[[Any], object], asked: Sequence[Any]) -> float:
        times = []
        for problem in asked:
            start = time.thread_time()
            decide(problem)
            times.append(time.thread_time() - start)
        return statistics.quantiles(times, n=10)[0]

    return measure
