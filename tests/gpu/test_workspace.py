"""The workspace's protocol on one GPU: virtual ranks, deadlines, graphs, streams, slots."""

from __future__ import annotations

import time

import pytest
import torch

from xstage_ext import SymmetricWorkspace
from xstage_ext.channel import ChannelLease
from xstage_ext.errors import PeerTimeout, WorkspaceError
from xstage_ext.handshake import handshake, handshake_bytes, handshake_virtual


def payloads(world: int, call: int, shape: tuple[int, ...] = (1001,)) -> list[torch.Tensor]:
    return [torch.randn(shape, device="cuda") + 10 * r + call for r in range(world)]


def lease_of(world: int, row_bytes: int, slots: int = 0, timeout_ms: int = 20_000) -> ChannelLease:
    nbytes = handshake_bytes(world, row_bytes, slots)
    workspace = SymmetricWorkspace(
        nbytes=2 * nbytes, device="cuda", world=world, timeout_ms=timeout_ms
    )
    return workspace.channel("h", nbytes)


@pytest.mark.parametrize("world", range(1, 9))
@pytest.mark.parametrize("slots", [0, 1, 3])
def test_virtual_handshake(world: int, slots: int) -> None:
    lease = lease_of(world, 4004, slots)
    lease.region().fill_(255)
    for call in range(20):
        sent = payloads(world, call)
        for out in handshake_virtual(lease, sent, slots=slots):
            assert torch.equal(out, torch.stack(sent))
        del out
    lease.workspace.check(synchronize=True)
    lease.workspace.close()


@pytest.mark.parametrize("num_bytes", [0, 1, 15, 16, 17, 4096, (1 << 20) + 3, 5 << 20])
def test_sizes_and_changing_grids(num_bytes: int) -> None:
    """Calls of one channel with another number of blocks each time: arrivals count every grid."""
    lease = lease_of(3, 5 << 20)
    for size in (num_bytes, 5 << 20, num_bytes, 17):
        sent = [torch.randint(0, 255, (size,), dtype=torch.uint8, device="cuda") for _ in range(3)]
        for out in handshake_virtual(lease, sent):
            assert torch.equal(out, torch.stack(sent))
    lease.workspace.check(synchronize=True)


def test_deadline_fires_and_a_reset_recovers() -> None:
    lease = lease_of(2, 64, timeout_ms=300)
    workspace = lease.workspace
    sent = payloads(2, 0, (16,))
    handshake_virtual(lease, sent)
    started = time.monotonic()
    out = torch.ops.xstage.handshake(sent[0], lease.words(rank=0))  # rank 1 does not call
    torch.cuda.synchronize()
    assert 0.25 < time.monotonic() - started < 3
    assert bool(out.isnan().all()), "a call that gave up must not hand out old data"
    with pytest.raises(PeerTimeout) as caught:
        workspace.check()
    text = str(caught.value)
    assert "rank 0 of 2 waited 30" in text
    assert "for rank 1 in handshake (channel 'h', call 2): expected 2, saw 1" in text
    assert caught.value.record.src_rank == 1
    with pytest.raises(RuntimeError, match="failed on rank 0 waiting for rank 1"):
        torch.ops.xstage.handshake(sent[0], lease._words[0])  # the raw operator refuses as well
    for call in range(3):  # the next call resets first
        sent = payloads(2, call, (16,))
        for out in handshake_virtual(lease, sent):
            assert torch.equal(out, torch.stack(sent))
    workspace.check(synchronize=True)


def test_a_refusal_ends_the_wait_at_once() -> None:
    lease = lease_of(2, 64, timeout_ms=20_000)
    words = [lease.words(rank=r) for r in range(2)]
    side = torch.cuda.Stream()  # making a stream may wait for running kernels
    payload = torch.ones(16, device="cuda")
    torch.cuda.synchronize()
    started = time.monotonic()
    out = torch.ops.xstage.handshake(payload, words[0])
    with torch.cuda.stream(side):  # the first call waits on the current stream
        torch.ops.xstage.workspace_announce(lease.region(1), 1, words[1])
    torch.cuda.synchronize()
    assert time.monotonic() - started < 5
    assert bool(out.isnan().all())
    with pytest.raises(RuntimeError, match="rank 1 refused a call on its host"):
        lease.workspace.check()


def test_plans_that_differ_are_found_in_the_signal() -> None:
    lease = lease_of(2, 64)
    words = lease.words(digest=1, rank=0) + lease.words(digest=2, rank=1)
    outs = torch.ops.xstage.handshake_virtual(payloads(2, 0, (16,)), words)
    torch.cuda.synchronize()
    assert all(bool(out.isnan().all()) for out in outs)
    with pytest.raises(WorkspaceError, match="made different calls in handshake"):
        lease.workspace.check()


