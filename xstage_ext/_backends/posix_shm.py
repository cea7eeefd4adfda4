"""Memory of CPU processes on one host: POSIX shared memory.

Every rank makes its block under /dev/shm, all ranks map all blocks, and then each removes its name.
From there on the kernel frees the memory when the last process ends, however it ends.
"""

from __future__ import annotations

import errno
import mmap
import os
import pathlib
import secrets

import torch

from .._exchange import Exchange
from ..errors import WorkspaceError

_FOLDER = pathlib.Path("/dev/shm")


class SharedMemory:
    """One shared mapping per rank."""

    name = "shm"

    def __init__(self, exchange: Exchange, nbytes: int) -> None:
        rank = exchange.rank
        path = _FOLDER / f"xstage-{os.getpid()}-{secrets.token_hex(8)}"
        problem = None
        try:
            _create(path, nbytes)
        except OSError as error:
            problem = _explain(error, nbytes)
        try:
            # Everyone learns of a failed allocation before anyone maps, so all raise alike.
            posts = exchange.all_gather(
                {"path": str(path), "problem": problem}, "workspace allocation"
            )
            _raise_problems(posts)
            self._maps: list[mmap.mmap] = []
            try:
                self._maps = [_map(post["path"], nbytes) for post in posts]
            except OSError as error:
                problem = f"cannot map a peer's block: {error}; do all ranks share /dev/shm?"
            _raise_problems(exchange.all_gather({"problem": problem}, "workspace mapping"))
        finally:
            path.unlink(missing_ok=True)
        self._blocks = [torch.frombuffer(m, dtype=torch.uint8) for m in self._maps]
        self.addresses = [block.data_ptr() for block in self._blocks]
        self.own_ranks = [rank]

    def block(self, rank: int) -> torch.Tensor:
        return self._blocks[rank]

    def free(self) -> None:
        # The mapping goes with the last tensor over it; closing it under a live view would fault.
        self._blocks = []
        self._maps = []


def _create(path: pathlib.Path, nbytes: int) -> None:
    handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        # Reserves the pages now: a full /dev/shm is an error here and not a SIGBUS later.
        os.posix_fallocate(handle, 0, nbytes)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(handle)


def _map(path: str, nbytes: int) -> mmap.mmap:
    handle = os.open(path, os.O_RDWR)
    try:
        return mmap.mmap(handle, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(handle)


def _explain(error: OSError, nbytes: int) -> str:
    if error.errno == errno.ENOSPC:
        facts = os.statvfs(_FOLDER)
        return (
            f"{_FOLDER} has {facts.f_bavail * facts.f_frsize} bytes free, the block needs "
            f"{nbytes}; enlarge it (containers: --shm-size)"
        )
    return f"cannot make a block of {nbytes} bytes under {_FOLDER}: {error}"


def _raise_problems(posts: list[dict[str, str | None]]) -> None:
    problems = [f"rank {r}: {post['problem']}" for r, post in enumerate(posts) if post["problem"]]
    if problems:
        raise WorkspaceError("workspace: " + "; ".join(problems))
