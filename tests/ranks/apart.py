"""Ranks that come late to what the others gave up on, or that want different things.

A late rank waits until the others say that they gave up, so no scenario depends on how fast
anybody is; deadlines are short only while somebody is to miss one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
import unittest.mock as mock
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

import xstage_ext.attention as attention_module
import xstage_ext.megamoe as megamoe_module
from xstage_ext import MegaMoE, SymmetricWorkspace, UlyssesAttention, _attention_setup
from xstage_ext._exchange import Exchange
from xstage_ext.channel import ChannelLease
from xstage_ext.errors import PeerError, PeerTimeout, XStageError

from . import attention, moe
from .scenarios import Place, exchange, report, reported

NATIVE = {"moe": "native", "attention": "fa3"}


@contextlib.contextmanager
def hasty(hosts: Exchange, late: int) -> Iterator[None]:
    """Exchanges inside are given up soon, but not by the late rank."""
    patient = hosts.seconds
    if hosts.rank != late:
        hosts.seconds = 0.3
    yield
    hosts.seconds = patient


def missed(place: Place, late: int, times: int, call: Callable[[], Any], what: str) -> list[str]:
    """Calls that fail, everywhere as often; the late rank makes them when the others have."""
    if place.rank == late:
        place.store.wait([f"{what}/{r}" for r in range(place.world) if r != late])
    errors = []
    started = time.monotonic()
    for _ in range(times):
        try:
            call()
        except XStageError as error:
            assert isinstance(error, (PeerError, PeerTimeout)), error
            errors.append(f"{type(error).__name__}: {error}")
    assert len(errors) == times, errors
    if place.rank == late:
        assert time.monotonic() - started < 10, "a late rank waits for nobody"
    else:
        place.store.set(f"{what}/{place.rank}", "")
    return errors


@contextlib.contextmanager
def layer(
    place: Place, timeout_ms: int = 20_000
) -> Iterator[tuple[SymmetricWorkspace, ChannelLease]]:
    """A workspace with a channel that has made a call; behind what happens inside, ranks meet."""
    workspace = place.workspace(timeout_ms=timeout_ms)
    lease = workspace.channel("layer.0", 1 << 16)
    exchange(lease, 0)
    yield workspace, lease
    for call in range(3):
        exchange(lease, call)  # looks at every rank's data, so call by call they meet
    workspace.close()


def calls_and_resets(place: Place, late: int) -> None:
    """A rank misses a call and two resets that the others' next calls make."""
    with layer(place, timeout_ms=1000) as (workspace, lease), hasty(workspace._exchange, late):
        report(errors=missed(place, late, 3, lambda: exchange(lease, 1), "calls"))


def second_half(place: Place, late: int) -> None:
    """All come to a reset, and one of them is slow between its halves."""
    with layer(place) as (workspace, lease):
        with contextlib.suppress(ValueError, PeerError), lease.guard():
            if place.rank == 0:
                raise ValueError("on purpose")
            exchange(lease, 1)
        zero = workspace._zero_channel
        errors = []
        with contextlib.ExitStack() as stack:

            def slow(*which: Any, **options: Any) -> None:
                stack.enter_context(hasty(workspace._exchange, late))
                if place.rank == late:
                    place.store.wait([f"half/{r}" for r in range(place.world) if r != late])
                zero(*which, **options)

            workspace._zero_channel = slow  # type: ignore[method-assign]
            try:
                exchange(lease, 2)
            except (PeerError, PeerTimeout) as error:
                errors.append(f"{type(error).__name__}: {error}")
            place.store.set(f"half/{place.rank}", "")
            workspace._zero_channel = zero  # type: ignore[method-assign]
        report(errors=errors)


def resets(place: Place, late: int) -> None:
    """The others ask for resets in vain; then each rank asks once, and all have it."""
    with layer(place) as (workspace, _):
        with hasty(workspace._exchange, late):
            if place.rank != late:
                missed(place, late, 2, workspace.reset, "resets")
            else:
                place.store.wait([f"resets/{r}" for r in range(place.world) if r != late])
        workspace.reset()


