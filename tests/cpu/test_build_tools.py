"""The checkers check: each of tools/ finds what it is there to find."""

from __future__ import annotations

import json
import pathlib
import struct
import subprocess
import sys

import pytest

from xstage_ext import _binary

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import bootstrap  # noqa: E402
import check_budget  # noqa: E402
import ptxas_report  # noqa: E402

NATIVE = """
// A comment with { braces ( and } brackets.
namespace xstage {
template <class T, int kStages>
struct Traits {
  static constexpr int kValue = 3;
  XS_HD int method(int a, T b = {}) const { return a; }
};
__global__ void __launch_bounds__(128, (kFew < 2 ? 1 : 2)) entry(Params const params) {
  for (int i = 0; i < 4; ++i) {
    if (i) {
      while (true) {
        if (i > 1) {
          do { ++i; } while (i < 9);
        }
      }
    }
  }
}
int host(int a, int b, int c, int d, std::vector<std::pair<int, int>> const& e, int f, int g,
         int h, int i) {
  return a;
}
}  // namespace xstage
STABLE_TORCH_LIBRARY_IMPL(xstage, CPU, m) { m.impl("host", TORCH_BOX(&host)); }
"""


def test_budget_reads_native_functions() -> None:
    found = {f.name: f for f in check_budget.native_functions(NATIVE)}
    assert set(found) == {"method", "entry", "host", "STABLE_TORCH_LIBRARY_IMPL"}
    assert found["entry"].kind == "entry" and found["entry"].nesting == 5
    assert found["entry"].lines == 11 and found["entry"].parameters == 1
    assert found["host"].parameters == 9 and found["host"].kind == "host"
    assert found["method"].parameters == 2


def test_budget_reads_python_functions() -> None:
    text = 'def f(self, a, *, b):\n    """Doc\n    two."""\n    if a:\n        for x in a:\n'
    text += "            pass\n    elif b:\n        pass\n"
    (function,) = check_budget.python_functions(text)
    assert (function.parameters, function.nesting, function.lines) == (1, 2, 6)


def test_budget_reports_what_is_over(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_budget, "ROOT", tmp_path)
    (tmp_path / "long.py").write_text("def f():\n" + "    x = 1\n" * 401)
    (tmp_path / "entry.cu").write_text(NATIVE)
    long = "\n".join(check_budget.problems(tmp_path / "long.py", set()))
    assert "402 lines, 400 allowed" in long and "f: 402 lines, 60 allowed (host)" in long
    operators = check_budget.operators_of(NATIVE)
    native = check_budget.problems(tmp_path / "entry.cu", operators)
    assert native == ["entry.cu:9: entry: nesting 5, 4 allowed"]  # host is an operator
    assert any("parameters" in text for text in check_budget.problems(tmp_path / "entry.cu", set()))
    assert check_budget.operators_of("m.impl(x, TORCH_BOX(&Ops::alone));") == {"alone"}


PTXAS = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z4fastPf' for 'sm_90a'
ptxas info    : Function properties for _Z4fastPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 128 bytes smem
ptxas info    : Compiling entry function '_Z4slowPf' for 'sm_90a'
ptxas info    : Function properties for _Z4slowPf
    40 bytes stack frame, 36 bytes spill stores, 44 bytes spill loads
