"""Starts one process per rank for a scenario and collects how each ended."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch.distributed import TCPStore

_REPOSITORY = pathlib.Path(__file__).parent.parent.parent


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How one rank ended.

    `code` is its exit status (negative: a signal; None: it hung and was killed), `facts` what it
    reported by `scenarios.report`, `seconds` its whole life.
    """

    rank: int
    code: int | None
    seconds: float
    facts: dict[str, Any]
    stdout: str
    stderr: str

    def __str__(self) -> str:
        return (
            f"rank {self.rank}: code {self.code}, {self.seconds:.1f} s, {self.facts}\n"
            f"--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"
        )


def launch(
    scenario: str,
    world: int,
    *,
    device: str = "cpu",
    limit_s: float = 60,
    one_gpu_each: bool = False,
    env: dict[str, str] | None = None,
    fresh: bool = False,
    **arguments: Any,
) -> list[Outcome]:
    """Run `scenarios.<scenario>` in `world` processes.

    Parameters
    ----------
    scenario
        Name of a function in tests/ranks/scenarios.py, or "module.function" for another file there.
    device
        "cpu" or "cuda"; rank r then uses GPU r.
    limit_s
        A process that lives longer is killed, and its code reported as None.
    one_gpu_each
        Show each process only its own GPU, as some launchers do.
    env
        Environment variables for the ranks.
    fresh
        Start an interpreter per rank, as users do, for what happens at an interpreter's exit.
        Otherwise CPU ranks are forked from a server that has imported torch once, which is faster.
    arguments
        Passed to the scenario.
    """
    # The store lives here, so that no rank's death takes it along.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        processes: list[subprocess.Popen[bytes] | BaseProcess] = []
        for rank in range(world):
            task = {
                "scenario": scenario,
                "rank": rank,
                "world": world,
                "port": store.port,
                "device": device if device == "cpu" else f"cuda:{0 if one_gpu_each else rank}",
                "arguments": arguments,
                "env": {**_ENVIRONMENT, **(env or {})},
            }
            if one_gpu_each:
                task["env"]["CUDA_VISIBLE_DEVICES"] = _visible_gpu(rank)
            start = _start_fresh if fresh or device != "cpu" else _start_forked
            processes.append(start(task, pathlib.Path(folder, str(rank))))
        ended: dict[int, float] = {}
        while len(ended) < world and time.monotonic() - started < limit_s:
            for rank, process in enumerate(processes):
                if rank not in ended and _code(process) is not None:
                    ended[rank] = time.monotonic() - started
            time.sleep(0.01)
        outcomes = []
        for rank, process in enumerate(processes):
            code = _code(process)
            if code is None:
                process.kill()
                _code(process, wait=True)
            texts = [
                pathlib.Path(folder, f"{rank}.{kind}").read_text(errors="replace")
                for kind in ("out", "err")
            ]
            facts: dict[str, Any] = {}
            for line in texts[0].splitlines():
                if line.startswith("{"):
                    facts.update(json.loads(line))
            outcomes.append(Outcome(rank, code, ended.get(rank, limit_s), facts, *texts))
    return outcomes


def left_behind() -> list[str]:
    """Blocks in /dev/shm whose maker has ended; other makers may be tests that still run."""
    names = [path.name for path in pathlib.Path("/dev/shm").glob("xstage-*")]
    return [name for name in names if not pathlib.Path("/proc", name.split("-")[1]).exists()]


_ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def _start_fresh(task: dict[str, Any], output: pathlib.Path) -> subprocess.Popen[bytes]:
    environment = {name: os.environ[name] for name in os.environ if name not in _LAUNCHER_VARIABLES}
    path = os.pathsep.join([str(_REPOSITORY), os.environ.get("PYTHONPATH", "")])
    with open(f"{output}.out", "wb") as out, open(f"{output}.err", "wb") as err:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.ranks.scenarios", json.dumps(task)],
            env={**environment, "PYTHONPATH": path, **task["env"]},
            cwd=_REPOSITORY,
            stdout=out,
            stderr=err,
        )


def _start_forked(task: dict[str, Any], output: pathlib.Path) -> BaseProcess:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [f"tests.ranks.{file.stem}" for file in pathlib.Path(__file__).parent.glob("[a-z]*.py")]
    )
    for kind in ("out", "err"):
        pathlib.Path(f"{output}.{kind}").touch()
    process = context.Process(target=_play, args=(task, str(output)))
    process.start()
    return process


def _play(task: dict[str, Any], output: str) -> None:
    """One forked rank: its own output files and environment, then the scenario."""
    from . import scenarios

    for number, kind in ((1, "out"), (2, "err")):
        handle = os.open(f"{output}.{kind}", os.O_WRONLY | os.O_APPEND)
        os.dup2(handle, number)
        os.close(handle)
    for name in _LAUNCHER_VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(task["env"])
    torch.set_num_threads(1)
    scenarios.play(task)


def _code(process: subprocess.Popen[bytes] | BaseProcess, wait: bool = False) -> int | None:
    """Exit status so far; negative for a signal."""
    if isinstance(process, subprocess.Popen):
        return process.wait() if wait else process.poll()
    process.join(None if wait else 0)
    return process.exitcode


def _visible_gpu(rank: int) -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[rank] if visible else str(rank)
