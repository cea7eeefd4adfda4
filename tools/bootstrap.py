"""Makes .venv ready: the right torch, the requirements, and xstage_ext built in place.

Needs only a Python 3.10 or newer and pip. `make` calls it; it may be called again at any time.

- Where python3 already has a CUDA build of torch and a GPU is visible, .venv sees that torch and
  nothing large is fetched.
- Where no GPU is visible, the CPU build of torch is installed. If pip would fetch a CUDA build
  instead (several GB), it stops and says how to get the small one.
- Where a GPU is visible but nvcc is not, nvcc is installed from pip.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import venv

ROOT = pathlib.Path(__file__).resolve().parent.parent
TORCH_PIN = "2.13.0"  # what this project is developed with; any torch from 2.11 on will do


def say(text: str) -> None:
    """One line of progress."""
    print(f"xstage setup: {text}", flush=True)


def stop(text: str) -> SystemExit:
    """An error that ends the program with one line."""
    return SystemExit(f"xstage setup: {text}")


def gpu_visible() -> bool:
    """Whether nvidia-smi lists a GPU."""
    if shutil.which("nvidia-smi") is None:
        return False
    done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    return done.returncode == 0 and "GPU 0" in done.stdout


def torch_cuda(python: str) -> str | None:
    """ "2.11.0+cu130 13.0" for a torch that this interpreter imports; None without one."""
    code = "import torch; print(torch.__version__, torch.version.cuda)"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, cwd="/")
    return done.stdout.strip() if done.returncode == 0 else None


def make_venv(folder: pathlib.Path, inherit: bool) -> str:
    """Creates the environment if it is not there; returns its interpreter."""
    python = folder / "bin" / "python"
    if not python.exists():
        say(f"creating {folder}" + (" over this Python's packages" if inherit else ""))
        venv.create(folder, with_pip=True, system_site_packages=inherit)
        if inherit:
            see_parent_packages(folder)
    return str(python)


def see_parent_packages(folder: pathlib.Path) -> None:
    """Lets an environment made from inside another one see that one's packages too.

    `--system-site-packages` reaches the base installation only, not a parent environment.
    """
    if sys.prefix == sys.base_prefix:
        return
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    parent = pathlib.Path(sys.prefix) / "lib" / version / "site-packages"
    (folder / "lib" / version / "site-packages" / "parent_environment.pth").write_text(
        f"{parent}\n"
    )


def pip(python: str, *arguments: str) -> None:
    """Runs pip, quietly unless it fails."""
    done = subprocess.run([python, "-m", "pip", "install", "-qq", *arguments], cwd=ROOT)
    if done.returncode != 0:
        raise stop(f"pip install {' '.join(arguments)} failed; see above")


def install_torch(python: str, gpu: bool, index: str | None) -> None:
    """Installs torch; on a machine without a GPU only a build without CUDA packages."""
    request = ["torch" if gpu else f"torch=={TORCH_PIN}"]
    if index:
        request += ["--index-url", index]
    if not gpu and not index:
        refuse_cuda_build(python, request)
    say(f"installing {request[0]}" + ("" if gpu else " (CPU build)"))
    pip(python, *request)


def refuse_cuda_build(python: str, request: list[str]) -> None:
    """Stops when pip would fetch CUDA packages for a machine that cannot use them."""
    command = [python, "-m", "pip", "install", "-qq", "--dry-run", "--report", "-", *request]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise stop(f"pip cannot find {request[0]}: {done.stderr.strip().splitlines()[-1]}")
    names = [item["metadata"]["name"].lower() for item in json.loads(done.stdout)["install"]]
    heavy = [name for name in names if name.startswith("nvidia-")]
    if heavy:
        raise stop(
            f"no GPU is visible, but pip would fetch torch's CUDA build with {len(heavy)} CUDA "
            "packages (several GB); run `make TORCH_INDEX=URL` with the address of PyTorch's CPU "
            "wheels, or install torch into .venv yourself"
        )


def requirements(extra: str) -> list[str]:
    """Requirements of pyproject.toml: what runs, plus one extra and the extras that it names."""
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10
        from pip._vendor import tomli as tomllib  # type: ignore[no-redef]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = list(project["dependencies"])
    queue = [extra]
    while queue:
        for item in project["optional-dependencies"][queue.pop()]:
            inner = re.fullmatch(r"xstage_ext\[(\w+)\]", item)
            if inner:
                queue.append(inner[1])
            else:
                wanted.append(item)
    return wanted


def missing(python: str, wanted: list[str]) -> list[str]:
    """Requirements that the environment does not meet."""
    code = (
        "import importlib.metadata as m, sys\n"
        "from pip._vendor.packaging.requirements import Requirement\n"
        "for text in sys.argv[1:]:\n"
        "    need = Requirement(text)\n"
        "    try: met = need.specifier.contains(m.version(need.name), prereleases=True)\n"
        "    except m.PackageNotFoundError: met = False\n"
        "    if not met: print(text)\n"
    )
    done = subprocess.run(
        [python, "-c", code, *wanted], capture_output=True, text=True, check=True, cwd="/"
    )
    return done.stdout.splitlines()


def install_nvcc(python: str, cuda: str) -> None:
    """nvcc from pip when this machine has none."""
    sys.path.insert(0, str(ROOT / "tools"))
    import build_facts

    if build_facts.find_nvcc_version(build_facts.find_cuda_home()) is not None:
        return
    say(f"no nvcc here; installing the one of CUDA {cuda} from pip")
    pip(python, f"cuda-toolkit[nvcc,cccl]=={cuda}.*")


def build(python: str) -> None:
    """Builds the libraries in place and installs the package for editing; needs no network."""
    say("building xstage_ext (a first build with kernels takes some minutes)")
    environment = os.environ | {"PATH": f"{pathlib.Path(python).parent}:{os.environ['PATH']}"}
    command = [python, "-m", "pip", "install", "-v", "--no-build-isolation", "--no-deps", "-e", "."]
    log = ROOT / ".venv" / "build.log"
    with log.open("w") as out:
        done = subprocess.run(
            command, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT, env=environment
        )
    lines = log.read_text().splitlines()
    summary = dict.fromkeys(line.strip() for line in lines if "xstage build:" in line)
    print("\n".join(summary), flush=True)
    if done.returncode != 0:
        print("\n".join(lines[-40:]), flush=True)
        raise stop(f"the build failed; the whole log is {log}")


def main() -> None:
    """Everything in order."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--extra", default="test", help="extra of pyproject.toml to install")
    parser.add_argument("--torch-index", default=None, help="index URL to take torch from")
    options = parser.parse_args()
    if sys.version_info < (3, 10):  # noqa: UP036  (before pip can say so)
        raise stop(
            f"Python 3.10 or newer is needed, this is {sys.version.split()[0]}; "
            "run `make PYTHON=/path/to/python3.11`"
        )
    gpu = gpu_visible()
    own_torch = torch_cuda(sys.executable) if gpu else None
    inherit = own_torch is not None and not own_torch.endswith("None")
    python = make_venv(ROOT / ".venv", inherit)
    if torch_cuda(python) is None:
        install_torch(python, gpu, options.torch_index)
    found = (torch_cuda(python) or "").split()
    say(f"torch {found[0]}, " + ("a GPU is visible" if gpu else "no GPU is visible"))
    absent = missing(python, [*requirements(options.extra), "setuptools>=77", "ninja", "wheel"])
    kernels = found[1] != "None" and os.environ.get("XSTAGE_BUILD") != "cpu"
    if kernels and not os.environ.get("XSTAGE_CUTLASS"):
        absent += missing(python, ["nvidia-cutlass>=4.2,<5"])
    if absent:
        say(f"installing {', '.join(absent)}")
        pip(python, *dict.fromkeys(absent))
    if kernels:
        install_nvcc(python, found[1])
    build(python)
    say(f"ready; the interpreter is {python}")


if __name__ == "__main__":
    main()
