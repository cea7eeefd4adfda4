"""What torch.compile needs to know about the megamoe ops: shapes of their results."""

from __future__ import annotations

import torch


def _fake(x: torch.Tensor, *others: object, **options: object) -> torch.Tensor:
    return x.new_empty(x.shape)


def _fake_out(out: torch.Tensor, *others: object, **options: object) -> None:
    return None


def _fake_virtual(x: list[torch.Tensor], *others: object, **options: object) -> list[torch.Tensor]:
    return [tokens.new_empty(tokens.shape) for tokens in x]


torch.library.register_fake("xstage::megamoe", _fake)
torch.library.register_fake("xstage::megamoe_out", _fake_out)
torch.library.register_fake("xstage::megamoe_virtual", _fake_virtual)
