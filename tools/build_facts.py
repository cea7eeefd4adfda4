"""What setup.py and CMakeLists.txt share: sources, flags, versions, headers, and what to build.

Everything here is a pure function of its arguments, except `inspect_machine`, which reads the
environment once. Run as a program, it writes the facts as CMake variables to standard output, or
with `--jobs` the number of compilers that fit.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping

ROOT = pathlib.Path(__file__).resolve().parent.parent

TORCH_FLOOR = (2, 11)  # the oldest torch that the libraries load under
PYTHON_FLOOR = (3, 10)
TORCH_TARGET_VERSION = f"0x{TORCH_FLOOR[0]:02x}{TORCH_FLOOR[1]:02x}" + 12 * "0"
PY_LIMITED_API = f"0x{PYTHON_FLOOR[0]:02X}{PYTHON_FLOOR[1]:02X}0000"

CPU_GLOBS = ("csrc/*.cpp", "csrc/*/*.cpp")
CUDA_GLOBS = ("csrc/*.cu", "csrc/*/*.cu")
CXX_FLAGS = ("-O3", "-Wall", "-fopenmp-simd", "-fvisibility=hidden")
# Other copies of the C++ runtime must not mix with ours: some toolchains link it statically (and
# would export it), and preloaded tools bring their own.
LINK_FLAGS = ("-s", "-Wl,--exclude-libs,ALL", "-Wl,-Bsymbolic-functions")
# sm_90a is spelled out, whatever TORCH_CUDA_ARCH_LIST says: plain sm_90 has no wgmma.
NVCC_FLAGS = (
    "-gencode=arch=compute_90a,code=sm_90a",
    "-O3",
    "-lineinfo",
    "-Xptxas=-v",
    "--expt-relaxed-constexpr",
    "--expt-extended-lambda",
)

GIB = 1 << 30
NVCC_JOB_BYTES = 3 * GIB  # peak of one nvcc process on a CuTe translation unit, rounded up
CXX_JOB_BYTES = 1 * GIB


class BuildError(SystemExit):
    """Stops a build with one sentence."""

    def __init__(self, sentence: str) -> None:
        super().__init__(f"xstage build: {sentence}")


def sources(globs: tuple[str, ...], root: pathlib.Path = ROOT) -> list[str]:
    """Source files below root, relative to it, in a stable order."""
    return sorted(str(path.relative_to(root)) for glob in globs for path in root.glob(glob))


def defines(cuda: bool) -> dict[str, str]:
    """Preprocessor definitions of one library, for every compiler that sees its files."""
    common = {"TORCH_TARGET_VERSION": TORCH_TARGET_VERSION}
    return common | {"USE_CUDA": "1"} if cuda else common


# Where the headers are.


def package_dir(name: str) -> pathlib.Path | None:
    """Folder of an installed package, without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        return None
    return pathlib.Path(next(iter(spec.submodule_search_locations)))


def outer_package_dir(name: str) -> pathlib.Path | None:
    """Like package_dir, but also looks outside pip's build isolation.

    Isolation hides the environment that the package is built for. A build must use that
    environment's torch, not another one fetched only to compile.
    """
    found = package_dir(name)
    if found is not None:
        return found
    probe = (
        f"import importlib.util as u; s = u.find_spec({name!r}); "
        "print(next(iter(s.submodule_search_locations)) if s else '')"
    )
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONNOUSERSITE")}
    answer = subprocess.run(
        [sys.executable, "-c", probe], env=clean, cwd="/", capture_output=True, text=True
    ).stdout.strip()
    return pathlib.Path(answer) if answer else None


def torch_dir() -> pathlib.Path:
    """torch's package folder; only the stable headers below its `include` are used."""
    found = outer_package_dir("torch")
    if found is None:
        raise BuildError(
            "torch is not installed in this Python environment; install the torch that you will "
            "run first (`pip install torch`), then repeat"
        )
    return found


def cutlass_include(env: Mapping[str, str] = os.environ) -> pathlib.Path:
    """CUTLASS and CuTe headers: XSTAGE_CUTLASS, else the nvidia-cutlass package."""
    override = env.get("XSTAGE_CUTLASS")
    if override:
        candidate = pathlib.Path(override)
        if (candidate / "include" / "cute").is_dir():
            candidate = candidate / "include"
    else:
        package = outer_package_dir("cutlass_library")
        if package is None:
            raise BuildError(
                "CUTLASS headers not found; run `pip install nvidia-cutlass` or set "
                "XSTAGE_CUTLASS to a CUTLASS checkout"
            )
        candidate = package / "source" / "include"
    if not (candidate / "cute" / "tensor.hpp").is_file():
        raise BuildError(f"no cute/tensor.hpp below {candidate}; is XSTAGE_CUTLASS right?")
    return candidate


# What to build.


