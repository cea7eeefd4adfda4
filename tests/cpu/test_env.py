"""Environment variables: values that cannot be meant are named with what was expected."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from xstage_ext import SymmetricWorkspace, _env, cli
from xstage_ext.errors import XStageError


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("XSTAGE_TIMEOUT_MS", "abc"),
        ("XSTAGE_TIMEOUT_MS", "-1"),
        ("XSTAGE_TIMEOUT_MS", "1.5"),
        ("XSTAGE_TIMEOUT_MS", "99999999999"),
        ("XSTAGE_SETUP_TIMEOUT_MS", "-1"),
        ("XSTAGE_SETUP_TIMEOUT_MS", "0"),
    ],
)
def test_deadlines_are_milliseconds(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(XStageError, match=f"xstage: {name}: expected . to .* ms, got {value}$"):
        SymmetricWorkspace(nbytes=0, device="cpu")
    facts = json.loads(CliRunner().invoke(cli.app, ["info", "--json"]).stdout)
    assert facts["environment"][name] == value


def test_no_deadline_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XSTAGE_TIMEOUT_MS", "0")
    assert _env.get("XSTAGE_TIMEOUT_MS") == "0"
    monkeypatch.setenv("XSTAGE_TIMEOUT_MS", "")
    assert _env.get("XSTAGE_TIMEOUT_MS") is None
