"""Checks that built libraries keep the ABI promises of docs/ABI.md.

    python tools/check_abi.py FOLDER

For every *.abi3.so in FOLDER: Python's stable ABI (abi3audit), undefined symbols from an allowed
set only, libtorch symbols that the oldest supported torch has, needed libraries, and machine code
for sm_90a alone. `--list` prints the libtorch symbols that the libraries use.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import re
import struct
import subprocess
import sys

from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection, GNUVerSymSection

FLOOR_LIST = pathlib.Path(__file__).with_name("libtorch_floor_symbols.txt")
LIBTORCH = re.compile(r"^(aoti_torch_|torch_)\w+$")
PYTHON = re.compile(r"^_?Py\w+$")
CUDA = re.compile(r"^(cuda[A-Z]\w+|__cuda\w+)$")
# std:: names: torch's wheels re-export some, and then a linker drops their version.
STANDARD = re.compile(r"^_Z(T[IVS])?N?K?S[tabsiod]")
# Symbols of the C and C++ runtimes carry a version; those of libtorch and CPython do not.
RUNTIME_VERSION = re.compile(r"^(GLIBC|GLIBCXX|CXXABI|GCC)_")
NEWEST_RUNTIME = {"GLIBC": (2, 34), "GLIBCXX": (3, 4, 30), "CXXABI": (1, 3, 13), "GCC": (12, 0)}
NEEDED = re.compile(
    r"^(lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s|c10|c10_cuda|torch|torch_cpu|torch_cuda)\.so(\.\d+)?"
    r"|libcudart\.so\.\d+|ld-linux-.*)$"
)
FATBIN_MAGIC = 0xBA55ED50
ARCH_SPECIFIC = 0x100000  # set in the header of code for sm_90a, clear for plain sm_90


@dataclasses.dataclass(frozen=True)
class Library:
    """What one shared library asks of the world."""

    path: pathlib.Path
    undefined: tuple[tuple[str, str | None], ...]  # (symbol, version)
    needed: tuple[str, ...]
    fatbins: tuple[tuple[str, int, bool], ...]  # (ELF or PTX, architecture, architecture-specific)


def read(path: pathlib.Path) -> Library:
    """Reads a shared library's dynamic section, undefined symbols and embedded device code."""
    with path.open("rb") as stream:
        elf = ELFFile(stream)
        needed = [
            tag.needed
            for section in elf.iter_sections()
            if isinstance(section, DynamicSection)
            for tag in section.iter_tags()
            if tag.entry.d_tag == "DT_NEEDED"
        ]
        fatbin = elf.get_section_by_name(".nv_fatbin")
        images = tuple(device_images(fatbin.data())) if fatbin else ()
        return Library(path, tuple(undefined_symbols(elf)), tuple(needed), images)


def undefined_symbols(elf: ELFFile) -> list[tuple[str, str | None]]:
    """Undefined symbols with the version that they ask for; weak ones may stay unresolved."""
    versions: dict[int, str] = {}
    indices: GNUVerSymSection | None = None
    for section in elf.iter_sections():
        if isinstance(section, GNUVerNeedSection):
            for _, auxiliaries in section.iter_versions():
                versions |= {aux.entry.vna_other: aux.name for aux in auxiliaries}
        elif isinstance(section, GNUVerSymSection):
            indices = section
    found = []
    for position, symbol in enumerate(elf.get_section_by_name(".dynsym").iter_symbols()):
        if symbol["st_shndx"] != "SHN_UNDEF" or not symbol.name:
            continue
        if symbol["st_info"]["bind"] == "STB_WEAK":
            continue
        index = indices.get_symbol(position).entry["ndx"] if indices else None
        found.append((symbol.name, versions.get(index) if isinstance(index, int) else None))
    return found


def device_images(data: bytes) -> list[tuple[str, int, bool]]:
    """Device code in a .nv_fatbin section: kind, architecture, whether it is the `a` variant."""
    images = []
    offset = 0
    while offset + 16 <= len(data):
        magic, _, header, size = struct.unpack_from("<IHHQ", data, offset)
        if magic != FATBIN_MAGIC:
            offset += 8
            continue
        position, end = offset + header, offset + header + size
        while position < end:
            kind, _, entry, payload = struct.unpack_from("<HHIQ", data, position)
            architecture = struct.unpack_from("<I", data, position + 28)[0]
            flags = struct.unpack_from("<Q", data, position + 40)[0]
            name = "ELF" if kind == 2 else "PTX"
            images.append((name, architecture, bool(flags & ARCH_SPECIFIC)))
            position += entry + payload
        offset = end
    return images


def runtime_too_new(version: str) -> bool:
    """Whether a versioned symbol asks for a newer C or C++ runtime than we promise."""
    family, _, number = version.partition("_")
    digits = tuple(int(part) for part in number.split(".") if part.isdigit())
    return digits > NEWEST_RUNTIME[family]


def problems(library: Library, floor: set[str]) -> list[str]:
    """Everything that breaks a promise."""
    cuda = library.path.name.startswith("_cuda")
    found = []
    for name, version in library.undefined:
        if version is not None and RUNTIME_VERSION.match(version):
            if runtime_too_new(version):
                found.append(f"{name} needs {version}")
        elif LIBTORCH.match(name):
            if name not in floor:
                found.append(f"{name} is not in the oldest supported libtorch")
        elif not (PYTHON.match(name) or STANDARD.match(name) or (cuda and CUDA.match(name))):
            found.append(f"{name} is not an allowed symbol")
    found += [f"needs {name}" for name in library.needed if not NEEDED.match(name)]
    if cuda and not library.fatbins:
        found.append("holds no device code")
    for kind, architecture, specific in library.fatbins:
        if (kind, architecture, specific) != ("ELF", 90, True):
            found.append(f"holds {kind} for sm_{architecture}{'a' if specific else ''}")
    return found


def audit_python(path: pathlib.Path) -> list[str]:
    """abi3audit's verdict: only symbols of Python's limited API, of 3.10 or older."""
    command = [sys.executable, "-m", "abi3audit", "--strict", "--assume-minimum-abi3", "3.10"]
    done = subprocess.run([*command, str(path)], capture_output=True, text=True)
    return [] if done.returncode == 0 else [f"abi3audit: {(done.stdout + done.stderr).strip()}"]


def main() -> int:
    """Checks a folder; 1 when a promise is broken or no library is there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--list", action="store_true", help="print the libtorch symbols in use")
    options = parser.parse_args()
    libraries = [read(path) for path in sorted(options.folder.glob("*.abi3.so"))]
    if not libraries:
        print(f"no *.abi3.so in {options.folder}")
        return 1
    if options.list:
        names = {n for lib in libraries for n, _ in lib.undefined if LIBTORCH.match(n)}
        print("\n".join(sorted(names)))
        return 0
    floor = {line for line in FLOOR_LIST.read_text().splitlines() if not line.startswith("#")}
    broken = 0
    for library in libraries:
        found = problems(library, floor) + audit_python(library.path)
        broken += len(found)
        print(
            f"{'FAIL' if found else 'ok  '} {library.path.name}: {len(library.undefined)} "
            f"undefined symbols, {len(library.fatbins)} device images"
        )
        for text in found:
            print(f"     {text}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
