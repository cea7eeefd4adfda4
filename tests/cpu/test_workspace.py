"""The symmetric workspace over POSIX shared memory, between processes, and in one process."""

from __future__ import annotations

import pytest
import torch

from tests.ranks import Outcome, launch, left_behind
from xstage_ext import SymmetricWorkspace, _faults, _groups
from xstage_ext.errors import WorkspaceError
from xstage_ext.handshake import handshake, handshake_bytes, handshake_virtual
from xstage_ext.workspace import region_bytes, workspace_bytes


def assert_clean(outcomes: list[Outcome]) -> None:
    """Every rank ended by itself, without error, and left nothing in /dev/shm."""
    for outcome in outcomes:
        assert outcome.code == 0, str(outcome)
    assert not left_behind()


# --- good cases -------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_handshake_between_processes(world: int) -> None:
    outcomes = launch("handshakes", world, calls=30, elements=1001, slots=[0, 1, 3], group="")
    assert_clean(outcomes)
    assert outcomes[0].facts["backend"] == ("local" if world == 1 else "shm")


def test_handshake_over_a_process_group() -> None:
    assert_clean(launch("handshakes", 3, calls=5, elements=7, slots=[0], group="gloo"))


def test_two_channels_are_independent() -> None:
    assert_clean(launch("two_channels", 2))


@pytest.mark.parametrize(
    ("world", "first"), [(4, [[0, 2], [1, 3]]), (3, [[0, 1]]), (4, [[3, 1, 0]])], ids=str
)
def test_subgroups_then_world(world: int, first: list[list[int]]) -> None:
    assert_clean(launch("subgroups", world, first=[sorted(g) for g in first], backend="gloo"))


def test_fifty_workspaces_leave_nothing() -> None:
    outcomes = launch("create_and_close", 2, times=50)
    assert_clean(outcomes)
    for outcome in outcomes:
        first, last = outcome.facts["first"], outcome.facts["last"]
        assert last["files"] <= first["files"], outcome
        assert last["mapped"] == 0, outcome
        assert last["resident"] - first["resident"] < 8 << 20, outcome


def test_slots_are_held_by_results() -> None:
    outcomes = launch("slots_and_results", 2)
    assert_clean(outcomes)
    for outcome in outcomes:
        assert "2 of 2 slots hold live results" in outcome.facts["exhausted"]


def test_a_full_dev_shm_is_told_in_numbers() -> None:
    for outcome in launch("too_large", 2):
        assert outcome.facts["error"] == "WorkspaceError", str(outcome)
        assert "/dev/shm has " in outcome.facts["text"]
        assert "enlarge it (containers: --shm-size)" in outcome.facts["text"]


# --- one process ------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 5, 8])
@pytest.mark.parametrize("slots", [0, 3])
def test_virtual_ranks(world: int, slots: int) -> None:
    with SymmetricWorkspace(nbytes=1 << 20, device="cpu", world=world) as workspace:
        assert (workspace.backend, workspace.own_ranks) == ("virtual", list(range(world)))
        lease = workspace.channel("h", handshake_bytes(world, 36, slots))
        for call in range(7):
            payloads = [torch.full((3, 3), 10.0 * r + call) for r in range(world)]
            for out in handshake_virtual(lease, payloads, slots=slots):
                assert torch.equal(out, torch.stack(payloads))


def test_bytes_are_known_beforehand() -> None:
    sizes = [1, 1024, 5000]
    with SymmetricWorkspace(nbytes=region_bytes(sizes), device="cpu") as workspace:
        assert workspace.bytes() == workspace_bytes(sizes)
        leases = [workspace.channel(f"c{i}", size) for i, size in enumerate(sizes)]
        offsets = [lease.offset for lease in leases]
        assert all(offset % 1024 == 0 for offset in offsets)
        assert offsets == sorted(offsets)
        assert leases[-1].offset + 5000 <= workspace.bytes()
        with pytest.raises(WorkspaceError, match="needs 1024 bytes in one piece"):
            workspace.channel("one more", 1)


def test_epochs_do_not_wrap() -> None:
    """Years of calls: epochs keep 40 bits beside the digest in a signal."""
    facts = _faults.layout()
    with SymmetricWorkspace(nbytes=1 << 16, device="cpu", world=2) as workspace:
        lease = workspace.channel("h", handshake_bytes(2, 4, 2))
        first = facts.channel_offset + lease.index * facts.channel_bytes
        for begun in (2**32 - 2, 2**39):
            for rank in range(2):
                block = workspace._resources.memory.block(rank)
                block[first : first + 8].view(torch.int64).fill_(begun)
            for call in range(4):
                sent = [torch.tensor([float(10 * r + call)]) for r in range(2)]
                outs = handshake_virtual(lease, sent, slots=2)
                assert all(torch.equal(out, torch.stack(sent)) for out in outs)
                del outs


