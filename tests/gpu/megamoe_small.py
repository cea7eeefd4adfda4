"""Small calls of megamoe that touch every path, for compute-sanitizer:

compute-sanitizer --tool racecheck python -m tests.gpu.megamoe_small

Tensors and references are made on the CPU, so that hardly any other kernel runs.
"""

from __future__ import annotations

import torch

from tests.gpu.test_megamoe import Case, Session, Tensors, make, references, relative_error

PLANS = (
    {"schedule": 0, "store": 0},
    {"schedule": 1, "store": 1},
    {"schedule": 1, "store": 2, "slice_rows": 1, "mix": 1},
    {"schedule": 1, "store": 0, "mix": 1, "dispatch": 1},
    {"schedule": 0, "store": 2, "dispatch": 1, "token_sets": 2},
)


def on_gpu(t: Tensors) -> Tensors:
    """The same tensors on the GPU."""
    x, ids, weights = ([one.cuda() for one in many] for many in (t.x, t.topk_idx, t.topk_weights))
    return Tensors(x, ids, weights, t.w13.cuda(), t.w2.cuda())


def main() -> None:
    """A virtual world of two with uneven rows, odd blocks and rows that are no token."""
    torch.manual_seed(0)
    case = Case((70, 33), 192, 128, 4, 2)
    tensors = make(case, device="cpu")
    wanted = references(tensors)
    there = on_gpu(tensors)
    for fields in PLANS:
        with Session(case.plan(num_sms=2, **fields), timeout_ms=120_000) as session:
            for _ in range(2):
                results = session(there)
            session.workspace.check(synchronize=True)
        assert relative_error([r.cpu() for r in results], wanted) < 6e-3, fields


if __name__ == "__main__":
    main()
    print("megamoe_small: ok")
