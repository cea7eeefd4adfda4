"""Ranks that come late, or ask for different things: all are told, and the next calls are right."""

from __future__ import annotations

import itertools
import random
import re
import threading
import time

import pytest
from torch._C import _DistNetworkError as DistNetworkError
from torch.distributed import HashStore

from tests.ranks import Outcome, launch, left_behind
from tests.ranks.apart import NATIVE
from xstage_ext import SymmetricWorkspace
from xstage_ext._attention_memory import AttentionMemory
from xstage_ext._exchange import Exchange
from xstage_ext.errors import PeerError, PeerTimeout, WorkspaceError

WORLDS = [(2, 0), (2, 1), (3, 0), (3, 1), (3, 2)]


def assert_together(outcomes: list[Outcome]) -> None:
    """Every rank ended in good order."""
    assert [outcome.code for outcome in outcomes] == [0] * len(outcomes), "\n".join(
        map(str, outcomes)
    )
    assert not left_behind()


# --- rounds ---------------------------------------------------------------------------------------


def everywhere(world: int, body) -> None:
    """Run `body` for every rank, in threads; the first error of any is raised."""
    errors: list[BaseException] = []

    def caught(rank: int) -> None:
        try:
            body(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=caught, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("world", [2, 3])
def test_a_round_ends_alike_on_all_ranks_whoever_is_late(world: int) -> None:
    """Ranks come around each other's deadline, before it and after it."""
    store = HashStore()
    outcomes: list[list[object]] = [[] for _ in range(world)]

    def body(rank: int) -> None:
        exchange = Exchange(store, rank, world, 4)
        pauses = random.Random(rank)
        for number in range(150):
            time.sleep(pauses.uniform(0, 0.006))
            try:
                outcomes[rank].append(exchange.all_gather(number, "a round"))
            except (PeerError, PeerTimeout):
                outcomes[rank].append("void")
        exchange.seconds = 60
        assert exchange.all_gather("last", "the last round") == ["last"] * world
        assert exchange.all_gather("done", "the end") == ["done"] * world

    everywhere(world, body)
    for number, ends in enumerate(zip(*outcomes, strict=True)):
        assert all(end == ends[0] for end in ends), (number, ends)
        assert ends[0] in ("void", [number] * world)
    # A round leaves nothing but the two that somebody may still read.
    assert store.num_keys() <= world + 2 * (world + 1)


def test_a_late_rank_hears_of_every_round_that_it_missed() -> None:
    store = HashStore()
    early, late = (Exchange(store, rank, 2, 50) for rank in range(2))
    for what in ("a", "b"):
        with pytest.raises(PeerTimeout, match=f"rank 0 of 2 waited 50 ms for rank 1 in {what}"):
            early.all_gather(None, what)
    with pytest.raises(PeerError, match="rank 1 of 2 hears that rank 0 gave up on a: PeerTimeout"):
        late.all_gather(None, "a")
    late.answer("refused", "b")  # has left the call without looking
    late.answer("c", "c")
    assert early.all_gather("c", "c") == ["c", "c"]
    with pytest.raises(PeerTimeout):
        early.all_gather(None, "d")
    late.catch_up("e")
    late.answer("e", "e")
    assert early.all_gather("e", "e") == ["e", "e"]


def test_an_interrupted_rank_says_that_it_left(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    early, late = (Exchange(store, rank, 2, 10_000) for rank in range(2))
    with monkeypatch.context() as patch:
        patch.setattr("time.sleep", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            early.all_gather(None, "a")
    with pytest.raises(PeerError, match="rank 0 gave up on a: KeyboardInterrupt"):
        late.all_gather(None, "a")


def test_an_interrupt_stays_one_where_the_store_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = Exchange(HashStore(), 0, 2, 10_000)

    def lost(_: str) -> str:
        raise DistNetworkError("the store is gone")

    monkeypatch.setattr(exchange, "_decide", lost)
    monkeypatch.setattr("time.sleep", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        exchange.all_gather(None, "a")
    assert not exchange.met


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_that_come_for_different_things_all_raise(world: int) -> None:
    store = HashStore()

    def body(rank: int) -> None:
        exchange = Exchange(store, rank, world, 10_000)
        mine, other = ("a", "b") if rank == 1 else ("b", "a")
        with pytest.raises(
            PeerError, match=f"rank {rank} of {world} came to {mine}, .* to {other}"
        ):
            exchange.barrier(mine)
        assert not exchange.met
        assert exchange.all_gather(rank, "c") == list(range(world))
        assert exchange.met

    everywhere(world, body)


def test_a_rank_that_leaves_between_two_rounds_voids_the_second() -> None:
    store = HashStore()

    def body(rank: int) -> None:
        exchange = Exchange(store, rank, 2, 10_000)
        if rank == 0:
            with pytest.raises(MemoryError), exchange.before("second half"):
                exchange.barrier("first half")
                raise MemoryError("no room")
        else:
            with exchange.before("second half"):
                exchange.barrier("first half")
            with pytest.raises(PeerError, match="gave up on second half: MemoryError: no room"):
                exchange.barrier("second half")
        with pytest.raises((PeerError, PeerTimeout)), exchange.before("second half"):
            exchange.seconds = 0.05
            if rank == 0:
                time.sleep(0.2)
            exchange.barrier("first half")  # void: the ranks stay in step without the second
        exchange.seconds = 10
        assert exchange.all_gather(rank, "next") == [0, 1]

    everywhere(2, body)


def test_a_dead_peer_costs_one_key_a_round() -> None:
    """The word that the peer would find."""
    store = HashStore()
    alive = Exchange(store, 0, 2, 1)
    keys = store.num_keys()
    for number in range(1, 6):
        with pytest.raises(PeerTimeout):
            alive.all_gather("value", "a")
        assert store.num_keys() == keys + number


# --- late ranks -----------------------------------------------------------------------------------


def assert_told(outcomes: list[Outcome], late: int, times: int, what: str) -> None:
    """The late rank hears of what the others, or one of them, waited for in vain."""
    assert_together(outcomes)
    for outcome in outcomes:
        errors = outcome.facts["errors"]
        assert len(errors) == times and what in errors[-1], str(outcome)
        if outcome.rank == late:
            assert all(error.startswith("PeerError: ") for error in errors), str(outcome)
            assert f"gave up on {what}: PeerTimeout: " in errors[-1], str(outcome)
            # On a busy machine the others may miss each other too.
            assert re.search(rf"for rank (\d and )*{late}\b", errors[-1]), str(outcome)
    last = [outcome.facts["errors"][-1] for outcome in outcomes]
    assert any(error.startswith("PeerTimeout: ") for error in last), last


@pytest.mark.parametrize(("world", "late"), WORLDS)
def test_late_to_a_call_and_to_resets(world: int, late: int) -> None:
    outcomes = launch("apart.calls_and_resets", world, late=late)
    assert_told(outcomes, late, 3, "workspace reset")


@pytest.mark.parametrize(("world", "late"), WORLDS)
def test_late_to_the_second_half_of_a_reset(world: int, late: int) -> None:
    outcomes = launch("apart.second_half", world, late=late)
    assert_told(outcomes, late, 1, "workspace reset, second half")


@pytest.mark.parametrize(("world", "late"), WORLDS)
def test_reset_on_every_rank_recovers(world: int, late: int) -> None:
    assert_together(launch("apart.resets", world, late=late))


@pytest.mark.parametrize("where", ["between", "first half", "second half"])
@pytest.mark.parametrize("world", [2, 3])
def test_a_reset_that_a_rank_leaves_fails_for_all_or_for_it_alone(world: int, where: str) -> None:
    outcomes = launch("apart.left_reset", world, where=where)
    assert_together(outcomes)
    own, *others = [outcome.facts["error"] for outcome in outcomes]
    assert own == "KeyboardInterrupt: "
    for error in others:
        if where == "second half":  # by then every block is zero
            assert error == ""
        else:
            assert error.startswith("PeerError: "), error
            assert "gave up on workspace reset, second half: KeyboardInterrupt" in error


@pytest.mark.parametrize("world", [2, 3])
def test_a_reset_does_not_meet_another_collective_call(world: int) -> None:
    outcomes = launch("apart.other_rounds", world)
    assert_together(outcomes)
    for outcome in outcomes:
        assert outcome.facts["error"].startswith("PeerError: "), str(outcome)
        assert "every rank makes the same calls in the same order" in outcome.facts["error"]


@pytest.mark.parametrize("kind", ["late", "fails"])
@pytest.mark.parametrize("late", [0, 1])
def test_a_channel_that_fails_keeps_no_room(late: int, kind: str) -> None:
    outcomes = launch("apart.void_channel", 2, late=late, kind=kind)
    assert_together(outcomes)
    for outcome in outcomes:
        assert outcome.facts["error"], str(outcome)
        assert outcome.facts["name"] == "layer.0", str(outcome)


def test_a_channel_is_had_by_all_or_none() -> None:
    outcomes = launch("apart.interrupted_channel", 2)
    assert_together(outcomes)
    assert [outcome.facts["error"] for outcome in outcomes] == ["KeyboardInterrupt: ", ""]
    assert outcomes[0].facts["offset"] == outcomes[1].facts["offset"]


@pytest.mark.parametrize("kind", ["fallback", "channel"])
def test_an_interrupted_call_is_refused(kind: str) -> None:
    outcomes = launch("apart.interrupted_call", 2, kind=kind)
    assert_together(outcomes)
    own, other = [outcome.facts["error"] for outcome in outcomes]
    assert own == "KeyboardInterrupt: "
    assert other.startswith("PeerError: ") and "KeyboardInterrupt" in other


@pytest.mark.parametrize(
    ("kind", "world", "late"), [("moe", 2, 0), ("moe", 3, 2), ("attention", 2, 1)]
)
def test_late_to_calls_of_a_fallback(kind: str, world: int, late: int) -> None:
    outcomes = launch("apart.fallback", world, late=late, kind=kind)
    assert_told(outcomes, late, 2, "a call of " + ("megamoe" if kind == "moe" else "ulysses"))


# --- ranks that want different things -------------------------------------------------------------

FORCED = {"moe": "fallback", "attention": "torch"}


def wishes(kind: str, *impls: str, lacking: tuple[str, ...] = ()) -> list[Outcome]:
    """The outcomes of one rank per `impl`: "native", "forced" or "auto"."""
    words = {"native": NATIVE[kind], "forced": FORCED[kind], "auto": "auto"}
    return launch(
        "apart.other_wishes",
        len(impls),
        kind=kind,
        impls=[words[impl] for impl in impls],
        lacking=list(lacking) or [""] * len(impls),
    )


@pytest.mark.parametrize(
    "impls",
    [("native", "forced"), ("forced", "native"), ("auto", "native", "forced")],
    ids=" ".join,
)
@pytest.mark.parametrize("kind", ["moe", "attention"])
def test_all_ranks_refuse_a_fallback_that_one_refuses(kind: str, impls: tuple[str, ...]) -> None:
    outcomes = wishes(kind, *impls)
    assert_together(outcomes)
    for outcome in outcomes:
        insists = f"impl={NATIVE[kind]}"
        if impls[outcome.rank] != "native":
            insists = f"rank {impls.index('native')}: {insists}"
        reason = f"impl={FORCED[kind]}"
        if impls[outcome.rank] != "forced":
            reason = f"rank {impls.index('forced')}: {reason}"
        error = outcome.facts["own"]
        assert error.startswith("PlanError: ") and f": {insists}, but {reason}" in error
        assert outcome.facts["plain"] in ("native", "fused"), str(outcome)


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("kind", ["moe", "attention"])
def test_a_rank_that_insists_and_has_no_kernels_tells_all(kind: str, who: int) -> None:
    lacking = ["", ""]
    lacking[who] = "kernels"
    for impls in itertools.permutations(["native", "auto"]):
        outcomes = wishes(kind, *impls, lacking=tuple(lacking))
        assert_together(outcomes)
        for outcome in outcomes:
            assert outcome.facts["own"].startswith("PlanError: "), str(outcome)
            assert "no kernels here" in outcome.facts["own"]
            assert outcome.facts["plain"] in ("fallback", "torch", "serial"), str(outcome)


@pytest.mark.parametrize("kind", ["moe", "attention"])
def test_a_rank_that_insists_refuses_for_all_where_memory_lacks(kind: str) -> None:
    outcomes = wishes(kind, "auto", "native", lacking=("memory", "memory"))
    assert_together(outcomes)
    for outcome in outcomes:
        assert outcome.facts["own"].startswith("PlanError: "), str(outcome)
        assert "enlarge it" in outcome.facts["own"]
        assert outcome.facts["plain"] in ("fallback", "torch"), str(outcome)


def test_what_is_reserved_is_given_back_where_the_rest_lacks() -> None:
    with SymmetricWorkspace(nbytes=1024, device="cpu") as workspace:
        memory = AttentionMemory("a")
        with pytest.raises(WorkspaceError, match="'a inputs': needs 1024 bytes"):
            memory.reserve((1024, 1024), workspace, None, workspace.device)
        assert memory.outputs is None
        workspace.channel("all of it", 1024)


@pytest.mark.parametrize("kind", ["moe", "attention"])
def test_nothing_is_reserved_where_a_rank_refuses_the_path(kind: str) -> None:
    outcomes = launch("apart.refused_kernels", 2, kind=kind)
    assert_together(outcomes)
    for outcome in outcomes:
        assert outcome.facts["error"].startswith("PlanError: "), str(outcome)
        assert not outcome.facts["opened"] and not outcome.facts["kept"], str(outcome)


@pytest.mark.parametrize(
    ("impls", "path"), [(["auto", "fa3"], "fused"), (["auto", "auto"], "serial")], ids=str
)
def test_all_ranks_take_the_same_path_when_one_insists(impls: list[str], path: str) -> None:
    outcomes = launch("apart.serial_by_plan", 2, impls=impls)
    assert_together(outcomes)
    assert [outcome.facts["path"] for outcome in outcomes] == [path, path]


@pytest.mark.parametrize("kind", ["moe", "attention"])
def test_a_workspace_on_one_rank_only_is_told(kind: str) -> None:
    for outcome in launch("apart.other_memory", 2, kind=kind):
        assert outcome.code == 7, str(outcome)
        assert outcome.facts["error"] == "WorkspaceError"
        assert "memory: rank 0 has " in outcome.facts["text"], str(outcome)
