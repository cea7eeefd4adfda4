"""megamoe on one GPU: virtual worlds of 1 to 8 ranks against the fp32 reference."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from tests.gpu import sanitizer
from tests.virtual_moe import regions
from xstage_ext import SymmetricWorkspace
from xstage_ext._megamoe_setup import counter_bytes
from xstage_ext.errors import RoutingError
from xstage_ext.planner.megamoe import MegaMoePlan
from xstage_ext.reference import moe_reference
from xstage_ext.trace import MegaMoETrace

DEVICE = "cuda"


@dataclasses.dataclass(frozen=True)
class Case:
    """One problem: tokens by rank and the sizes of the layer."""

    tokens: tuple[int, ...]
    hidden: int
    intermediate: int
    experts: int
    topk: int

    @property
    def world(self) -> int:
        return len(self.tokens)

    def plan(self, **fields: int) -> MegaMoePlan:
        """A plan for this case on this GPU; `fields` override."""
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        defaults = {
            "world": self.world,
            "num_experts": self.experts,
            "topk": self.topk,
            "hidden": self.hidden,
            "intermediate": self.intermediate,
            "max_tokens": max(self.tokens) + 3,
            "num_sms": sms // self.world // 2 * 2,
        }
        return MegaMoePlan(**{**defaults, **fields})


@dataclasses.dataclass(frozen=True)
class Tensors:
    """Tensors of all ranks; weights of all experts."""

    x: list[torch.Tensor]
    topk_idx: list[torch.Tensor]
    topk_weights: list[torch.Tensor]
    w13: torch.Tensor
    w2: torch.Tensor


def make(
    case: Case, *, skip: float = 0.1, idx_dtype: torch.dtype = torch.int32, device: str = DEVICE
) -> Tensors:
    """Random tensors; a share `skip` of all choices is -1."""
    x, ids, weights = [], [], []
    for tokens in case.tokens:
        x.append(torch.randn(tokens, case.hidden, device=device).bfloat16())
        choice = torch.rand(tokens, case.experts, device=device).topk(case.topk, dim=1).indices
        choice[torch.rand(tokens, case.topk, device=device) < skip] = -1
        ids.append(choice.to(idx_dtype))
        weights.append(torch.rand(tokens, case.topk, device=device))
    w13 = torch.randn(case.experts, 2 * case.intermediate, case.hidden, device=device)
    w2 = torch.randn(case.experts, case.hidden, case.intermediate, device=device)
    w13, w2 = w13 * case.hidden**-0.5, w2 * case.intermediate**-0.5
    return Tensors(x, ids, weights, w13.bfloat16(), w2.bfloat16())


class Session:
    """A virtual group with one operator instance, its memory filled with NaN where it may be."""

    def __init__(self, plan: MegaMoePlan, timeout_ms: int = 5000) -> None:
        self.plan = plan
        self.workspace = SymmetricWorkspace(
            nbytes=plan.bytes(),
            backend="virtual",
            world=plan.world,
            device=DEVICE,
            timeout_ms=timeout_ms,
        )
        zeroed = counter_bytes(plan)  # by a reset
        self.lease = self.workspace.channel("moe", plan.bytes(), counter_bytes=zeroed)
        self.spoil()

    def region(self, name: str, rank: int) -> torch.Tensor:
        """A region of a rank's memory: uint8 [its bytes]."""
        return self.lease.region(rank)[regions(self.plan)[name]]

    def spoil(self) -> None:
        """Fills tokens, rings and results with NaN."""
        for rank in range(self.plan.world):
            self.lease.region(rank)[regions(self.plan)["kTokens"].start :].fill_(0xFF)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.workspace.close()

    def __call__(self, t: Tensors, **options: float | None) -> list[torch.Tensor]:
        """One call of all ranks."""
        words = self.lease.virtual_words()
        results: list[torch.Tensor] = torch.ops.xstage.megamoe_virtual(
            t.x,
            t.topk_idx,
            t.topk_weights,
            list(t.w13.chunk(self.plan.world)),
            list(t.w2.chunk(self.plan.world)),
            self.plan.words(),
            words,
            **options,
        )
        return results


