"""Every environment variable that xstage reads, in one table."""

from __future__ import annotations

import os

VARIABLES: dict[str, str] = {
    "XSTAGE_LIB_DIR": "folder of the compiled libraries, when they were built elsewhere",
    "XSTAGE_BUILD": "build only: `cpu` leaves the kernels out, `cuda` insists on them",
    "XSTAGE_CUTLASS": "build only: CUTLASS checkout, instead of the nvidia-cutlass package",
    "XSTAGE_IMPL": "force `native` or `fallback` for the user-level functions",
    "XSTAGE_TIMEOUT_MS": "deadline of device waits in milliseconds; 0 waits for ever",
    "XSTAGE_SETUP_TIMEOUT_MS": "deadline of collective set-up steps in milliseconds",
    "XSTAGE_PROFILE": "machine profile (JSON) to use instead of the bundled one",
    "XSTAGE_PLANS": "table of plans timed on this machine, written by `xstage tune`",
}


def get(name: str) -> str | None:
    """Value of a variable of the table; None when unset or empty."""
    if name not in VARIABLES:
        raise KeyError(f"{name} is not in xstage_ext._env.VARIABLES")
    return os.environ.get(name) or None
