"""The workspace between GPUs: `torchrun --nproc-per-node 2 -m pytest tests/dist/test_workspace.py`.

Every rank runs the same tests. Fault tests start fresh processes from rank 0, since they kill them.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.dist.world import gpu_world
from tests.ranks import Outcome, launch
from xstage_ext import SymmetricWorkspace
from xstage_ext.channel import ChannelLease
from xstage_ext.errors import PeerError, WorkspaceError
from xstage_ext.handshake import handshake, handshake_bytes


@pytest.fixture(scope="module")
def group() -> Iterator[tuple[int, int]]:
    """(rank, world) of a gloo WORLD on this rank's GPU; the workspace needs only its store."""
    with gpu_world("gloo") as facts:
        yield facts


def checked(lease: ChannelLease, call: int, elements: int, slots: int = 0) -> torch.Tensor:
    workspace = lease.workspace
    ramp = torch.arange(elements, dtype=torch.float32, device="cuda")
    out = handshake(lease, ramp + 1000 * workspace.rank + call, slots=slots)
    ranks = torch.arange(workspace.world, device="cuda")
    assert torch.equal(out, ramp + 1000 * ranks[:, None] + call)
    return out


@pytest.mark.parametrize("slots", [0, 1, 3])
@pytest.mark.parametrize("elements", [1, 1001, 1 << 20])
def test_handshake(group: tuple[int, int], elements: int, slots: int) -> None:
    nbytes = handshake_bytes(group[1], 4 * elements, slots)
    with SymmetricWorkspace(nbytes=nbytes, timeout_ms=10_000) as workspace:
        assert workspace.backend == "symm_mem"
        lease = workspace.channel("h", nbytes)
        for call in range(100):
            checked(lease, call, elements, slots)
        workspace.check(synchronize=True)


def test_skewed_ranks(group: tuple[int, int]) -> None:
    """Ranks take turns in being late on the device; no call may see another call's data."""
    nbytes = handshake_bytes(group[1], 400)
    with SymmetricWorkspace(nbytes=nbytes, timeout_ms=10_000) as workspace:
        lease = workspace.channel("h", nbytes)
        outs = []
        for call in range(60):
            if call % group[1] == group[0]:
                torch.cuda._sleep(3_000_000)
            outs.append(handshake(lease, torch.full((100,), float(call), device="cuda")))
        for call, out in enumerate(outs):
            assert bool((out == call).all())


def test_subgroups_of_one_then_world(group: tuple[int, int]) -> None:
    rank, world = group
    alone = [dist.new_group([r]) for r in range(world)]
    with SymmetricWorkspace(alone[rank], 1 << 16, timeout_ms=10_000) as workspace:
        assert (workspace.rank, workspace.world, workspace.backend) == (0, 1, "local")
        checked(workspace.channel("one", handshake_bytes(1, 40)), 0, 10)
        # A rank that has made more rendezvous than the other must still find it.
        if rank == 0:
            SymmetricWorkspace(alone[0], 1 << 16, backend="symm_mem").close()
        with SymmetricWorkspace(nbytes=1 << 16, timeout_ms=10_000) as everyone:
            checked(everyone.channel("all", handshake_bytes(world, 40)), 0, 10)


def test_two_workspaces_alive_together(group: tuple[int, int]) -> None:
    first = SymmetricWorkspace(nbytes=1 << 16, timeout_ms=10_000)
    second = SymmetricWorkspace(nbytes=1 << 20, timeout_ms=10_000)
    leases = [w.channel("h", handshake_bytes(group[1], 40)) for w in (first, second)]
    for call in range(20):
        for lease in leases:
            checked(lease, call, 10)
    first.close()
    checked(leases[1], 20, 10)
    second.close()


@pytest.mark.parametrize("slots", [0, 1, 2, 4])
def test_graph_replay(group: tuple[int, int], slots: int) -> None:
    rank, world = group
    nbytes = handshake_bytes(world, 400, slots)
    with SymmetricWorkspace(nbytes=nbytes, timeout_ms=10_000) as workspace:
        lease = workspace.channel("h", nbytes)
        x = torch.zeros(100, device="cuda")
        handshake(lease, x, slots=slots)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            total = handshake(lease, x, slots=slots).sum(0)
            out = handshake(lease, total, slots=slots)
        for replay in range(100):
            x.fill_(float(replay * world + rank))
            graph.replay()
            expected = sum(replay * world + r for r in range(world))
            assert bool((out == expected).all())
        workspace.check(synchronize=True)
        del out, total


def test_refusal_and_recovery(group: tuple[int, int]) -> None:
    with SymmetricWorkspace(nbytes=1 << 16, timeout_ms=10_000) as workspace:
        lease = workspace.channel("layer.3", handshake_bytes(group[1], 40))
        checked(lease, 0, 10)
        if group[0] == 0:
            with pytest.raises(ValueError), lease.guard():
                raise ValueError("tokens: expected at most 256, got 257")
        else:
            out = handshake(lease, torch.ones(10, device="cuda"))
            with pytest.raises(PeerError, match="rank 0 refused .* at most 256, got 257"):
                workspace.check(synchronize=True)
            assert bool(out.isnan().all())
        for call in range(5):
            checked(lease, call, 10)


def test_disagreement_is_named(group: tuple[int, int]) -> None:
    with pytest.raises(WorkspaceError, match="ranks disagree in workspace: nbytes: rank 0 has"):
        SymmetricWorkspace(nbytes=1024 * (1 + group[0]), timeout_ms=10_000)