@dataclasses.dataclass(frozen=True)
class Machine:
    """What a build can see. Tests fake it."""

    torch_version: str
    torch_cuda: str | None  # CUDA version that torch was built with; None for a CPU build
    cuda_home: str | None
    nvcc_version: str | None  # None when there is no nvcc
    ninja: bool
    free_threaded: bool
    cores: int
    free_bytes: int
    max_jobs: int | None  # MAX_JOBS
    parts: str  # XSTAGE_BUILD: "auto", "cpu" or "cuda"
    compiler: str | None  # the C++ compiler; None when there is none
    python_headers: bool


@dataclasses.dataclass(frozen=True)
class Decision:
    """What a build does, and the sentences that its summary prints."""

    kernels: bool
    jobs: int
    notes: tuple[str, ...]


def version_pair(text: str) -> tuple[int, int]:
    """(major, minor) of a version such as 2.13.0+cpu."""
    match = re.match(r"(\d+)\.(\d+)", text)
    if match is None:
        raise BuildError(f"cannot read the version {text!r}")
    return int(match[1]), int(match[2])


def decide(machine: Machine) -> Decision:
    """Chooses the libraries and the number of compilers, or stops with one sentence."""
    if machine.free_threaded:
        raise BuildError(
            "free-threaded Python has no stable ABI yet; use an ordinary build of Python 3.10 "
            "or newer"
        )
    if machine.compiler is None:
        raise BuildError("no C++ compiler (CXX, else c++); install g++ or clang with C++17")
    if not machine.python_headers:
        raise BuildError(
            "Python.h is missing; install the headers of this Python (python3-dev or python3-devel)"
        )
    if version_pair(machine.torch_version) < TORCH_FLOOR:
        raise BuildError(
            f"torch {machine.torch_version} is too old; torch {TORCH_FLOOR[0]}.{TORCH_FLOOR[1]} "
            "or newer is needed (`pip install -U torch`)"
        )
    if machine.parts not in ("auto", "cpu", "cuda"):
        raise BuildError(f"XSTAGE_BUILD: expected auto, cpu or cuda, got {machine.parts}")
    kernels, notes = decide_kernels(machine)
    jobs, job_notes = decide_jobs(machine, kernels)
    if not machine.ninja:
        job_notes += ("ninja is not installed: files compile one after another",)
        jobs = 1
    return Decision(kernels, jobs, notes + job_notes)


def decide_kernels(machine: Machine) -> tuple[bool, tuple[str, ...]]:
    """Whether the sm_90a kernels are built, and why not."""
    if machine.parts == "cpu":
        return False, ("XSTAGE_BUILD=cpu: kernels are left out",)
    if machine.torch_cuda is None:
        if machine.parts == "cuda":
            raise BuildError(
                f"XSTAGE_BUILD=cuda, but torch {machine.torch_version} is a CPU build; install a "
                "CUDA build of torch, or build for another machine with CMake"
            )
        return False, (f"torch {machine.torch_version} is a CPU build: kernels are left out",)
    if machine.nvcc_version is None:
        raise BuildError(
            f"torch {machine.torch_version} is built for CUDA {machine.torch_cuda}, but there is "
            f"no nvcc below CUDA_HOME ({machine.cuda_home or 'unset'}); run `pip install "
            f"'cuda-toolkit[nvcc,cccl]=={machine.torch_cuda}.*'` or point CUDA_HOME to a toolkit, "
            "or set XSTAGE_BUILD=cpu to leave the kernels out"
        )
    torch_major, nvcc_major = (
        version_pair(v)[0] for v in (machine.torch_cuda, machine.nvcc_version)
    )
    if torch_major != nvcc_major:
        raise BuildError(
            f"nvcc is from CUDA {machine.nvcc_version}, but torch {machine.torch_version} is built "
            f"for CUDA {machine.torch_cuda}; point CUDA_HOME to a CUDA {torch_major} toolkit, or "
            "set XSTAGE_BUILD=cpu to leave the kernels out"
        )
    if version_pair(machine.nvcc_version) < (12, 4):
        raise BuildError(
            f"nvcc {machine.nvcc_version} is too old for sm_90a kernels; CUDA 12.4 is the oldest"
        )
    return True, ()


def decide_jobs(machine: Machine, kernels: bool) -> tuple[int, tuple[str, ...]]:
    """Compilers at a time: no more than cores, than MAX_JOBS, than fit in free memory."""
    per_job = NVCC_JOB_BYTES if kernels else CXX_JOB_BYTES
    fit = machine.free_bytes // per_job
    wanted = machine.max_jobs if machine.max_jobs is not None else machine.cores
    jobs = max(1, min(wanted, machine.cores, fit))
    free = f"{machine.free_bytes / GIB:.1f} GiB of free memory"
    if fit < 1:
        return jobs, (f"{free}: less than one compiler may need ({per_job // GIB} GiB)",)
    if machine.max_jobs is not None and jobs < machine.max_jobs:
        return jobs, (
            f"MAX_JOBS={machine.max_jobs} lowered to {jobs}: {free}, {machine.cores} cores",
        )
    if jobs < min(wanted, machine.cores):
        return jobs, (f"{jobs} compilers at a time: {free}",)
    return jobs, ()


# What this machine is.


