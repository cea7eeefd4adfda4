"""`ulysses_attention`: which modules it makes, and what they serve."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from xstage_ext import functional, ulysses_attention
from xstage_ext import reference_attention as reference
from xstage_ext.functional import close_all

CLOSE = {"rtol": 1e-2, "atol": 1e-2}


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    close_all()


def operands(rows: int = 66) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = torch.randn(3, 2, rows, 4, 64).bfloat16()
    return q, k, v


def test_functional_form() -> None:
    q, k, v = operands()
    for causal in (False, True):
        expected, _ = reference.attention(q, k, v, causal=causal)
        out = ulysses_attention(q, k, v, causal=causal)
        torch.testing.assert_close(out.float(), expected, **CLOSE)
        del out


def test_lengths_share_modules() -> None:
    for rows in range(1, 250, 4):
        q, k, v = operands(rows)
        expected, _ = reference.attention(q, k, v)
        torch.testing.assert_close(ulysses_attention(q, k, v).float(), expected, **CLOSE)
    assert len(functional._modules) <= 4


def test_longer_text_than_at_first() -> None:
    q, k, v = operands(60)
    for length in (2, 4, 300):
        tq, tk, tv = operands(length)
        _, out = ulysses_attention(q, k, v, joint=(tq, tk, tv), joint_rows=(length,))
        whole = (torch.cat(pair, 1) for pair in ((tq, q), (tk, k), (tv, v)))
        expected, _ = reference.attention(*whole)
        torch.testing.assert_close(out.float(), expected[:, :length], **CLOSE)
        del out


def test_other_key_lengths() -> None:
    q, k, v = operands(9)
    for rows in (700, 3):
        _, k, v = operands(rows)
        expected, _ = reference.attention(q, k, v)
        torch.testing.assert_close(ulysses_attention(q, k, v).float(), expected, **CLOSE)


def test_as_many_results_alive_as_asked_for() -> None:
    q, k, v = operands()
    kept = [ulysses_attention(q, k, v, slots=3) for _ in range(3)]
    assert all(torch.equal(kept[0], other) for other in kept)
    with pytest.raises(RuntimeError, match="3 of 3 slots hold live results"):
        ulysses_attention(q, k, v, slots=3)