@pytest.mark.parametrize("slots", [0, 1, 2, 4])
def test_cuda_graph_replays(slots: int) -> None:
    lease = lease_of(4, 400, slots)
    inputs = payloads(4, 0, (100,))
    for _ in range(3):
        handshake_virtual(lease, inputs, slots=slots)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        middle = [out.sum(0) for out in handshake_virtual(lease, inputs, slots=slots)]
        outs = handshake_virtual(lease, middle, slots=slots)
    eager_slots = slots > 1
    for replay in range(100):
        sent = payloads(4, replay, (100,))
        for held, new in zip(inputs, sent, strict=True):
            held.copy_(new)
        graph.replay()
        if replay % 10 == 0 and eager_slots:  # an eager call between replays gets another slot
            between = handshake_virtual(lease, sent, slots=slots)
            assert all(torch.equal(out, torch.stack(sent)) for out in between)
            del between
        expected = torch.stack(sent).sum(0).expand(4, 100)
        for out in outs:
            assert torch.equal(out, expected)
    lease.workspace.check(synchronize=True)


def test_first_call_may_be_captured() -> None:
    lease = lease_of(2, 400)
    inputs = payloads(2, 0, (100,))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = handshake_virtual(lease, inputs)
    for _ in range(3):
        graph.replay()
    assert torch.equal(outs[0], torch.stack(inputs))
    lease.workspace.check(synchronize=True)


def test_side_stream_behind_a_slow_kernel() -> None:
    lease = lease_of(2, 400)
    side = torch.cuda.Stream()
    sent = payloads(2, 0, (100,))
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        outs = handshake_virtual(lease, sent)
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(outs[1], torch.stack(sent))


def test_two_channels_on_two_streams() -> None:
    world, nbytes = 2, handshake_bytes(2, 400)
    workspace = SymmetricWorkspace(nbytes=4 * nbytes, device="cuda", world=world, timeout_ms=20_000)
    leases = [workspace.channel(name, nbytes) for name in "ab"]
    streams = [torch.cuda.Stream() for _ in leases]
    results: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
    for call in range(200):
        for lease, stream in zip(leases, streams, strict=True):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                sent = payloads(world, call, (100,))
                results.append((sent, handshake_virtual(lease, sent)))
    torch.cuda.synchronize()
    for sent, outs in results:
        assert all(torch.equal(out, torch.stack(sent)) for out in outs)
    workspace.check()


def test_slots_exhausted_in_words_and_results_outlive_the_workspace() -> None:
    lease = lease_of(2, 64, slots=2)
    kept = [handshake_virtual(lease, payloads(2, call, (16,)), slots=2) for call in range(2)]
    copies = [out.clone() for outs in kept for out in outs]
    with pytest.raises(RuntimeError, match="2 of 2 slots hold live results"):
        handshake_virtual(lease, payloads(2, 2, (16,)), slots=2)
    lease.workspace.close()
    alive = [out for outs in kept for out in outs]
    assert all(torch.equal(a, b) for a, b in zip(alive, copies, strict=True))


def test_fifty_workspaces_give_their_memory_back() -> None:
    used = []
    for _ in range(50):
        with SymmetricWorkspace(nbytes=64 << 20, device="cuda", world=2) as workspace:
            lease = workspace.channel("h", handshake_bytes(2, 64))
            handshake_virtual(lease, payloads(2, 0, (16,)))
        free, total = torch.cuda.mem_get_info()
        used.append(total - free)
    assert used[-1] - used[2] < 50 << 20


def test_world_of_one() -> None:
    with SymmetricWorkspace(nbytes=1 << 16, device="cuda", backend="symm_mem") as workspace:
        lease = workspace.channel("h", handshake_bytes(1, 64, 2))
        x = torch.randn(16, device="cuda")
        assert torch.equal(handshake(lease, x, slots=2)[0], x)
        workspace.check(synchronize=True)


def test_operator_passes_opcheck() -> None:
    lease = lease_of(1, 64)
    torch.library.opcheck(
        torch.ops.xstage.handshake.default,
        (torch.randn(16, device="cuda"), lease.words(rank=0), 0),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_cpu_tensor_is_refused() -> None:
    lease = lease_of(1, 64)
    with pytest.raises(RuntimeError, match="workspace: expected CPU memory like the tensors"):
        handshake(lease, torch.ones(16))


def test_two_ranks_cannot_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from xstage_ext import _groups

    choice = _groups.BackendChoice("symm_mem", torch.device("cuda", 0), 2, False)
    place = _groups._place(choice.device)
    problem = _groups._placement_problem(0, choice, [place, place])
    assert problem is not None and "ranks 0 and 1 share one GPU" in problem
    monkeypatch.setattr(_groups, "peer_access", lambda index, uuid: False)
    problem = _groups._placement_problem(0, choice, [place, {**place, "gpu": "another"}])
    assert problem is not None and "no peer-to-peer access to the GPU of rank 1" in problem
    far = {**place, "host": "b", "boot": "other"}
    problem = _groups._placement_problem(0, choice, [place, far])
    assert problem is not None and "a workspace serves one node" in problem