def relative_error(results: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """Frobenius norm of the difference over that of the reference, over all ranks; NaN stays."""
    got = torch.cat([r.double().flatten() for r in results])
    want = torch.cat([w.double().flatten() for w in wanted])
    return float((got - want).norm() / want.norm().clamp_min(1e-30))


def references(t: Tensors, **options: object) -> list[torch.Tensor]:
    ranks = zip(t.x, t.topk_idx, t.topk_weights, strict=True)
    return [moe_reference(x, i, w, t.w13, t.w2, **options) for x, i, w in ranks]


def same_bits(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


CASES = [
    Case((300,), 512, 384, 8, 2),
    Case((1,), 256, 128, 4, 2),
    Case((257, 64), 512, 320, 8, 4),
    Case((90, 0, 33), 64, 64, 9, 1),
    Case((0, 1, 130, 99), 448, 192, 16, 3),
    Case((5, 6, 7, 8, 9), 128, 256, 10, 10),
    Case((20, 40, 60, 80, 100, 120), 256, 192, 12, 4),
    Case((50, 200, 7, 0, 128, 129, 64, 1), 1024, 512, 32, 4),
    Case((150, 70), 64, 128, 140, 3),  # more local experts than a warp has lanes
    Case((2500, 0, 40), 2112, 64, 6, 2),  # tokens that peers read in three segments
]

PLANS = [
    {"schedule": schedule, "store": store, "slice_rows": 1 + store % 2, "dispatch": dispatch}
    for schedule, store, dispatch in itertools.product((0, 1), (0, 1, 2), (0, 1))
] + [
    {"schedule": 0, "wave_blocks": 4, "group_blocks": 2, "x_ring_blocks": 2, "h_ring_blocks": 4},
    {"lead_blocks": 2, "group_blocks": 2, "x_ring_blocks": 2, "h_ring_blocks": 6, "mix": 0},
    {"num_sms": 2, "store": 2, "slice_rows": 8},
]
# Many tokens for a warp, and a ring that is shorter than what it copies at a time.
SHORT_RING = {"lead_blocks": 1, "group_blocks": 1, "x_ring_blocks": 1, "h_ring_blocks": 3}
for how in (0, 1):
    PLANS += [
        {"dispatch": how, "num_sms": 4, "store": 0},
        {"dispatch": how, "num_sms": 4, **SHORT_RING},
    ]


def expect_every_plan_right(case: Case, tensors: Tensors) -> None:
    """The same bits from every plan and call, close to the reference."""
    wanted = references(tensors)
    first: list[torch.Tensor] | None = None
    for fields in PLANS:
        with Session(case.plan(**fields)) as session:
            for _ in range(3):
                results = session(tensors)
                session.workspace.check(synchronize=True)
                first = results if first is None else first
                assert same_bits(first, results), fields
    assert first is not None
    assert relative_error(first, wanted) < 6e-3


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"world{case.world}-h{case.hidden}")
def test_every_plan_gives_the_same_right_bits(case: Case) -> None:
    tensors = make(case)
    expect_every_plan_right(case, tensors)


@pytest.mark.parametrize("rows", [1, 7, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 257, 448])
def test_every_row_count_of_an_expert(rows: int) -> None:
    case = Case((rows, 3), 256, 192, 4, 1)
    tensors = make(case, skip=0.0)
    tensors.topk_idx[0].fill_(2)
    tensors.topk_idx[1].fill_(3)
    with Session(case.plan()) as session:
        results = session(tensors)
        session.workspace.check(synchronize=True)
    assert relative_error(results, references(tensors)) < 6e-3
    assert (results[0].float().abs().sum(1) > 0).all()


@pytest.mark.parametrize("hidden", [320, 448, 512])
def test_half_blocks_that_a_cluster_shares_out(hidden: int) -> None:
    """129 to 192 rows: the last tile of a row may leave one CTA without columns of the middle."""
    case = Case((190, 131, 150), hidden, 192, 3, 1)
    tensors = make(case, skip=0.0)
    for rank, ids in enumerate(tensors.topk_idx):
        ids.fill_((rank + 1) % 3)
    expect_every_plan_right(case, tensors)


def test_all_tokens_to_one_expert_and_duplicates() -> None:
    case = Case((400, 300), 128, 128, 8, 4)
    tensors = make(case)
    for ids in tensors.topk_idx:
        ids.fill_(5)
    with Session(case.plan(x_ring_blocks=8, group_blocks=8)) as session:
        results = session(tensors)
        session.workspace.check(synchronize=True)
    assert relative_error(results, references(tensors)) < 6e-3


LAYOUTS = ("gate_up", "up_gate", "interleaved")


@pytest.mark.parametrize("layout", [0, 1, 2])
def test_weight_layouts(layout: int) -> None:
    case = Case((150, 20), 256, 192, 4, 2)
    tensors = make(case)
    with Session(case.plan(weight_layout=layout)) as session:
        results = session(tensors)
        session.workspace.check(synchronize=True)
    for other, name in enumerate(LAYOUTS):
        error = relative_error(results, references(tensors, weight_layout=name))
        assert error < 6e-3 if other == layout else error > 0.1, name


def test_options_and_int64_ids() -> None:
    case = Case((150, 20), 256, 192, 4, 2)
    tensors = make(case, idx_dtype=torch.int64)
    options = {"clamp": 0.5, "routed_scaling_factor": 2.5}
    with Session(case.plan()) as session:
        results = session(tensors, **options)
        plain = session(tensors)
        session.workspace.check(synchronize=True)
    assert relative_error(results, references(tensors, **options)) < 6e-3
    assert relative_error(plain, references(tensors)) < 6e-3
    assert relative_error(results, references(tensors)) > 1e-1


def test_error_is_no_larger_than_that_of_bf16_steps() -> None:
    case = Case((512,), 1024, 512, 8, 4)
    tensors = make(case)
    with Session(case.plan()) as session:
        results = session(tensors)
        session.workspace.check(synchronize=True)
    wanted = references(tensors)
    rounded = [r.bfloat16() for r in references(tensors, rounded=True)]
    assert relative_error(results, wanted) <= 1.01 * relative_error(rounded, wanted)


def test_nan_stays_in_its_token() -> None:
    case = Case((130, 70), 256, 192, 8, 3)
    tensors = make(case, skip=0.0)
    with Session(case.plan()) as session:
        clean = session(tensors)
        tensors.x[0][17].fill_(float("nan"))
        dirty = session(tensors)
        session.workspace.check(synchronize=True)
    assert dirty[0][17].isnan().all()
    dirty[0][17] = clean[0][17]
    assert same_bits(clean, dirty)


def test_bad_ids_are_masked_and_reported() -> None:
    case = Case((40,), 128, 64, 4, 2)
    tensors = make(case, skip=0.0)
    tensors.topk_idx[0][3, 1] = 4
    with Session(case.plan()) as session:
        results = session(tensors)
        with pytest.raises(RoutingError):
            session.workspace.check(synchronize=True)
    assert relative_error(results, references(tensors)) < 6e-3


def single(session: Session, t: Tensors, **options: object) -> torch.Tensor:
    """The operator of one rank in a world of one."""
    result: torch.Tensor = torch.ops.xstage.megamoe(
        t.x[0],
        t.topk_idx[0],
        t.topk_weights[0],
        t.w13,
        t.w2,
        session.plan.words(),
        session.lease.words(),
        **options,
    )
    return result


@pytest.mark.parametrize(("dtype", "dispatch"), [(torch.int32, 0), (torch.int64, 1)], ids=str)
def test_graph_replay_with_other_token_counts(dtype: torch.dtype, dispatch: int) -> None:
    case = Case((200,), 256, 192, 8, 2)
    tensors = make(case)
    num_tokens = torch.tensor([200], dtype=dtype, device=DEVICE)
    load = torch.zeros(8, dtype=torch.int64, device=DEVICE)
    with Session(case.plan(dispatch=dispatch)) as session:
        single(session, tensors, num_tokens=num_tokens)  # warm up
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = single(session, tensors, num_tokens=num_tokens, expert_load=load)
        for tokens in (200, 0, 1, 77):
            num_tokens.fill_(tokens)
            load.zero_()
            graph.replay()
            session.workspace.check(synchronize=True)
            ids = tensors.topk_idx[0][:tokens]
            wanted = moe_reference(
                tensors.x[0][:tokens],
                ids,
                tensors.topk_weights[0][:tokens],
                tensors.w13,
                tensors.w2,
            )
            assert relative_error([result[:tokens]], [wanted]) < 6e-3
            assert not result[tokens:].any()
            counted = torch.bincount(ids[ids >= 0].long(), minlength=8)
            assert torch.equal(load, counted)


def test_side_stream_while_another_stream_holds_sms() -> None:
    case = Case((200,), 256, 192, 8, 2)
    tensors = make(case)
    wanted = references(tensors)
    with Session(case.plan()) as session:
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000_000)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            results = [single(session, tensors)]
        session.workspace.check(synchronize=True)
    assert relative_error(results, wanted) < 6e-3


