"""Ranks that die, refuse, come late or disagree: every other rank says so in one line, and ends."""

from __future__ import annotations

import pytest

from tests.ranks import Outcome, launch, left_behind


def survivors(outcomes: list[Outcome], victim: int) -> list[Outcome]:
    """All but the victim; each must have ended by itself."""
    others = [outcome for outcome in outcomes if outcome.rank != victim]
    for outcome in others:
        assert outcome.code is not None, f"hung: {outcome}"
    return others


@pytest.mark.parametrize("where", ["before", "during", "after"])
@pytest.mark.parametrize(("world", "victim"), [(2, 1), (3, 0)])
def test_killed_rank(world: int, victim: int, where: str) -> None:
    outcomes = launch(
        "killed", world, victim=victim, where=where, timeout_ms=1500, signal_name="SIGKILL"
    )
    assert outcomes[victim].code == -9
    for outcome in survivors(outcomes, victim):
        assert outcome.code == 7, str(outcome)
        assert outcome.facts["error"] == "PeerTimeout", str(outcome)
        text = outcome.facts["text"]
        assert f"for rank {victim} in handshake (channel 'layer.0', call " in text
        assert "expected" in text and "saw" in text and "\n" not in text
        assert 1.4 < outcome.facts["seconds"] < 6, str(outcome)
        assert outcome.facts["left"] == []
    assert not left_behind()


def test_terminated_rank() -> None:
    outcomes = launch("killed", 2, victim=0, where="after", timeout_ms=1000, signal_name="SIGTERM")
    assert outcomes[0].code == -15
    assert outcomes[1].facts["error"] == "PeerTimeout", str(outcomes[1])
    assert not left_behind()


def test_rank_that_never_comes_to_the_setup() -> None:
    outcomes = launch(
        "killed",
        2,
        victim=1,
        where="setup",
        timeout_ms=1000,
        signal_name="SIGKILL",
        env={"XSTAGE_SETUP_TIMEOUT_MS": "2000"},
    )
    assert outcomes[0].code == 1, str(outcomes[0])
    assert "PeerTimeout: rank 0 of 2 waited 2000 ms for rank 1 in workspace" in outcomes[0].stderr
    assert not left_behind()


@pytest.mark.parametrize("how", ["with", "bare"])
def test_exception_on_one_rank(how: str) -> None:
    outcomes = launch("exception", 3, how=how, fresh=how == "bare")
    assert outcomes[1].code == 1 and "ValueError: no such layer" in outcomes[1].stderr
    for outcome in survivors(outcomes, 1):
        assert outcome.facts["error"] == "PeerError", str(outcome)
        assert "rank 1 gave up on a call: ValueError: no such layer" in outcome.facts["text"]
        assert outcome.facts["seconds"] < 10


@pytest.mark.parametrize("world", [2, 3])
def test_refused_call_and_recovery(world: int) -> None:
    outcomes = launch("refusal", world)
    for outcome in outcomes:
        assert outcome.code == 0 and outcome.facts["recovered"], str(outcome)
        assert "tokens: expected at most 256, got 257" in outcome.facts["text"]
        if outcome.rank > 0:
            assert outcome.facts["error"] == "PeerError"
            assert "rank 0 refused a call on its host: channel 'layer.3'" in outcome.facts["text"]


def test_late_rank_and_recovery() -> None:
    outcomes = launch("late", 2, timeout_ms=700)
    for outcome, error in zip(outcomes, ["PeerTimeout", "PeerError"], strict=True):
        assert outcome.code == 0 and outcome.facts["recovered"], str(outcome)
        assert outcome.facts["error"] == error, str(outcome)


def test_ranks_that_disagree() -> None:
    expected = {
        "nbytes": "ranks disagree in workspace: nbytes: ranks 0, 2 have 262144, rank 1 has 524288",
        "timeout": "timeout_ms: ranks 0, 2 have 20000, rank 1 has 20001",
        "name": "channel name: ranks 0, 2 have 'a', rank 1 has 'b'",
        "size": "channel bytes: ranks 0, 2 have 8192, rank 1 has 2048",
        "field": "ranks disagree in agreement: topk: ranks 0, 2 have 4, rank 1 has 8",
        "text": "text: ranks 0, 2 have 'plan 1', rank 1 has 'plan 2'",
    }
    outcomes = launch("disagree", 3)
    for outcome in outcomes:
        assert outcome.code == 0, str(outcome)
        for what, text in expected.items():
            assert outcome.facts[what].startswith("WorkspaceError: "), str(outcome)
            assert text in outcome.facts[what]
    # Payloads are not exchanged beforehand: the digest in the call's own signal tells.
    texts = [outcome.facts["payload"] for outcome in outcomes]
    assert any("made different calls in handshake" in text for text in texts), texts
    assert all(text.startswith(("WorkspaceError: ", "PeerError: ")) for text in texts), texts


def test_watcher_reports_in_one_line() -> None:
    outcomes = launch("watched", 2)
    assert outcomes[0].code == 0, str(outcomes[0])
    lines = [line for line in outcomes[0].stderr.splitlines() if "PeerTimeout" in line]
    assert len(lines) == 1 and "for rank 1 in handshake" in lines[0]


@pytest.mark.parametrize(
    "how",
    [
        "normal",
        "no close",
        "close after destroy",
        "close twice",
        "exception on rank 1",
        "del on rank 0",
    ],
)
def test_six_exits(how: str) -> None:
    outcomes = launch("ends.leave", 2, how=how, limit_s=45, fresh=True)
    expected = [7, 1] if how == "exception on rank 1" else [0, 0]
    assert [outcome.code for outcome in outcomes] == expected, "\n".join(map(str, outcomes))
    assert not left_behind()


def test_closed_workspace() -> None:
    for outcome in launch("ends.closed", 2):
        assert outcome.facts["error"] == "WorkspaceError"
        assert "it is closed" in outcome.facts["text"]


@pytest.mark.parametrize("how", ["close", "del", "exit"])
@pytest.mark.parametrize(("world", "victim"), [(2, 1), (3, 0)])
def test_calls_after_a_peer_has_closed_say_so_at_once(world: int, victim: int, how: str) -> None:
    outcomes = launch("ends.peer_closed", world, victim=victim, how=how)
    for outcome in survivors(outcomes, victim):
        assert outcome.code == 0, str(outcome)
        for what in ("call", "next call", "reset", "channel", "agree"):
            text = outcome.facts[what]
            assert text.startswith("PeerError: "), str(outcome)
            assert f"rank {victim} has closed its workspace" in text, str(outcome)
            assert outcome.facts[f"{what} seconds"] < 2.0, str(outcome)
    assert not left_behind()