def is_toolkit(folder: pathlib.Path) -> bool:
    """Whether a folder holds nvcc and the runtime's headers."""
    return (folder / "bin" / "nvcc").is_file() and (folder / "include" / "cuda_runtime.h").is_file()


def find_cuda_home(env: Mapping[str, str] = os.environ) -> str | None:
    """CUDA_HOME, CUDA_PATH, the nvcc on PATH, /usr/local/cuda, or nvcc from pip; in this order.

    A candidate counts only with its headers: the nvcc on PATH may be a wrapper script.
    """
    named = env.get("CUDA_HOME") or env.get("CUDA_PATH")
    if named:
        return named
    on_path = shutil.which("nvcc", path=env.get("PATH"))
    candidates = [pathlib.Path(on_path).resolve().parent.parent] if on_path else []
    candidates.append(pathlib.Path("/usr/local/cuda"))
    nvidia = outer_package_dir("nvidia")
    if nvidia is not None:
        candidates += sorted(nvidia.glob("cu[0-9]*"), reverse=True)
    for candidate in candidates:
        if is_toolkit(candidate):
            return str(candidate)
    return None


def find_nvcc_version(cuda_home: str | None) -> str | None:
    """Version that nvcc prints, such as 13.0; None when there is no nvcc."""
    if cuda_home is None or not (pathlib.Path(cuda_home) / "bin" / "nvcc").is_file():
        return None
    command = [str(pathlib.Path(cuda_home) / "bin" / "nvcc"), "--version"]
    match = re.search(
        r"release (\d+\.\d+)", subprocess.run(command, capture_output=True, text=True).stdout
    )
    return match[1] if match else None


def free_memory_bytes() -> int:
    """Memory that this process may still take: the machine's, or its control group's if less."""
    meminfo = pathlib.Path("/proc/meminfo").read_text()
    match = re.search(r"MemAvailable:\s+(\d+) kB", meminfo)
    free = int(match[1]) * 1024 if match else 2 * GIB
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        try:
            free = min(
                free, int(pathlib.Path(limit).read_text()) - int(pathlib.Path(used).read_text())
            )
        except (OSError, ValueError):  # no such controller, or "max"
            continue
    return max(free, 0)


def torch_version_facts(package: pathlib.Path) -> tuple[str, str | None]:
    """(version, CUDA version) out of torch/version.py, without importing torch."""
    text = (package / "version.py").read_text()
    version = re.search(r"^__version__\s*=\s*'([^']+)'", text, re.M)
    cuda = re.search(r"^cuda(?::[^=]*)?\s*=\s*'([^']+)'", text, re.M)
    if version is None:
        raise BuildError(f"cannot read torch's version in {package / 'version.py'}")
    return version[1], cuda[1] if cuda else None


def inspect_machine(env: Mapping[str, str] = os.environ) -> Machine:
    """Reads everything that a build depends on."""
    version, cuda = torch_version_facts(torch_dir())
    cuda_home = find_cuda_home(env)
    max_jobs = env.get("MAX_JOBS")
    return Machine(
        torch_version=version,
        torch_cuda=cuda,
        cuda_home=cuda_home,
        nvcc_version=find_nvcc_version(cuda_home),
        ninja=shutil.which("ninja", path=env.get("PATH")) is not None,
        free_threaded=bool(sysconfig.get_config_var("Py_GIL_DISABLED")),
        cores=len(os.sched_getaffinity(0)),
        free_bytes=free_memory_bytes(),
        max_jobs=int(max_jobs) if max_jobs and max_jobs.isdigit() else None,
        parts=env.get("XSTAGE_BUILD") or "auto",
        compiler=shutil.which((env.get("CXX") or "c++").split()[0], path=env.get("PATH")),
        python_headers=(pathlib.Path(sysconfig.get_paths()["include"]) / "Python.h").is_file(),
    )


def cmake_facts() -> str:
    """The facts as CMake `set` commands."""
    facts: dict[str, tuple[str, ...]] = {
        "XS_TORCH_INCLUDE": (str(torch_dir() / "include"),),
        "XS_CUTLASS_INCLUDE": (str(cutlass_include()),),
        "XS_CPU_GLOBS": CPU_GLOBS,
        "XS_CUDA_GLOBS": CUDA_GLOBS,
        "XS_CXX_FLAGS": CXX_FLAGS,
        "XS_LINK_FLAGS": LINK_FLAGS,
        "XS_NVCC_FLAGS": NVCC_FLAGS,
        "XS_CPU_DEFINES": tuple(f"{k}={v}" for k, v in defines(cuda=False).items()),
        "XS_CUDA_DEFINES": tuple(f"{k}={v}" for k, v in defines(cuda=True).items()),
        "XS_PY_LIMITED_API": (PY_LIMITED_API,),
    }
    lines = []
    for name, values in facts.items():
        lines.append(f"set({name} " + " ".join(f'"{value}"' for value in values) + ")")
    return "\n".join(lines)


if __name__ == "__main__":
    if sys.argv[1:] == ["--jobs"]:  # how many compilers a CMake build of the kernels may run
        print(decide_jobs(inspect_machine(), kernels=True)[0])
    else:
        print(cmake_facts())