def test_many_calls_are_bitwise_equal(level: int) -> None:
    case = Case((100, 60, 1, 90), 256, 192, 8, 4)
    tensors = make(case)
    with Session(case.plan()) as session:
        first = session(tensors)
        for _ in range((100, 1000, 5000)[level - 1]):
            results = session(tensors)
        session.workspace.check(synchronize=True)
    assert same_bits(first, results)


@pytest.mark.parametrize("dispatch", [0, 1])
def test_a_trace_has_every_tile_of_the_schedule(dispatch: int) -> None:
    case = Case((700,), 256, 192, 4, 2)
    tensors = make(case)
    with Session(case.plan(dispatch=dispatch)) as session:
        words = session.plan.words(), session.lease.words()
        args = tensors.x[0], tensors.topk_idx[0], tensors.topk_weights[0], tensors.w13, tensors.w2
        result, records = torch.ops.xstage.megamoe_traced(*args, *words, 256)
        session.workspace.check(synchronize=True)
        plain = single(session, tensors)
        session.workspace.check(synchronize=True)
    assert torch.equal(result, plain)
    ids = tensors.topk_idx[0]
    counts = torch.bincount(ids[ids >= 0].long(), minlength=4).tolist()
    tiles = torch.ops.xstage.megamoe_tiles(words[0], counts)
    trace = MegaMoETrace.read(records)
    for phase, kind in ((1, "linear-1"), (2, "linear-2")):
        wanted = sorted(tiles[tiles[:, 2] == phase][:, [5, 8]].tolist())
        for track in ("math 0", "math 1"):
            assert sorted([s.block, s.n] for s in trace.of(kind, track)) == wanted


@pytest.mark.parametrize("tool", sanitizer.TOOLS)
def test_sanitizer_finds_nothing(tool: str, level: int) -> None:
    sanitizer.expect_nothing_found(tool, "megamoe_small", level)


def test_plans_that_no_kernel_runs_are_refused_by_name() -> None:
    case = Case((8,), 128, 64, 4, 2)
    tensors = make(case)
    with Session(case.plan()) as session:
        session.plan = dataclasses.replace(session.plan, block_n=128)
        with pytest.raises(RuntimeError, match="block_n"):
            single(session, tensors)
        session.plan = dataclasses.replace(session.plan, block_n=256, num_sms=1000)
        with pytest.raises(RuntimeError, match="num_sms"):
            single(session, tensors)
