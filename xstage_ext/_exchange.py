"""Small collective exchanges between the hosts of a group, over a key-value store.

A store (torch's TCPStore, FileStore, HashStore, or the one behind a process group) is used instead
of the group's collectives, because it needs no device, never blocks for longer than it is told, and
can say which rank is missing.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from typing import Any

from torch._C import _DistNetworkError as DistNetworkError
from torch._C._distributed_c10d import PrefixStore, Store

from .errors import PeerError, PeerTimeout


class Exchange:
    """All-gathers and barriers of one group.

    They are numbered rounds: the n-th of one rank is the n-th of every other. The invariant: a
    round ends alike on all ranks. Either all have come to it, or it is void because a rank gave up
    on it; then it raises on those who came, and on a late rank once it comes. Which of the two is
    one word in the store, written by whoever is through with the round first and never changed, so
    nobody goes on from a round that another rank has given up on. A round that fails costs every
    rank one round, so ranks stay in step whoever was late, and meet again in the next one. Ranks
    that come to one round for different things all raise, so calls of several rounds which one rank
    has left halfway come back into step as well.

    Not covered: an error that strikes one rank alone after the word is written (an interrupt, the
    loss of the store). Its peers go on from that round. `met` tells the rank so, and `before` its
    peers, where another round follows.

    Parameters
    ----------
    store
        Key-value store that all ranks of the group see; None in a group of one.
    rank, world
        This rank's number in the group (not its global rank), and the size of the group.
    timeout_ms
        Deadline of each exchange; set-up always has one.

    Attributes
    ----------
    met
        Whether all came to this rank's last round, for one thing; true also if an interrupt then
        left it.
    """

    def __init__(self, store: Store | None, rank: int, world: int, timeout_ms: float) -> None:
        self.rank = rank
        self.world = world
        self.seconds = timeout_ms / 1000
        self.met = True
        self._round = 0
        self._read = 0  # the last round that every rank has read, as far as this one knows
        self._store: Store | None = None
        self.uid = "0"
        if store is None or world == 1:
            return
        # Every rank counts its own creations, so that ranks which create workspaces in the same
        # order meet under the same prefix, whatever else shares the store.
        with _store_errors(self, "set-up"):
            number = store.add(f"xstage/created/{rank}", 1)
        self.uid = str(number)
        self._store = PrefixStore(f"xstage/{number}", store)

    @property
    def store(self) -> Store | None:
        """The store under this exchange's own prefix; None in a group of one."""
        return self._store

    def all_gather(self, value: Any, what: str) -> list[Any]:
        """Values of all ranks in rank order. `value` is anything JSON can carry.

        Raises
        ------
        PeerTimeout
            Naming the ranks that did not come, and `what` they were awaited for.
        PeerError
            When another rank gave up on this round or came to it for something else, when a rank
            that is missing has closed, or when the store itself is gone, as when the rank that
            serves it died.
        """
        if self._store is None:
            self.met = True
            return [value]
        self.answer(value, what)
        keys = [f"{self._round}/{r}" for r in range(self.world)]
        with _store_errors(self, what):
            self._meet(keys, what)
            everyone = [json.loads(text) for text in self._store.multi_get(keys)]
            self._delete_old_rounds()
        for rank, (theirs, _) in enumerate(everyone):
            if theirs != what:  # then every rank finds one that is not like itself
                self.met = False
                raise PeerError(
                    f"rank {self.rank} of {self.world} came to {what}, rank {rank} to {theirs}; "
                    "every rank makes the same calls in the same order"
                )
        return [value for _, value in everyone]

    def answer(self, value: Any, what: str) -> None:
        """The part in an all-gather of a rank that does not wait for the others' values."""
        if self._store is None:
            return
        text = json.dumps([what, value])
        self.met = False
        self._round += 1
        with _store_errors(self, what):
            self._store.set(f"{self._round}/{self.rank}", text)

    def barrier(self, what: str) -> None:
        """Return when every rank has come; errors as in `all_gather`."""
        self.all_gather(None, what)

    @contextlib.contextmanager
    def before(self, what: str) -> Iterator[None]:
        """Around what leads from a round to the next one, `what`, which an error inside voids.

        The round before may be inside too: if it is void, all ranks know already.
        """
        try:
            yield
        except BaseException as error:  # an interrupt too
            if self.met:
                self.met = False
                self._round += 1
                self._give_up(what, error)
            raise

    def catch_up(self, what: str) -> None:
        """Pass over the rounds that peers gave up on before this rank came, and raise for none.

        For what may meet any later round of the peers; calls with data may not.
        """
        if self._store is None:
            return
        with _store_errors(self, what):
            while self._store.check([_verdict(self._round + 1)]):
                self._round += 1

    def post_reason(self, reason: str) -> None:
        """Leave a text that peers can read after this rank failed. Never raises."""
        self._post("reason", reason)

    def post_closed(self) -> None:
        """Tell peers that this rank comes to no further exchange. Never raises."""
        self._post("closed", "1")

    def _post(self, what: str, text: str) -> None:
        if self._store is None:
            return
        try:
            key = f"{what}/{self.rank}"
            self._store.set(key, text)
            # A set is not acknowledged, a question behind it is: peers that hear of the fault by
            # shared memory find the text.
            self._store.check([key])
        except Exception:  # noqa: BLE001 - the store may be gone; peers are told otherwise too
            return

    def reason_of(self, rank: int) -> str | None:
        """The text that a failed rank left, if any. Never raises, never waits."""
        if self._store is None:
            return None
        try:
            key = f"reason/{rank}"
            return self._store.get(key).decode() if self._store.check([key]) else None
        except Exception:  # noqa: BLE001
            return None

    def clear_reason(self) -> None:
        """Take this rank's text back. Never raises."""
        if self._store is None:
            return
        try:
            self._store.delete_key(f"reason/{self.rank}")
        except Exception:  # noqa: BLE001
            return

    def _meet(self, keys: list[str], what: str) -> None:
        """Return if this round was met; raise if it is void."""
        try:
            self._wait(keys, what)
            verdict = self._decide(_MET)
        except BaseException as error:  # an interrupt too
            self._give_up(what, error)
            if self.met and isinstance(error, PeerTimeout):
                return  # all came at the last moment, and a peer has seen it
            raise
        if not self.met:
            raise PeerError(f"rank {self.rank} of {self.world} hears that {verdict}")

    def _give_up(self, what: str, error: BaseException) -> None:
        """Void this round, unless it was met."""
        if self._store is None:
            return
        text = str(error).partition("\n")[0]
        with contextlib.suppress(Exception):  # the store may be gone, which is not worth more
            self._decide(f"rank {self.rank} gave up on {what}: {type(error).__name__}: {text}")

    def _decide(self, proposal: str) -> str:
        """The verdict on this round: the proposal, unless somebody was faster."""
        assert self._store is not None
        verdict = self._store.compare_set(_verdict(self._round), "", proposal).decode()
        self.met = verdict == _MET
        if not self.met:  # nobody reads it, and without a peer no later round deletes it
            self._store.delete_key(f"{self._round}/{self.rank}")
        return verdict

    def _delete_old_rounds(self) -> None:
        """Whoever has come to this round, which was met, is through with those before it."""
        assert self._store is not None
        for old in range(self._read + 1, self._round):
            self._store.delete_key(f"{old}/{self.rank}")
            if self.rank == 0:
                self._store.delete_key(_verdict(old))
        self._read = self._round - 1

    def _wait(self, keys: list[str], what: str) -> None:
        """Return when all have come, or when the round is decided."""
        assert self._store is not None
        deadline = time.monotonic() + self.seconds
        missing = list(range(self.world))
        pause = 0.0002
        while not self._store.check(keys):
            missing = [r for r in missing if not self._store.check([keys[r]])]
            self._expect_open(keys, missing, what)
            if self._store.check([_verdict(self._round)]):
                return
            left = deadline - time.monotonic()
            if missing and left <= 0:
                raise PeerTimeout(
                    f"rank {self.rank} of {self.world} waited {self.seconds * 1000:.0f} ms for "
                    f"rank {_listed(missing)} in {what}"
                )
            # Polling: the store's own wait prints a warning whenever it is interrupted.
            time.sleep(max(0.0, min(pause, left)))
            pause = min(pause * 1.5, 0.02)

    def _expect_open(self, keys: list[str], missing: list[int], what: str) -> None:
        """Raise PeerError if a rank whose key is missing has closed: it never comes."""
        assert self._store is not None
        for rank in missing:
            # It may have come and closed since its key was looked for.
            if not self._store.check([f"closed/{rank}"]) or self._store.check([keys[rank]]):
                continue
            reason = self.reason_of(rank)
            raise PeerError(
                f"rank {self.rank} of {self.world} needs rank {rank} in {what}, but rank {rank} "
                f"has closed its workspace or module{f': {reason}' if reason else ''}; make a new "
                "one on all ranks"
            )


_MET = "met"


def _verdict(number: int) -> str:
    """Key of how a round ended: `_MET`, or who gave up on it and why."""
    return f"{number}/verdict"


class _store_errors:  # noqa: N801 - reads as a statement
    """Turn a lost store into PeerError in words."""

    def __init__(self, exchange: Exchange, what: str) -> None:
        self._exchange = exchange
        self._what = what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, DistNetworkError):
            raise PeerError(
                f"rank {self._exchange.rank} of {self._exchange.world} lost the group's store in "
                f"{self._what}; the rank that serves it has probably ended: {error}"
            ) from error


def _listed(ranks: list[int]) -> str:
    return " and ".join(str(r) for r in ranks)
