"""Starts one process per rank for a scenario and collects how each ended."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

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
    **arguments: Any,
) -> list[Outcome]:
    """Run `scenarios.<scenario>` in `world` fresh processes.

    Parameters
    ----------
    scenario
        Name of a function in tests/ranks/scenarios.py.
    device
        "cpu" or "cuda"; rank r then uses GPU r.
    limit_s
        A process that lives longer is killed, and its code reported as None.
    one_gpu_each
        Show each process only its own GPU, as some launchers do.
    arguments
        Passed to the scenario.
    """
    # The store lives here, so that no rank's death takes it along.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(_REPOSITORY), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        **(env or {}),
    }
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        common.pop(name, None)
    started = time.monotonic()
    processes = []
    for rank in range(world):
        own = dict(common)
        if one_gpu_each:
            own["CUDA_VISIBLE_DEVICES"] = _visible_gpu(rank)
        task = {
            "scenario": scenario,
            "rank": rank,
            "world": world,
            "port": store.port,
            "device": device if device == "cpu" else f"cuda:{0 if one_gpu_each else rank}",
            "arguments": arguments,
        }
        out, err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.ranks.scenarios", json.dumps(task)],
            env=own,
            cwd=_REPOSITORY,
            stdout=out,
            stderr=err,
        )
        processes.append((process, out, err))
    ended: dict[int, float] = {}
    while len(ended) < world and time.monotonic() - started < limit_s:
        for rank, (process, _, _) in enumerate(processes):
            if rank not in ended and process.poll() is not None:
                ended[rank] = time.monotonic() - started
        time.sleep(0.01)
    outcomes = []
    for rank, (process, out, err) in enumerate(processes):
        code = process.poll()
        if code is None:
            process.kill()
            process.wait()
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
            file.close()
        facts: dict[str, Any] = {}
        for line in texts[0].splitlines():
            if line.startswith("{"):
                facts.update(json.loads(line))
        outcomes.append(Outcome(rank, code, ended.get(rank, limit_s), facts, *texts))
    return outcomes


def _visible_gpu(rank: int) -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[rank] if visible else str(rank)
