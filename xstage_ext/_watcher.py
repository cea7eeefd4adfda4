"""A thread that reports a workspace's first fault while nobody else looks."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

from . import _faults
from ._resources import Resources
from .errors import XStageError


def start(
    resources: Resources,
    error_of: Callable[[_faults.FaultRecord], XStageError],
    on_fault: Callable[[XStageError], None] | None,
    interval_s: float,
) -> threading.Thread:
    """Start the daemon thread; it ends after one report, or when the workspace is closed."""

    def report(error: XStageError) -> None:
        print(f"xstage: {type(error).__name__}: {error}", file=sys.stderr, flush=True)

    def look() -> None:
        while not resources.closed:
            for rank in resources.own_ranks:
                record = _faults.read_record(resources.page(rank), _faults.FATAL)
                if record is not None:
                    (on_fault or report)(error_of(record))
                    return
            time.sleep(interval_s)

    thread = threading.Thread(target=look, name="xstage-watch", daemon=True)
    thread.start()
    return thread
