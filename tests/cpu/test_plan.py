"""Plans as wire messages: round trip, wrong messages, and drift between Python and the binary."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from xstage_ext import _binary
from xstage_ext.errors import BinaryError, PlanError
from xstage_ext.planner import wire
from xstage_ext.planner.megamoe import MegaMoePlan

PLAN = MegaMoePlan(
    world=2, num_experts=8, topk=2, hidden=128, intermediate=64, max_tokens=16, num_sms=4
)
bytes_of = torch.ops.xstage.megamoe_workspace_bytes


def test_round_trip() -> None:
    words = PLAN.words()
    assert words[:4] == [wire.MAGIC, wire.KINDS["megamoe"], wire.VERSION, len(words) - 4]
    names = [field.name for field in dataclasses.fields(MegaMoePlan)]
    assert dict(zip(names, words[4:], strict=True)) == dataclasses.asdict(PLAN)
    assert bytes_of(words) > 0


@pytest.mark.parametrize(
    ("position", "value", "text"),
    [
        (0, 1, "not a wire message"),
        (1, 2, "expected kind 1, got 2"),
        (2, 99, "expected version 1, got 99"),
        (3, 5, "fields, got 5 announced"),
        (4, 9, "world: expected 1 to 8, got 9"),
        (7, 0, "hidden: expected 64 to 65536, got 0"),
    ],
)
def test_wrong_messages_are_named(position: int, value: int, text: str) -> None:
    words = PLAN.words()
    words[position] = value
    with pytest.raises(RuntimeError, match=text):
        bytes_of(words)


@pytest.mark.parametrize("words", [[], [1, 2, 3], PLAN.words()[:-1], [*PLAN.words(), 0]])
def test_wrong_sizes_are_refused(words: list[int]) -> None:
    with pytest.raises(RuntimeError, match="megamoe plan"):
        bytes_of(words)


def test_pack_names_field_and_range() -> None:
    with pytest.raises(
        PlanError, match="topk: expected an integer from 1 to 16 .experts per token., got 17"
    ):
        dataclasses.replace(PLAN, topk=17).words()


@pytest.mark.parametrize("value", [0.5, "1", None, 10**30])
def test_pack_takes_integers_only(value: object) -> None:
    with pytest.raises(
        PlanError, match=f"dispatch: expected an integer from 0 to 1 .*, got {value!r}"
    ):
        dataclasses.replace(PLAN, dispatch=value).words()  # type: ignore[arg-type]


def test_drift_is_found_at_import(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = _binary.wire_fields("megamoe")
    wire.verify("megamoe", MegaMoePlan)
    monkeypatch.setattr(_binary, "wire_fields", lambda kind: [fields[1], fields[0], *fields[2:]])
    with pytest.raises(BinaryError, match="world != num_experts"):
        wire.verify("megamoe", MegaMoePlan)
    monkeypatch.setattr(_binary, "wire_fields", lambda kind: fields[:-1])
    with pytest.raises(BinaryError, match="token_sets"):
        wire.verify("megamoe", MegaMoePlan)


def test_digest_tells_calls_apart() -> None:
    one = wire.digest(PLAN.words(), 1.0)
    assert one == wire.digest(PLAN.words(), 1.0)
    assert one != wire.digest(PLAN.words(), 2.0)
    assert one != wire.digest(dataclasses.replace(PLAN, num_sms=6).words(), 1.0)
    assert 0 <= one < 1 << 63
