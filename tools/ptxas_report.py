"""Registers, spills and shared memory of every kernel, from what ptxas said while compiling.

CMake runs nvcc through `ptxas_report.py --record nvcc ...`, which keeps ptxas's lines beside the
object file. `ptxas_report.py BUILD_DIR` prints them as a table and fails on a spill, on matrix
instructions that wait for each other, or on more shared memory than a block may have. Dynamic
shared memory comes from the programs that are built of tools/shared_sizes.cu.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import shutil
import subprocess
import sys

ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")
SERIALIZED = re.compile(r"wgmma.* instructions are serialized.* in the function '(\w+)'")
MOST_SHARED_BYTES = 227 * 1024  # of a block on compute capability 9.0
MAY_SPILL = {"megamoe_sm90<true>": 192}
"""Bytes by kernel. The trace build: times and counters that change once per tile; its calls are 1%
longer than those of the normal build, which spills nothing."""


@dataclasses.dataclass
class Kernel:
    """One entry function of one object file."""

    name: str
    arch: str
    source: str
    registers: int = 0
    stack_bytes: int = 0
    spill_bytes: int = 0
    static_shared_bytes: int = 0
    dynamic_shared_bytes: int = 0
    serialized: bool = False  # its wgmma instructions

    @property
    def shared_bytes(self) -> int:
        """Of a block."""
        return self.static_shared_bytes + self.dynamic_shared_bytes


def record(command: list[str]) -> int:
    """Runs a compiler and keeps its ptxas lines in OBJECT.ptxas; passes all other output on."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = done.stdout.splitlines()
    # ptxas prefixes its report with "ptxas info" and continues it with indented lines.
    report = [line for line in lines if line.startswith(("ptxas info", "    "))]
    if done.returncode != 0 or "-o" not in command:
        sys.stderr.write(done.stdout)
        return done.returncode
    sys.stderr.write("".join(line + "\n" for line in lines if line not in report))
    target = pathlib.Path(command[command.index("-o") + 1])
    target.with_name(target.name + ".ptxas").write_text("\n".join(report) + "\n")
    return 0


def parse(text: str, source: str) -> list[Kernel]:
    """Kernels in one recorded report."""
    kernels: list[Kernel] = []
    for line in text.splitlines():
        if match := ENTRY.search(line):
            kernels.append(Kernel(match[1], match[2], source))
        elif kernels and (match := STACK.search(line)):
            # Also of functions that were not inlined, which follow their kernel.
            kernels[-1].stack_bytes = max(kernels[-1].stack_bytes, int(match[1]))
            kernels[-1].spill_bytes += int(match[2]) + int(match[3])
        elif kernels and (match := USED.search(line)):
            kernels[-1].registers = int(match[1])
            shared = SHARED.search(line)
            kernels[-1].static_shared_bytes = int(shared[1]) if shared else 0
    serialized = set(SERIALIZED.findall(text))
    for kernel in kernels:
        kernel.serialized = kernel.name in serialized
    return kernels


def readable(names: list[str]) -> list[str]:
    """Demangled names without argument lists; as they are when c++filt is missing."""
    if shutil.which("c++filt") is None or not names:
        return names
    text = subprocess.run(
        ["c++filt", "-p"], input="\n".join(names), capture_output=True, text=True
    ).stdout
    return [
        line.replace("(anonymous namespace)::", "").replace("xstage::", "")
        for line in text.splitlines()
    ]


def dynamic_sizes(build_dir: pathlib.Path) -> list[tuple[re.Pattern[str], int]]:
    """(beginning of a kernel's name, bytes) as the programs shared_sizes_* of the build say."""
    sizes = []
    for program in sorted(build_dir.glob("shared_sizes_*")):
        if program.is_file() and os.access(program, os.X_OK):
            said = subprocess.run([program], capture_output=True, text=True, check=True).stdout
            for name, size in (line.rsplit(" ", 1) for line in said.splitlines()):
                pattern = re.escape(name).replace(re.escape("*"), "[^,]*")
                sizes.append((re.compile(pattern + r"(?!\w)"), int(size)))
    return sizes


def main(build_dir: str) -> int:
    """Prints the table; 1 on a spill, serial wgmma, too much memory, another GPU, or no record."""
    reports = sorted(pathlib.Path(build_dir).rglob("*.ptxas"))
    if not reports:
        print(f"no ptxas report below {build_dir}; build the _cuda_sm90 target first")
        return 1
    kernels: list[Kernel] = []
    for path in reports:
        if path.with_suffix("").exists():  # else the source is gone
            kernels += parse(path.read_text(), path.name.removesuffix(".o.ptxas"))
    names = readable([kernel.name for kernel in kernels])
    sizes = dynamic_sizes(pathlib.Path(build_dir))
    for name, kernel in zip(names, kernels, strict=True):
        kernel.dynamic_shared_bytes = next((size for at, size in sizes if at.match(name)), 0)
    print(f"{'registers':>9} {'stack':>6} {'spills':>6} {'shared':>7}  kernel (source)")
    for name, kernel in sorted(zip(names, kernels, strict=True), key=lambda pair: pair[1].source):
        print(
            f"{kernel.registers:9} {kernel.stack_bytes:6} {kernel.spill_bytes:6} "
            f"{kernel.shared_bytes:7}  {name[:110]} ({kernel.source})"
        )
    spilled = [
        n for n, k in zip(names, kernels, strict=True) if k.spill_bytes > MAY_SPILL.get(n, 0)
    ]
    serial = [n for n, k in zip(names, kernels, strict=True) if k.serialized]
    large = [n for n, k in zip(names, kernels, strict=True) if k.shared_bytes > MOST_SHARED_BYTES]
    wrong = sorted({k.arch for k in kernels} - {"sm_90a"})
    for name in spilled:
        print(f"FAIL: {name} spills registers")
    for name in serial:
        print(f"FAIL: {name} has wgmma instructions that wait for each other")
    for name in large:
        print(f"FAIL: {name} takes more than {MOST_SHARED_BYTES} bytes of shared memory")
    for arch in wrong:
        print(f"FAIL: compiled for {arch}, expected sm_90a only")
    print(f"{len(kernels)} kernels, {len(spilled)} with spills that may not be")
    return 1 if spilled or serial or large or wrong else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--record"]:
        sys.exit(record(sys.argv[2:]))
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1]))