def left_reset(place: Place, where: str) -> None:
    """Rank 0 is interrupted in a reset: on the way to its second half, or when a half was met."""
    with layer(place) as (workspace, _):
        verdicts: list[str] = []
        decide = workspace._exchange._decide

        def interrupted(proposal: str) -> str:
            verdicts.append(decide(proposal))
            if len(verdicts) == ["first half", "second half"].index(where) + 1:
                raise KeyboardInterrupt
            return verdicts[-1]

        def interrupt(*_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

        with contextlib.ExitStack() as stack:
            if place.rank == 0 and where == "between":
                stack.enter_context(mock.patch.object(workspace, "_zero_channel", interrupt))
            elif place.rank == 0:
                stack.enter_context(mock.patch.object(workspace._exchange, "_decide", interrupted))
            report(error=error_of(workspace.reset))


def error_of(call: Callable[[], Any]) -> str:
    """What a call raises, an interrupt too; "" if nothing."""
    try:
        call()
    except (Exception, KeyboardInterrupt) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def other_rounds(place: Place) -> None:
    """Rank 0 resets while the others compare facts; then all reset."""
    workspace = place.workspace(timeout_ms=20_000)
    lease = workspace.channel("layer.0", 1 << 16)
    report(error=error_of([workspace.reset, lambda: workspace.agree("a")][place.rank > 0]))
    workspace.reset()
    exchange(lease, 0)
    workspace.close()


def void_channel(place: Place, late: int, kind: str) -> None:
    """A channel fails at its last step, for a rank that is late or that fails; then it is had."""
    workspace = place.workspace(1 << 16, timeout_ms=20_000)  # room for one
    hosts, zero = workspace._exchange, workspace._zero_channel

    def fails(*which: Any, **options: Any) -> None:
        if place.rank == late and kind == "fails":
            raise MemoryError("on purpose")
        if place.rank == late:
            place.store.wait([f"void/{r}" for r in range(place.world) if r != late])
        zero(*which, **options)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(workspace, "_zero_channel", fails))
        if kind == "late":
            stack.enter_context(hasty(hosts, late))
        report(error=error_of(lambda: workspace.channel("layer.0", 1 << 16)))
        place.store.set(f"void/{place.rank}", "")
    lease = workspace.channel("layer.0", 1 << 16)
    report(name=lease.name)
    exchange(lease, 0)
    workspace.close()


def interrupted_channel(place: Place) -> None:
    """Rank 0 is interrupted when all have a channel: the next ones lie alike on all ranks."""
    workspace = place.workspace(timeout_ms=20_000)
    hosts = workspace._exchange
    delete, rounds = hosts._delete_old_rounds, []

    def interrupted() -> None:
        rounds.append(delete())
        if place.rank == 0 and len(rounds) == 2:
            raise KeyboardInterrupt

    with mock.patch.object(hosts, "_delete_old_rounds", interrupted):
        report(error=error_of(lambda: workspace.channel("lost", 1 << 12)))
    lease = workspace.channel("layer.0", 1 << 12)
    report(offset=lease.offset)
    exchange(lease, 0)
    workspace.close()


def interrupted_call(place: Place, kind: str) -> None:
    """Rank 0 is interrupted before its part in a call is on its way; the next calls are right."""
    if kind == "fallback":
        place.join("gloo")
        module, call = _prepared(place, "moe", impl="fallback")
        guard, closes = module._roll_call.guard, [module.close, dist.destroy_process_group]
    else:
        workspace = place.workspace(timeout_ms=20_000)
        lease = workspace.channel("layer.0", 1 << 16)
        guard, closes = lease.guard, [workspace.close]

        def call(number: int) -> None:
            exchange(lease, number)

    def left() -> None:
        with guard():
            raise KeyboardInterrupt

    call(0)
    report(error=error_of(left if place.rank == 0 else lambda: call(1)))
    for number in range(2, 5):
        call(number)
    for close in closes:
        close()


