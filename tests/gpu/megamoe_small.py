"""Small calls of megamoe that touch every path, for compute-sanitizer:

compute-sanitizer --tool racecheck --kernel-regex kns=megamoe_sm90 python -m tests.gpu.megamoe_small
"""

from __future__ import annotations

import torch

from tests.gpu.test_megamoe import Case, Session, make, references, relative_error

PLANS = (
    {"schedule": 0, "store": 0},
    {"schedule": 1, "store": 1, "combine": 1},
    {"schedule": 1, "store": 2, "slice_rows": 1, "mix": 1},
)


def main() -> None:
    """A virtual world of two with uneven rows, odd blocks and rows that are no token."""
    torch.manual_seed(0)
    case = Case((70, 33), 192, 128, 4, 2)
    tensors = make(case)
    wanted = references(tensors)
    for fields in PLANS:
        with Session(case.plan(num_sms=2, **fields), timeout_ms=120_000) as session:
            for _ in range(2):
                results = session(tensors)
            session.workspace.check(synchronize=True)
        assert relative_error(results, wanted) < 6e-3, fields


if __name__ == "__main__":
    main()
    print("megamoe_small: ok")
