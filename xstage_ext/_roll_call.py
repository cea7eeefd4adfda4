"""Who makes a call, asked before collectives that would wait for a rank that refuses it.

On the native paths the kernels carry the news. torch's collectives cannot: a peer waits in them
until the group's time limit, or meets the refusing rank's next call instead. So before every call
of a fallback the hosts meet over the group's store; no device is waited for.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch.distributed as dist

from . import _env
from ._exchange import Exchange
from ._groups import group_facts
from .errors import PeerError


class RollCall:
    """One module's calls; made by every rank of the group in the same order.

    Calls that torch.compile has traced are not counted: all ranks make them, or none.

    Parameters
    ----------
    group
        None: WORLD if torch.distributed is initialised, else this process alone.
    name
        For error texts.
    """

    def __init__(self, group: dist.ProcessGroup | None, name: str) -> None:
        facts = group_facts(group, virtual=False)
        deadline_ms = _env.timeout_ms() or math.inf
        self._exchange = Exchange(facts.store, facts.rank, facts.world, deadline_ms)
        self._what = f"a call of {name}"

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Around all that may refuse a call; afterwards every rank makes it.

        Raises
        ------
        PeerError
            Another rank refuses the call, or gave up on it; names it and its reason.
        PeerTimeout
            A rank does not come. Once it does, this call raises PeerError there.
        """
        try:
            yield
        except BaseException as error:  # an interrupt too
            self.refuse(error)
            raise
        for rank, reason in enumerate(self._exchange.all_gather(None, self._what)):
            if reason is not None:
                raise PeerError(
                    f"rank {self._exchange.rank} of {self._exchange.world} hears that rank {rank} "
                    f"refused {self._what}: {reason}"
                )

    def refuse(self, refusal: BaseException) -> None:
        """This rank does not make the call: its peers raise PeerError. Waits for nobody."""
        with contextlib.suppress(PeerError):  # a store that is gone tells the peers by itself
            self._exchange.answer(
                f"{type(refusal).__name__}: {refusal}".splitlines()[0], self._what
            )

    def close(self) -> None:
        """This rank makes no further call."""
        self._exchange.post_closed()