def test_peers_may_write_only_what_is_reserved() -> None:
    with SymmetricWorkspace(nbytes=1 << 14, device="cpu", world=2) as workspace:
        left, lease = workspace.channel("left", 1024), workspace.channel("h", 4096)
        right = workspace.channel("right", 1024)
        for rank in range(2):
            for other in (left, right):
                other.region(rank).fill_(7)
        handshake_virtual(lease, [torch.ones(1024, dtype=torch.uint8)] * 2)
        for rank in range(2):
            assert bool((left.region(rank) == 7).all() and (right.region(rank) == 7).all())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"world": 9}, "group of 9 ranks: expected 1 to 8"),
        ({"world": 0}, "group of 0 ranks: expected 1 to 8"),
        ({"backend": "ring"}, "backend: expected one of"),
        ({"backend": "symm_mem"}, "backend 'symm_mem' has no memory on cpu"),
        ({"backend": "shm", "world": 2}, "world is for virtual ranks"),
        ({"nbytes": -1}, "nbytes and timeout_ms: expected 0 or more, got -1"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_bad_arguments(options: dict[str, object], text: str) -> None:
    with pytest.raises(WorkspaceError, match=text):
        SymmetricWorkspace(**{"device": "cpu", **options})  # type: ignore[arg-type]


def test_nine_processes_are_refused_before_any_exchange() -> None:
    store = torch.distributed.HashStore()
    with pytest.raises(WorkspaceError, match="group of 9 ranks"):
        SymmetricWorkspace.from_store(store, 0, 9, 1024, device="cpu")


def test_ranks_on_two_hosts_or_without_a_path_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = _groups.BackendChoice("shm", torch.device("cpu"), 2, False)
    here = _groups._place(choice.device)
    assert _groups._placement_problem(0, choice, [here, here]) is None
    problem = _groups._placement_problem(0, choice, [here, {"host": "b", "boot": "other"}])
    assert problem is not None and "the ranks are on 2 hosts (rank 0 has" in problem

    choice = _groups.BackendChoice("symm_mem", torch.device("cuda", 0), 2, False)
    places = [{**here, "gpu": "GPU-a"}, {**here, "gpu": "GPU-b"}]
    monkeypatch.setattr(_groups, "peer_access", lambda index, uuid: None)  # not visible here
    assert _groups._placement_problem(1, choice, places) is None
    monkeypatch.setattr(_groups, "peer_access", lambda index, uuid: False)
    problem = _groups._placement_problem(1, choice, places)
    assert problem is not None
    assert "rank 1 on cuda:0 has no peer-to-peer access to the GPU of rank 0 (GPU-a)" in problem
    problem = _groups._placement_problem(1, choice, [places[0], places[0]])
    assert problem is not None and "ranks 0 and 1 share one GPU (GPU-a)" in problem


def test_operator_errors_name_the_argument() -> None:
    with SymmetricWorkspace(nbytes=1 << 14, device="cpu") as workspace:
        lease = workspace.channel("h", 2048)
        with pytest.raises(RuntimeError, match="payload: expected a contiguous tensor"):
            handshake(lease, torch.ones(4, 4).t())
        with pytest.raises(RuntimeError, match="this call needs 8192 bytes .* which has 2048"):
            handshake(lease, torch.ones(1000))
        assert torch.equal(handshake(lease, torch.ones(4)), torch.ones(1, 4))
        with pytest.raises(RuntimeError, match="not a wire message"):
            torch.ops.xstage.handshake(torch.ones(4), [1, 2, 3])
        broken = lease.words()
        broken[5] = 9
        with pytest.raises(RuntimeError, match="workspace: world: expected 1 to 8, got 9"):
            torch.ops.xstage.handshake(torch.ones(4), broken)


def test_channels_run_out_in_words() -> None:
    with SymmetricWorkspace(nbytes=1 << 16, device="cpu") as workspace:
        for index in range(32):
            workspace.channel(f"c{index}", 1024)
        with pytest.raises(WorkspaceError, match="all 32 channels are in use"):
            workspace.channel("c32", 1024)


def test_compiles_without_graph_breaks() -> None:
    with SymmetricWorkspace(nbytes=1 << 14, device="cpu") as workspace:
        lease = workspace.channel("h", 4096)
        words = lease.words()

        def block(x: torch.Tensor) -> torch.Tensor:
            return torch.ops.xstage.handshake(x * 2, words)[0] + 1

        compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
        for call in range(3):
            x = torch.full((8,), float(call))
            assert torch.equal(compiled(x), 2 * x + 1)


def test_fake_matches_the_operator() -> None:
    with SymmetricWorkspace(nbytes=1 << 16, device="cpu") as workspace:
        words = workspace.channel("h", 8192).words()
        for slots in (0, 2):
            torch.library.opcheck(
                torch.ops.xstage.handshake.default,
                (torch.randn(5, 3), words, slots),
                test_utils=("test_schema", "test_faketensor"),
            )