def test_fifty_workspaces_give_their_memory_back(group: tuple[int, int]) -> None:
    used = []
    for _ in range(50):
        with SymmetricWorkspace(nbytes=64 << 20, timeout_ms=10_000) as workspace:
            checked(workspace.channel("h", handshake_bytes(group[1], 40)), 0, 10)
        dist.barrier()  # the peer has unmapped this rank's block as well
        free, total = torch.cuda.mem_get_info()
        used.append(total - free)
    assert used[-1] - used[2] < 50 << 20, used


def test_out_of_memory_on_one_rank_is_told_by_all(group: tuple[int, int]) -> None:
    free, _ = torch.cuda.mem_get_info()
    eaten = torch.empty(free - (8 << 30) if group[0] == 1 else 0, dtype=torch.uint8, device="cuda")
    with pytest.raises(WorkspaceError, match="cannot allocate .* bytes: rank 1: "):
        SymmetricWorkspace(nbytes=16 << 30, timeout_ms=10_000)
    del eaten
    torch.cuda.empty_cache()
    with SymmetricWorkspace(nbytes=1 << 16, timeout_ms=10_000) as workspace:
        checked(workspace.channel("h", handshake_bytes(group[1], 40)), 0, 10)


# --- fresh processes, started by rank 0 -------------------------------------------------------


def from_rank_0(group: tuple[int, int], *tasks: dict[str, Any]) -> list[list[Outcome]]:
    """Outcomes of tasks that run at the same time; on rank 0 only, the others wait and get none.

    A task is a scenario's name and its options.
    """
    ended: list[list[Outcome]] = []
    if group[0] == 0:
        with concurrent.futures.ThreadPoolExecutor(len(tasks)) as pool:
            ended = list(
                pool.map(lambda task: launch(world=2, device="cuda", limit_s=45, **task), tasks)
            )
    dist.barrier()
    return ended


def test_killed_rank_in_three_places(group: tuple[int, int]) -> None:
    task = {"scenario": "killed", "victim": 1, "timeout_ms": 1500, "signal_name": "SIGKILL"}
    tasks = [{**task, "where": where} for where in ("before", "during", "after")]
    for survivor, _ in from_rank_0(group, *tasks):
        assert survivor.code == 7, str(survivor)
        assert survivor.facts["error"] == "PeerTimeout", str(survivor)
        assert "for rank 1 in handshake (channel 'layer.0'" in survivor.facts["text"]
        assert survivor.facts["seconds"] < 10
    task = {"scenario": "handshakes", "calls": 3, "elements": 9, "slots": [0], "group": ""}
    for outcomes in from_rank_0(group, task):
        for outcome in outcomes:
            assert outcome.code == 0, f"the GPUs are not usable afterwards: {outcome}"


def test_exception_on_one_rank(group: tuple[int, int]) -> None:
    tasks = [{"scenario": "exception", "how": how} for how in ("with", "bare")]
    for survivor, _ in from_rank_0(group, *tasks):
        assert survivor.facts["error"] == "PeerError", str(survivor)
        assert "rank 1 gave up on a call: ValueError: no such layer" in survivor.facts["text"]


def test_calls_after_a_peer_has_closed_say_so_at_once(group: tuple[int, int]) -> None:
    tasks = [{"scenario": "ends.peer_closed", "victim": 1, "how": how} for how in ("close", "exit")]
    for survivor, _ in from_rank_0(group, *tasks):
        for what in ("call", "next call", "reset", "channel", "agree"):
            assert "rank 1 has closed its workspace" in survivor.facts[what], str(survivor)
            assert survivor.facts[f"{what} seconds"] < 5.0, str(survivor)


def test_late_rank_and_recovery(group: tuple[int, int]) -> None:
    for outcomes in from_rank_0(group, {"scenario": "late", "timeout_ms": 1000}):
        for outcome, error in zip(outcomes, ["PeerTimeout", "PeerError"], strict=True):
            assert outcome.code == 0 and outcome.facts["recovered"], str(outcome)
            assert outcome.facts["error"] == error, str(outcome)


def test_six_exits(group: tuple[int, int]) -> None:
    hows = [
        "normal",
        "no close",
        "close after destroy",
        "close twice",
        "exception on rank 1",
        "del on rank 0",
    ]
    ended = from_rank_0(group, *({"scenario": "ends.leave", "how": how} for how in hows))
    for how, outcomes in zip(hows, ended, strict=False):
        codes = [7, 1] if how == "exception on rank 1" else [0, 0]
        assert [outcome.code for outcome in outcomes] == codes, "\n".join(map(str, outcomes))


def test_launchers_and_process_groups(group: tuple[int, int]) -> None:
    """A launcher that shows each process one GPU; NCCL's process group beside the workspace."""
    task = {"scenario": "handshakes", "calls": 20, "elements": 1001, "slots": [0, 2]}
    tasks = [{**task, "group": "", "one_gpu_each": True}, {**task, "group": "nccl"}]
    for outcomes in from_rank_0(group, *tasks):
        for outcome in outcomes:
            assert outcome.code == 0, str(outcome)
            assert outcome.facts["backend"] == "symm_mem"


def test_nvshmem(group: tuple[int, int]) -> None:
    import torch.distributed._symmetric_memory as symmetric_memory

    if not symmetric_memory.is_nvshmem_available():
        pytest.skip("torch has no NVSHMEM here")
    for outcomes in from_rank_0(group, {"scenario": "nvshmem"}):
        for outcome in outcomes:
            assert outcome.code == 0, str(outcome)


def test_slots_are_held_by_results(group: tuple[int, int]) -> None:
    for outcomes in from_rank_0(group, {"scenario": "slots_and_results"}):
        for outcome in outcomes:
            assert outcome.code == 0, str(outcome)
            assert "2 of 2 slots hold live results" in outcome.facts["exhausted"]
