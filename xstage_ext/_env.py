"""Every environment variable that xstage reads, in one table."""

from __future__ import annotations

import os

from .errors import XStageError

VARIABLES: dict[str, str] = {
    "XSTAGE_LIB_DIR": "folder of the compiled libraries, when they were built elsewhere",
    "XSTAGE_BUILD": "build only: `cpu` leaves the kernels out, `cuda` insists on them",
    "XSTAGE_CUTLASS": "build only: CUTLASS checkout, instead of the nvidia-cutlass package",
    "XSTAGE_IMPL": "force `native` or `fallback` for the user-level functions",
    "XSTAGE_TIMEOUT_MS": "deadline of the waits for peers in a call, ms; 0 waits for ever",
    "XSTAGE_SETUP_TIMEOUT_MS": "deadline of collective set-up steps, milliseconds",
    "XSTAGE_PROFILE": "machine profile (JSON) to use instead of the bundled one",
    "XSTAGE_PLANS": "table of plans timed on this machine, written by `xstage tune`",
}


_LEAST_MS = {"XSTAGE_TIMEOUT_MS": 0, "XSTAGE_SETUP_TIMEOUT_MS": 1}
_MOST_MS = (1 << 31) - 1
_DEFAULT_TIMEOUT_MS = 300_000


def get(name: str) -> str | None:
    """Value of a variable of the table; None when unset or empty.

    Raises
    ------
    XStageError
        A deadline is no whole number of milliseconds, or out of range.
    """
    if name not in VARIABLES:
        raise KeyError(f"{name} is not in xstage_ext._env.VARIABLES")
    value = os.environ.get(name) or None
    if value is not None and name in _LEAST_MS:
        least = _LEAST_MS[name]
        if not value.isdecimal() or not least <= int(value) <= _MOST_MS:
            raise XStageError(f"xstage: {name}: expected {least} to {_MOST_MS} ms, got {value}")
    return value


def timeout_ms() -> int:
    """Deadline of every wait of a call, unless its caller sets another; 0: none."""
    return int(get("XSTAGE_TIMEOUT_MS") or _DEFAULT_TIMEOUT_MS)


def given() -> dict[str, str]:
    """Every variable of the table that is set, as it is."""
    return {name: os.environ[name] for name in VARIABLES if os.environ.get(name)}