ptxas info    : Used 255 registers, used 0 barriers
ptxas info    : Function properties for _Z10not_inlinedv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
"""


SERIAL = """ptxas info    : (C7520) Potential Performance Loss: wgmma.mma_async instructions are \
serialized due to program dependence on compiler-inserted WG.AR in divergent path in the function \
'_Z4fastPf'
"""


def test_ptxas_report_is_parsed() -> None:
    fast, slow = ptxas_report.parse(PTXAS, "k.cu")
    assert (fast.registers, fast.static_shared_bytes, fast.spill_bytes) == (168, 128, 0)
    assert (slow.registers, slow.spill_bytes, slow.stack_bytes) == (255, 80, 40)
    assert fast.arch == "sm_90a"


@pytest.mark.parametrize(
    ("text", "status", "words"),
    [
        (PTXAS.split("ptxas info    : Compiling entry function '_Z4slow")[0], 0, "0 with spills"),
        (PTXAS, 1, "spills registers"),
        (PTXAS.replace("_Z4slowPf", "_Z12megamoe_sm90ILb1EEvv"), 0, "0 with spills"),
        (PTXAS.replace("_Z4slowPf", "_Z12megamoe_sm90ILb0EEvv"), 1, "spills registers"),
        (PTXAS.replace("sm_90a", "sm_90"), 1, "compiled for sm_90, expected sm_90a only"),
        (
            SERIAL + PTXAS.split("ptxas info    : Compiling entry function '_Z4slow")[0],
            1,
            "FAIL: fast has wgmma instructions that wait for each other",
        ),
    ],
)
def test_ptxas_report_fails_on_what_costs_speed(
    text: str, status: int, words: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "k.cu.o").touch()
    (tmp_path / "k.cu.o.ptxas").write_text(text)
    assert ptxas_report.main(str(tmp_path)) == status
    assert words in capsys.readouterr().out


@pytest.mark.parametrize(("size", "status"), [(232_448 - 128, 0), (232_448, 1)])
def test_dynamic_shared_memory_counts(
    size: int, status: int, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "k.cu.o").touch()
    text = PTXAS.split("ptxas info    : Compiling entry function '_Z4slow")[0]
    (tmp_path / "k.cu.o.ptxas").write_text(text)
    program = tmp_path / "shared_sizes_ONE"
    program.write_text(f"#!/bin/sh\necho 'fas 1'\necho 'fast {size}'\n")
    program.chmod(0o755)
    assert ptxas_report.main(str(tmp_path)) == status
    assert f" {size + 128} " in capsys.readouterr().out


def test_ptxas_report_fails_without_reports(tmp_path: pathlib.Path) -> None:
    assert ptxas_report.main(str(tmp_path)) == 1


def test_recording_keeps_the_report_and_passes_the_rest(tmp_path: pathlib.Path) -> None:
    code = f"print({PTXAS!r} + 'k.cu(3): warning: unused')"
    target = tmp_path / "k.cu.o"
    done = subprocess.run(
        [
            sys.executable,
            str(ROOT / "tools" / "ptxas_report.py"),
            "--record",
            sys.executable,
            "-c",
            code,
            "-o",
            str(target),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and done.stderr.strip() == "k.cu(3): warning: unused"
    assert len(ptxas_report.parse(target.with_name("k.cu.o.ptxas").read_text(), "")) == 2


def fatbin(*images: tuple[int, int, int]) -> bytes:
    """A .nv_fatbin section of (kind, architecture, flags) with empty payloads."""
    body = b"".join(
        struct.pack(
            "<HHIQIIHHIIIQQQ", kind, 0x101, 80, 8, 0, 0, 0, 0, arch, 0, 0, flags, 0, 0
        ).ljust(80, b"\0")
        + 8 * b"\0"
        for kind, arch, flags in images
    )
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def test_abi_reads_device_images() -> None:
    check_abi = pytest.importorskip("check_abi", reason="needs pyelftools (extra dev)")
    data = fatbin((2, 90, 0x100011), (2, 90, 0x11), (1, 90, 0x8011)) + fatbin((2, 100, 0x100011))
    assert check_abi.device_images(data) == [
        ("ELF", 90, True),
        ("ELF", 90, False),
        ("PTX", 90, False),
        ("ELF", 100, True),
    ]


def test_abi_finds_broken_promises() -> None:
    check_abi = pytest.importorskip("check_abi", reason="needs pyelftools (extra dev)")
    library = check_abi.Library(
        path=pathlib.Path("_cuda_sm90.abi3.so"),
        undefined=(
            ("aoti_torch_old", None),
            ("aoti_torch_new", None),
            ("_ZN3c106detail3fooEv", None),
            ("memcpy", "GLIBC_2.14"),
            ("arc4random", "GLIBC_2.36"),
            ("cudaLaunchKernel", "libcudart.so.13"),
            ("PyModule_Create2", None),
        ),
        needed=("libcudart.so.13", "libc.so.6", "libtorch_python.so"),
        fatbins=(("ELF", 90, True), ("ELF", 90, False)),
    )
    assert check_abi.problems(library, {"aoti_torch_old"}) == [
        "aoti_torch_new is not in the oldest supported libtorch",
        "_ZN3c106detail3fooEv is not an allowed symbol",
        "arc4random needs GLIBC_2.36",
        "needs libtorch_python.so",
        "holds ELF for sm_90",
    ]


def test_the_library_in_use_keeps_the_promises() -> None:
    check_abi = pytest.importorskip("check_abi", reason="needs pyelftools (extra dev)")
    library = check_abi.read(_binary.library_folder() / "_C.abi3.so")
    floor = set(check_abi.FLOOR_LIST.read_text().splitlines())
    assert library.undefined and check_abi.problems(library, floor) == []


def test_bootstrap_reads_requirements_and_finds_what_is_missing() -> None:
    test, dev = bootstrap.requirements("test"), bootstrap.requirements("dev")
    assert any(item.startswith("pytest") for item in test) and set(test) < set(dev)
    absent = bootstrap.missing(sys.executable, ["torch>=2.11", "torch>=999", "no-such-package-x"])
    assert absent == ["torch>=999", "no-such-package-x"]


@pytest.mark.parametrize("heavy", [True, False])
def test_bootstrap_refuses_a_cuda_torch_without_a_gpu(
    heavy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "nvidia-cublas" if heavy else "sympy"
    report = json.dumps({"install": [{"metadata": {"name": n}} for n in ("torch", name)]})
    answer = subprocess.CompletedProcess([], 0, stdout=report, stderr="")
    monkeypatch.setattr(bootstrap.subprocess, "run", lambda *args, **kwargs: answer)
    if not heavy:
        bootstrap.refuse_cuda_build("python", ["torch"])
        return
    with pytest.raises(SystemExit, match="no GPU is visible, but pip would fetch torch's CUDA"):
        bootstrap.refuse_cuda_build("python", ["torch"])
