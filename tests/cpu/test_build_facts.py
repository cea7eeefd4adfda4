"""What setup.py decides, for machines that are faked: every sentence that can stop a build."""

from __future__ import annotations

import dataclasses
import pathlib
import re
import runpy
import subprocess
import sys
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import build_facts  # noqa: E402

GPU_MACHINE = build_facts.Machine(
    torch_version="2.11.0+cu130",
    torch_cuda="13.0",
    cuda_home="/usr/local/cuda",
    nvcc_version="13.0",
    ninja=True,
    free_threaded=False,
    cores=16,
    free_bytes=128 * build_facts.GIB,
    max_jobs=None,
    parts="auto",
    compiler="/usr/bin/c++",
    python_headers=True,
)


def machine(**changes: Any) -> build_facts.Machine:
    """The GPU machine with some facts changed."""
    return dataclasses.replace(GPU_MACHINE, **changes)


def refusal(**changes: Any) -> str:
    """The sentence that stops the build of a changed machine."""
    with pytest.raises(SystemExit) as stopped:
        build_facts.decide(machine(**changes))
    text = str(stopped.value)
    assert text.startswith("xstage build: ") and "\n" not in text
    return text


def test_cuda_torch_with_nvcc_builds_the_kernels() -> None:
    decision = build_facts.decide(GPU_MACHINE)
    assert decision.kernels and decision.jobs == 16 and decision.notes == ()


def test_minor_versions_of_nvcc_and_torch_may_differ() -> None:
    assert build_facts.decide(machine(nvcc_version="13.2")).kernels


@pytest.mark.parametrize("nvcc_version", [None, "13.0"])
def test_cpu_torch_builds_without_kernels(nvcc_version: str | None) -> None:
    decision = build_facts.decide(
        machine(torch_version="2.13.0+cpu", torch_cuda=None, nvcc_version=nvcc_version)
    )
    assert not decision.kernels
    assert decision.notes == ("torch 2.13.0+cpu is a CPU build: kernels are left out",)


@pytest.mark.parametrize("cuda_home", [None, "/nowhere"])
def test_cuda_torch_without_nvcc_stops(cuda_home: str | None) -> None:
    text = refusal(nvcc_version=None, cuda_home=cuda_home)
    assert "torch 2.11.0+cu130 is built for CUDA 13.0" in text
    assert (cuda_home or "unset") in text and "cuda-toolkit[nvcc,cccl]==13.0.*" in text


def test_without_nvcc_the_kernels_can_be_left_out_on_purpose() -> None:
    assert not build_facts.decide(machine(nvcc_version=None, parts="cpu")).kernels


@pytest.mark.parametrize("nvcc_version", ["11.8", "12.6"])
def test_another_cuda_major_stops(nvcc_version: str) -> None:
    text = refusal(nvcc_version=nvcc_version)
    assert f"nvcc is from CUDA {nvcc_version}" in text and "CUDA 13" in text


def test_kernels_demanded_beside_cpu_torch_stop() -> None:
    assert "is a CPU build" in refusal(torch_cuda=None, parts="cuda")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"compiler": None}, "no C++ compiler"),
        ({"python_headers": False}, "Python.h is missing"),
        ({"free_threaded": True}, "free-threaded Python has no stable ABI"),
        ({"torch_version": "2.10.1"}, "torch 2.10.1 is too old"),
        ({"parts": "gpu"}, "XSTAGE_BUILD: expected auto, cpu or cuda, got gpu"),
        ({"nvcc_version": "12.2", "torch_cuda": "12.6"}, "too old for sm_90a"),
    ],
)
def test_other_refusals(changes: dict[str, Any], words: str) -> None:
    assert words in refusal(**changes)


def test_no_ninja_is_said_and_builds_one_file_at_a_time() -> None:
    decision = build_facts.decide(machine(ninja=False))
    assert decision.jobs == 1 and "ninja is not installed" in decision.notes[-1]


@pytest.mark.parametrize(
    ("free_gib", "cores", "max_jobs", "jobs", "words"),
    [
        (16, 64, 64, 5, "MAX_JOBS=64 lowered to 5"),
        (16, 64, 1, 1, None),
        (16, 64, None, 5, "5 compilers at a time"),
        (1, 8, None, 1, "less than one compiler may need"),
        (128, 4, 64, 4, "MAX_JOBS=64 lowered to 4"),
        (128, 4, None, 4, None),
    ],
)
def test_jobs_follow_free_memory(
    free_gib: int, cores: int, max_jobs: int | None, jobs: int, words: str | None
) -> None:
    decision = build_facts.decide(
        machine(free_bytes=free_gib * build_facts.GIB, cores=cores, max_jobs=max_jobs)
    )
    assert decision.jobs == jobs
    assert bool(decision.notes) == (words is not None)
    assert words is None or words in decision.notes[0]


def test_cutlass_override_must_hold_headers(tmp_path: pathlib.Path) -> None:
    with pytest.raises(SystemExit, match=r"no cute/tensor.hpp below"):
        build_facts.cutlass_include({"XSTAGE_CUTLASS": str(tmp_path)})
    (tmp_path / "include" / "cute").mkdir(parents=True)
    (tmp_path / "include" / "cute" / "tensor.hpp").touch()
    assert build_facts.cutlass_include({"XSTAGE_CUTLASS": str(tmp_path)}) == tmp_path / "include"


