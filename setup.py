"""Builds xstage_ext with torch.utils.cpp_extension.

    pip install -e .            # add --no-build-isolation to build without any network
    XSTAGE_BUILD=cpu pip install -e .

With a CPU build of torch only `_C` is built (schemas and CPU code). With a CUDA build and its nvcc
`_cuda_sm90` (the kernels) is built too. What is built follows from tools/build_facts.py alone; no
step asks git or a network.
"""

from __future__ import annotations

import os
import pathlib
import sys
from typing import Any

from setuptools import setup

ROOT = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tools"))

import build_facts  # noqa: E402  (tools/ is not a package)

# Definitions that torch adds and CMake does not: both builds must compile the same code.
HALF_GUARDS = (
    "__CUDA_NO_HALF_OPERATORS__",
    "__CUDA_NO_HALF_CONVERSIONS__",
    "__CUDA_NO_BFLOAT16_CONVERSIONS__",
    "__CUDA_NO_HALF2_OPERATORS__",
)


def extension_arguments(kernels: bool) -> dict[str, dict[str, Any]]:
    """Arguments of each extension module by name; a pure function of the files in csrc/."""
    # The C++ runtime comes before torch's libraries, which re-export parts of it: a toolchain that
    # links the runtime statically would otherwise mix the two.
    common: dict[str, Any] = {
        "py_limited_api": True,
        "libraries": ["stdc++"],
        "extra_link_args": list(build_facts.LINK_FLAGS),
    }
    cxx = [*build_facts.CXX_FLAGS, "-std=c++17"]
    arguments: dict[str, dict[str, Any]] = {
        "xstage_ext._C": common
        | {
            "sources": build_facts.sources(build_facts.CPU_GLOBS),
            "include_dirs": [str(ROOT / "csrc")],
            "define_macros": list(build_facts.defines(cuda=False).items()),
            "extra_compile_args": {"cxx": cxx},
        }
    }
    if kernels:
        nvcc = [*build_facts.NVCC_FLAGS, "-std=c++17", "-Xcompiler=-fvisibility=hidden"]
        arguments["xstage_ext._cuda_sm90"] = common | {
            "sources": build_facts.sources(build_facts.CUDA_GLOBS),
            "include_dirs": [str(ROOT / "csrc"), str(build_facts.cutlass_include())],
            "define_macros": list(build_facts.defines(cuda=True).items()),
            "extra_compile_args": {
                "cxx": cxx,
                "nvcc": nvcc + [f"-U{name}" for name in HALF_GUARDS],
            },
        }
    return arguments


def cudart_folder(cuda_home: str) -> str | None:
    """A folder with the libcudart.so that linkers look for.

    Toolkits from pip carry only libcudart.so.N: a link to it below build/ stands in.
    """
    libraries = [
        path
        for lib in ("lib64", "lib")
        for path in (pathlib.Path(cuda_home) / lib).glob("libcudart.so*")
    ]
    if not libraries or any(path.name == "libcudart.so" for path in libraries):
        return None
    link = ROOT / "build" / "cudart" / "libcudart.so"
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(libraries[0])
    return str(link.parent)


def summary(machine: build_facts.Machine, decision: build_facts.Decision) -> str:
    """What is built and why, for the log."""
    kernels = f"yes, sm_90a, nvcc {machine.nvcc_version}" if decision.kernels else "no"
    rows = {
        "torch": f"{machine.torch_version} (runs with {build_facts.TORCH_FLOOR[0]}."
        f"{build_facts.TORCH_FLOOR[1]} or newer)",
        "python": f"{sys.version_info.major}.{sys.version_info.minor} (abi3, runs with "
        f"{build_facts.PYTHON_FLOOR[0]}.{build_facts.PYTHON_FLOOR[1]} or newer)",
        "_C": f"yes, {len(build_facts.sources(build_facts.CPU_GLOBS))} files",
        "_cuda_sm90": kernels,
        "compilers": f"{decision.jobs} at a time",
    }
    lines = [f"xstage build: {name:11} {text}" for name, text in rows.items()]
    return "\n".join(lines + [f"xstage build: {note}" for note in decision.notes])


def main() -> None:
    """Decides, says so, and hands over to setuptools."""
    machine = build_facts.inspect_machine()
    decision = build_facts.decide(machine)
    print(summary(machine, decision), flush=True)
    os.environ["MAX_JOBS"] = str(decision.jobs)
    if decision.kernels and machine.cuda_home:
        os.environ["CUDA_HOME"] = machine.cuda_home
    # Build isolation hides the torch that this package will run with; the end of the path keeps
    # the isolated packages first.
    sys.path.append(str(build_facts.torch_dir().parent))
    from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension

    extensions = []
    for name, arguments in extension_arguments(decision.kernels).items():
        arguments["libraries"] = list(arguments["libraries"])  # torch appends to it
        if name.endswith("_cuda_sm90"):
            folder = cudart_folder(machine.cuda_home or "")
            arguments["library_dirs"] = [folder] if folder else []
            extensions.append(CUDAExtension(name, **arguments))
        else:
            extensions.append(CppExtension(name, **arguments))
    setup(
        ext_modules=extensions,
        cmdclass={"build_ext": BuildExtension.with_options(use_ninja=machine.ninja)},
        options={"bdist_wheel": {"py_limited_api": "cp310"}},
    )


if __name__ == "__main__":
    main()
