"""What the CUDA operator does with tensors that are not as its kernel wants them."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.test_megamoe import Case, Session, Tensors, make

CASE = Case((70,), 192, 128, 4, 2)


def single(session: Session, t: Tensors, **changes: torch.Tensor) -> torch.Tensor:
    """The operator of a world of one."""
    given = {
        "x": t.x[0],
        "topk_idx": t.topk_idx[0],
        "topk_weights": t.topk_weights[0],
        "w13": t.w13,
        "w2": t.w2,
    }
    words = session.plan.words(), session.lease.words()
    y: torch.Tensor = torch.ops.xstage.megamoe(*(given | changes).values(), *words)
    return y


@pytest.mark.parametrize("dispatch", [0, 1])
def test_strided_tokens_ids_and_weights_are_copied(dispatch: int) -> None:
    tensors = make(CASE)
    x, ids, scores = tensors.x[0], tensors.topk_idx[0], tensors.topk_weights[0]
    with Session(CASE.plan(dispatch=dispatch)) as session:
        wanted = single(session, tensors)
        for changes in (
            {"x": x.T.contiguous().T},
            {"x": torch.cat([x, x], 1)[:, : x.shape[1]]},
            {"topk_idx": ids.T.contiguous().T, "topk_weights": scores.T.contiguous().T},
            {"topk_idx": ids.int()},
            {"topk_idx": ids.long()},
        ):
            for _ in range(20):  # copies are given back while calls that read them may wait
                result = single(session, tensors, **changes)
            assert torch.equal(result, wanted), changes.keys()
        session.workspace.check(synchronize=True)


def test_what_cannot_be_copied_in_silence_is_refused() -> None:
    tensors = make(CASE)
    x, w2 = tensors.x[0], tensors.w2
    shifted = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view_as(x)
    with Session(CASE.plan()) as session:
        with pytest.raises(RuntimeError, match="x: expected an address that is a multiple of 16"):
            single(session, tensors, x=shifted)
        with pytest.raises(RuntimeError, match="w2: expected a contiguous tensor"):
            single(session, tensors, w2=w2.transpose(1, 2).contiguous().transpose(1, 2))
        with pytest.raises(RuntimeError, match="w13: expected an address"):
            flat = torch.empty(tensors.w13.numel() + 1, dtype=x.dtype, device=x.device)
            single(session, tensors, w13=flat[1:].view_as(tensors.w13))
        with pytest.raises(RuntimeError, match="clamp: expected a positive number, got 0"):
            words = session.plan.words(), session.lease.words()
            many = tensors.topk_idx[0], tensors.topk_weights[0], tensors.w13, tensors.w2
            torch.ops.xstage.megamoe(x, *many, *words, clamp=0.0)
        single(session, tensors)  # nothing was left behind
        session.workspace.check(synchronize=True)