def test_missing_torch_and_missing_cutlass_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_facts, "outer_package_dir", lambda name: None)
    with pytest.raises(SystemExit, match="torch is not installed"):
        build_facts.torch_dir()
    with pytest.raises(SystemExit, match="pip install nvidia-cutlass"):
        build_facts.cutlass_include({})


def fake_toolkit(root: pathlib.Path, release: str) -> pathlib.Path:
    """A folder that looks like a CUDA toolkit."""
    (root / "bin").mkdir(parents=True)
    (root / "include").mkdir()
    (root / "include" / "cuda_runtime.h").touch()
    nvcc = root / "bin" / "nvcc"
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.1'\n")
    nvcc.chmod(0o755)
    return root


def test_nvcc_is_found_and_its_version_read(tmp_path: pathlib.Path) -> None:
    toolkit = fake_toolkit(tmp_path / "cuda", "11.8")
    named = build_facts.find_cuda_home({"CUDA_HOME": str(toolkit), "PATH": ""})
    on_path = build_facts.find_cuda_home({"PATH": str(toolkit / "bin")})
    assert named == on_path == str(toolkit)
    assert build_facts.find_nvcc_version(named) == "11.8"
    assert build_facts.find_nvcc_version(str(tmp_path)) is None


def test_a_wrapper_script_is_no_toolkit(tmp_path: pathlib.Path) -> None:
    toolkit = fake_toolkit(tmp_path / "wrapped", "13.0")
    (toolkit / "include" / "cuda_runtime.h").unlink()
    assert build_facts.find_cuda_home({"PATH": str(toolkit / "bin")}) != str(toolkit)


def test_torch_facts_are_read_without_importing_torch(tmp_path: pathlib.Path) -> None:
    (tmp_path / "version.py").write_text(
        "__version__ = '2.14.1+cu130'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"
    )
    assert build_facts.torch_version_facts(tmp_path) == ("2.14.1+cu130", "13.0")


@pytest.fixture
def cutlass(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A CUTLASS folder by XSTAGE_CUTLASS: the package is needed to build, not to test."""
    headers = tmp_path / "cutlass" / "include" / "cute"
    headers.mkdir(parents=True)
    (headers / "tensor.hpp").touch()
    monkeypatch.setenv("XSTAGE_CUTLASS", str(tmp_path / "cutlass"))
    return headers.parent


@pytest.mark.parametrize("arch_list", [None, "8.0", "9.0", "9.0a", "9.0+PTX"])
def test_sm_90a_is_built_whatever_the_arch_list_says(
    arch_list: str | None, monkeypatch: pytest.MonkeyPatch, cutlass: pathlib.Path
) -> None:
    if arch_list is None:
        monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    else:
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", arch_list)
    setup = runpy.run_path(str(ROOT / "setup.py"), run_name="setup_under_test")
    arguments = setup["extension_arguments"](kernels=True)["xstage_ext._cuda_sm90"]
    flags = arguments["extra_compile_args"]["nvcc"]
    from torch.utils import cpp_extension

    added = cpp_extension._get_cuda_arch_flags(flags)
    architectures = [flag for flag in [*flags, *added] if "arch" in flag]
    assert architectures == ["-gencode=arch=compute_90a,code=sm_90a"]


def test_setup_arguments_are_a_pure_function_of_the_sources(cutlass: pathlib.Path) -> None:
    setup = runpy.run_path(str(ROOT / "setup.py"), run_name="setup_under_test")
    without, with_kernels = (setup["extension_arguments"](kernels=k) for k in (False, True))
    assert list(without) == ["xstage_ext._C"]
    assert with_kernels["xstage_ext._C"] == without["xstage_ext._C"]
    assert with_kernels == setup["extension_arguments"](kernels=True)
    kernels = with_kernels["xstage_ext._cuda_sm90"]
    assert all(name.endswith(".cu") for name in kernels["sources"])
    assert str(cutlass) in kernels["include_dirs"]
    assert ("USE_CUDA", "1") in kernels["define_macros"]
    assert all(library["py_limited_api"] for library in with_kernels.values())


def test_every_source_belongs_to_exactly_one_library() -> None:
    cpu = build_facts.sources(build_facts.CPU_GLOBS)
    cuda = build_facts.sources(build_facts.CUDA_GLOBS)
    on_disk = sorted(
        str(path.relative_to(ROOT))
        for path in (ROOT / "csrc").rglob("*")
        if path.suffix in (".cpp", ".cu")
    )
    assert sorted(cpu + cuda) == on_disk


def test_cmake_reads_the_same_facts(cutlass: pathlib.Path) -> None:
    text = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "build_facts.py")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    facts = dict(re.findall(r"set\((\w+) (.*)\)", text))
    assert facts["XS_NVCC_FLAGS"] == " ".join(f'"{flag}"' for flag in build_facts.NVCC_FLAGS)
    assert facts["XS_CUTLASS_INCLUDE"] == f'"{cutlass}"'
    assert "TORCH_TARGET_VERSION=0x020b000000000000" in facts["XS_CUDA_DEFINES"]
