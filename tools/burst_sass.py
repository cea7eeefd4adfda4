"""Checks the order of clock reads and stores in the SASS of the burst kernels.

    python tools/burst_sass.py xstage_ext/_cuda_sm90.abi3.so      # needs cuobjdump
    python tools/burst_sass.py kernels.sass                       # text of cuobjdump or nvdisasm

An issue time is worth something only if one clock is read before the first store of a burst and the
next one after the last, by an instruction (CS2R) that is read when it issues: S2UR and S2R wait in
the same queue as the stores.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

STORES = {"0": r"STG\.E\.128", "1": r"UBLKCP", "2": r"UTMASTG", "3": r"LDG\.E\.128"}
KERNEL = re.compile(
    r"(?:Function : |\.section\s+\.text\.)(\S*?(burst|shadow)_kernelI\S*?E(\d)E\S*)"
)
LATE_CLOCK = re.compile(r"\b(S2UR|S2R)\b.*SR_CLOCKLO")


def listing(path: str) -> str:
    """SASS text of a library or of a text file."""
    if not path.endswith((".so", ".o", ".cubin")):
        with open(path, encoding="utf-8") as file:
            return file.read()
    tool = shutil.which("cuobjdump") or "/usr/local/cuda/bin/cuobjdump"
    return subprocess.run([tool, "-sass", path], capture_output=True, text=True, check=True).stdout


def kernels(text: str) -> dict[tuple[str, str], list[str]]:
    """Lines of every burst and shadow kernel by (kind, mechanism)."""
    found: dict[tuple[str, str], list[str]] = {}
    current: list[str] | None = None
    for line in text.splitlines():
        if "Function : " in line or line.lstrip().startswith(".section"):
            match = KERNEL.search(line)
            current = found.setdefault((match[2], match[3]), []) if match else None
        elif current is not None:
            current.append(line)
    return found


def events(lines: list[str], mechanism: str) -> str:
    """The kernel as a word: C clock, W the mechanism's store, F fence, B block barrier."""
    word = []
    for line in lines:
        if re.search(r"\bCS2R\b.*SR_CLOCKLO", line):
            word.append("C")
        elif re.search(STORES[mechanism], line):
            word.append("W")
        elif "MEMBAR" in line:
            word.append("F")
        elif re.search(r"\bBAR\.SYNC", line):
            word.append("B")
    return "".join(word)


def faults(text: str) -> list[str]:
    """What is wrong, in words; empty when every burst is timed in order."""
    problems = []
    found = kernels(text)
    for kind in ("burst", "shadow"):
        for mechanism in STORES:
            lines = found.get((kind, mechanism))
            name = f"{kind}_kernel of mechanism {mechanism}"
            if lines is None:
                problems.append(f"{name}: not in the listing")
                continue
            late = [line.strip() for line in lines if LATE_CLOCK.search(line)]
            if kind == "burst" and late:
                problems.append(f"{name}: clock read by {late[0]}")
            # A burst: barrier, clock, stores and nothing else, clock, perhaps a fence, barrier.
            if not re.search(r"C+W+C[CF]*B", events(lines, mechanism)):
                problems.append(f"{name}: no burst between two clocks: {events(lines, mechanism)}")
    return problems


def main() -> int:
    """Print the faults of a library or listing."""
    problems = faults(listing(sys.argv[1]))
    for problem in problems:
        print(problem)
    print("burst SASS:", "wrong" if problems else "clocks stand around the stores")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