def fallback(place: Place, late: int, kind: str) -> None:
    """A rank misses two calls of a fallback; nobody enters a collective alone."""
    place.join("gloo")
    module, call = _prepared(place, kind, impl="fallback" if kind == "moe" else "torch")
    call(0)
    roll = module._roll_call if isinstance(module, MegaMoE) else module._memory.roll_call
    assert roll is not None
    with hasty(roll._exchange, late):
        report(errors=missed(place, late, 2, lambda: call(1), "calls"))
    for number in range(2, 5):
        call(number)
    module.close()
    dist.destroy_process_group()


def _made(place: Place, kind: str, **options: Any) -> MegaMoE | UlyssesAttention:
    if kind == "moe":
        return moe.layer(place, **options)
    return UlyssesAttention(4, 64, device=place.device, **options)


def _prepared(place: Place, kind: str, **options: Any) -> tuple[Any, Callable[[int], None]]:
    """A module, and a call of it that is compared with the reference."""
    module = _made(place, kind, **options)
    if isinstance(module, MegaMoE):
        layer = module
        layer.prepare()
        return layer, lambda number: moe.assert_right(
            layer, *moe.tokens(place.rank, number, 20 + place.rank)
        )
    module.prepare(65)
    return module, lambda number: attention.assert_right(place, module, 65, 4, 4, number)


def _lack(kind: str, what: str) -> None:
    """From here on this process has no kernels, or every workspace is too large for it."""
    reason, huge = "no kernels here", 1 << 46
    if kind == "moe" and what == "kernels":
        megamoe_module.why_not = lambda *_: reason  # type: ignore[assignment]
    elif kind == "moe":
        MegaMoE.bytes = lambda _: huge  # type: ignore[method-assign]
    elif what == "kernels":
        attention_module.kernel_reason = _attention_setup.kernel_reason = lambda *_: reason
    else:
        attention_module.workspace_bytes = lambda *_: (huge, huge)


def other_wishes(place: Place, kind: str, impls: list[str], lacking: list[str]) -> None:
    """Every rank has its own `impl`, and lacks something or not; then a plain module is made."""
    place.join("gloo")
    if lacking[place.rank]:
        _lack(kind, lacking[place.rank])
    report(own=_path_or_error(place, kind, impl=impls[place.rank]))
    report(plain=_path_or_error(place, kind))
    dist.destroy_process_group()


def _path_or_error(place: Place, kind: str, **options: Any) -> str:
    """Make, prepare and call a module."""
    try:
        module, call = _prepared(place, kind, **options)
    except XStageError as error:
        return f"{type(error).__name__}: {error}"
    call(0)
    path: str = module.impl if kind == "moe" else module.path
    module.close()
    return path


def refused_kernels(place: Place, kind: str) -> None:
    """Rank 0 insists on kernels that rank 1 lacks: nothing is reserved or kept, on any rank."""
    place.join("gloo")
    if place.rank == 1:
        _lack(kind, "kernels")
    module = _made(place, kind, impl=[NATIVE[kind], "auto"][place.rank])
    before = module.fallback_reason
    with mock.patch.object(SymmetricWorkspace, "_open") as opened:
        error = error_of(lambda: module.prepare(*([] if kind == "moe" else [65])))
    report(error=error, opened=opened.called, kept=module.fallback_reason != before)
    if isinstance(module, UlyssesAttention):
        assert module._memory.workspace is None
    dist.destroy_process_group()


def serial_by_plan(place: Place, impls: list[str]) -> None:
    """The planner prefers the serial path, which a rank that insists on the kernels rules out."""
    place.join("gloo")
    decided = attention_module.decided

    def serially(*given: Any) -> Any:
        decision, refusal = decided(*given)
        assert decision is not None
        return dataclasses.replace(decision, action="serial"), refusal

    attention_module.decided = serially
    report(path=_path_or_error(place, "attention", impl=impls[place.rank]))
    dist.destroy_process_group()


def other_memory(place: Place, kind: str) -> None:
    """Rank 1 brings a workspace, rank 0 none."""
    place.join("gloo")
    with SymmetricWorkspace(nbytes=1 << 24, device=place.device) as workspace:
        module = _made(place, kind)
        given = () if kind == "moe" else (65,)
        reported(lambda: module.prepare(*given, workspace=[None, workspace][place.rank]))
