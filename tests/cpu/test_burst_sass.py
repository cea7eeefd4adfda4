"""The check of the burst kernels' SASS, on small listings."""

from __future__ import annotations

import pathlib
import sys
from typing import Any

import pytest

BURST_SASS = """
        .section .text._ZN6xstage12burst_kernelILNS_9MechanismE{m}EEEvNS_11BurstParamsE
 BAR.SYNC.DEFER_BLOCKING 0x0 ;
 {first} R2, SR_CLOCKLO ;
 {store} ;
 {store} ;
 CS2R R4, SR_CLOCKLO ;
 MEMBAR.ALL.SYS ;
 CS2R R6, SR_CLOCKLO ;
 BAR.SYNC.DEFER_BLOCKING 0x0 ;
"""
STORE = {"0": "STG.E.128 [R2], R4", "1": "UBLKCP.G.S [UR4], [UR6], UR8",
         "2": "UTMASTG.2D [UR8], [UR4]", "3": "LDG.E.128.STRONG.SYS R4, [R2]"}  # fmt: skip


@pytest.fixture
def burst_sass(repository: pathlib.Path) -> Any:
    sys.path.insert(0, str(repository / "tools"))
    import burst_sass as tool

    yield tool
    sys.path.remove(str(repository / "tools"))


def sass(first: str = "CS2R") -> str:
    text = ""
    for kind in ("12burst", "13shadow"):
        for m, store in STORE.items():
            text += BURST_SASS.format(m=m, first=first, store=store).replace("12burst", kind)
    return text


def test_sass_check_accepts_clocks_around_stores(burst_sass: Any) -> None:
    assert burst_sass.faults(sass()) == []


def test_sass_check_refuses_a_clock_that_waits_in_the_queue(burst_sass: Any) -> None:
    faults = burst_sass.faults(sass(first="S2UR"))
    assert any("clock read by S2UR" in fault for fault in faults)


def test_sass_check_refuses_a_kernel_that_is_missing(burst_sass: Any) -> None:
    assert any("not in the listing" in fault for fault in burst_sass.faults(""))


def test_sass_check_refuses_stores_without_a_clock_before(burst_sass: Any) -> None:
    text = sass().replace(" CS2R R2, SR_CLOCKLO ;\n", "")
    assert any("no burst between two clocks" in fault for fault in burst_sass.faults(text))
