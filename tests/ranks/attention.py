"""What the processes of `launch` do with Ulysses attention."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from xstage_ext import SymmetricWorkspace, UlyssesAttention, ulysses_attention
from xstage_ext import reference_attention as reference
from xstage_ext.errors import PeerError
from xstage_ext.key_segments import segments_from_lengths
from xstage_ext.planner.attention import AttentionPlan, even_split
from xstage_ext.ulysses import ulysses_a2a

from .scenarios import Place, report, reported

CLOSE = {"rtol": 1e-2, "atol": 1e-2}


def whole(
    place: Place, rows: int, heads: int, kv_heads: int, head_dim: int, seed: int = 0, batch: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v of the whole sequence, the same in every process."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, rows, count, head_dim) for count in (heads, kv_heads, kv_heads)]
    return tuple(  # type: ignore[return-value]
        torch.randn(shape, generator=generator).bfloat16().to(place.device) for shape in shapes
    )


def mine(tensor: torch.Tensor, rows: tuple[int, ...], rank: int) -> torch.Tensor:
    return reference.shards(tensor, rows)[rank]


def assert_right(
    place: Place, module: UlyssesAttention, total: int, heads: int, kv_heads: int, seed: int
) -> None:
    """One call with uneven shards, against the reference of the whole."""
    rows = even_split(total, place.world)
    q, k, v = whole(place, total, heads, kv_heads, 64, seed)
    out = module(*(mine(t, rows, module.rank) for t in (q, k, v)), rows=total)
    expected, _ = reference.attention(q, k, v, causal=module.causal)
    torch.testing.assert_close(out.float(), mine(expected, rows, module.rank), **CLOSE)


def calls(
    place: Place,
    totals: list[int],
    heads: int,
    kv_heads: int,
    impl: str,
    causal: bool,
    backend: str,
) -> None:
    """Several lengths, largest first, through one module."""
    place.join(backend)
    module = UlyssesAttention(
        heads, 64, kv_heads=kv_heads, device=place.device, impl=impl, causal=causal
    )
    module.prepare(max(totals))
    for seed, total in enumerate(totals):
        assert_right(place, module, total, heads, kv_heads, seed)
    report(path=module.path, reason=module.fallback_reason)
    module.close()
    dist.destroy_process_group()


def paths_agree(place: Place) -> None:
    """The three paths on the same inputs; lengths and joint text as users pass them."""
    place.join("gloo")
    rows, text = even_split(203, place.world), (20,) + (0,) * (place.world - 1)
    q, k, v = whole(place, 203, 6, 3, 64)
    tq, tk, tv = whole(place, 20, 6, 3, 64, seed=1)
    own = [mine(t, rows, place.rank) for t in (q, k, v)]
    own_text = tuple(mine(t, text, place.rank) for t in (tq, tk, tv))
    pairs = [torch.cat(pair, 1) for pair in ((tq, q), (tk, k), (tv, v))]
    valid = segments_from_lengths(torch.tensor([180]))
    expected, _ = reference.attention(*pairs, key_segments=valid)
    results = {}
    for path in ("fused", "serial", "torch"):
        module = UlyssesAttention(6, 64, kv_heads=3, device=place.device, impl="auto")
        if path == "torch":
            module = UlyssesAttention(6, 64, kv_heads=3, device=place.device, impl="torch")
        module.prepare(tuple(a + b for a, b in zip(rows, text, strict=True)))
        if path == "serial":
            import dataclasses

            assert module._route is not None
            module._route = dataclasses.replace(module._route, path="serial")
        out, out_text = module(*own, rows=rows, joint=own_text, joint_rows=text, key_segments=valid)
        torch.testing.assert_close(out.float(), mine(expected[:, 20:], rows, place.rank), **CLOSE)
        torch.testing.assert_close(
            out_text.float(), mine(expected[:, :20], text, place.rank), **CLOSE
        )
        results[path] = out.clone()
        del out, out_text
        module.close()
    torch.testing.assert_close(results["fused"], results["serial"], **CLOSE)
    report(done=True)


def functional(place: Place) -> None:
    """`ulysses_attention` with a subgroup beside WORLD: CFG 2 x Ulysses 2."""
    place.join("gloo")
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = groups[place.rank % 2]
    rows = (33, 32)
    q, k, v = whole(place, 65, 4, 4, 64, seed=place.rank % 2)
    rank = dist.get_rank(group)
    own = [mine(t, rows, rank) for t in (q, k, v)]
    for _ in range(3):
        out = ulysses_attention(*own, group=group, rows=65)
        expected, _ = reference.attention(q, k, v)
        torch.testing.assert_close(out.float(), mine(expected, rows, rank), **CLOSE)
        del out
    q, k, v = whole(place, 65, 4, 4, 64, seed=9)
    rows4 = even_split(65, 4)
    out = ulysses_attention(*(mine(t, rows4, place.rank) for t in (q, k, v)), rows=65)
    expected, _ = reference.attention(q, k, v)
    torch.testing.assert_close(out.float(), mine(expected, rows4, place.rank), **CLOSE)
    report(done=True)


def one_rank_falls_back(place: Place) -> None:
    """XSTAGE_IMPL=fallback on rank 1 only."""
    if place.rank == 1:
        os.environ["XSTAGE_IMPL"] = "fallback"
    place.join("gloo")
    module = UlyssesAttention(4, 64, device=place.device)
    assert_right(place, module, 65, 4, 4, 0)
    report(path=module.path, reason=module.fallback_reason)


def other_lengths(place: Place, prepared: bool) -> None:
    """Rank 0 has 500 rows, rank 1 525, and neither says so: both are told."""
    place.join("gloo")
    module = UlyssesAttention(4, 64, device=place.device)
    if prepared:
        module.prepare(1200)
        module.check()
    q, k, v = whole(place, (500, 525)[place.rank], 4, 4, 64)
    reported(lambda: module(q, k, v))


def recovery_with_the_error_at_hand(place: Place) -> None:
    """The same, and the next calls are right while somebody still looks at the exception."""
    place.join("gloo")
    module = UlyssesAttention(4, 64, device=place.device)
    module.prepare(1200)
    q, k, v = whole(place, (500, 525)[place.rank], 4, 4, 64)
    caught = None
    try:
        module(q, k, v)
    except Exception as error:
        caught = error
    for seed in range(4):
        assert_right(place, module, 515, 4, 4, seed)
    report(error=type(caught).__name__)


def refused_call(place: Place) -> None:
    """Rank 0 passes too many heads: both raise, none hangs, the next call is right."""
    place.join("gloo")
    module = UlyssesAttention(4, 64, device=place.device)
    assert_right(place, module, 100, 4, 4, 0)
    q, k, v = whole(place, 50, 5 if place.rank == 0 else 4, 4, 64)
    try:
        module(q, k, v, rows=100)
        report(error=None)
    except Exception as error:
        report(error=type(error).__name__, text=str(error))
    assert_right(place, module, 100, 4, 4, 1)
    report(recovered=True)


def refused_calls(place: Place, prepared: bool, impl: str) -> None:
    """Rank 1 passes what only fails on its way to the launch, again and again, and goes on."""
    place.join("gloo")
    module = UlyssesAttention(4, 64, device=place.device, impl=impl)
    if prepared:
        module.prepare(120)
    q, k, v = (torch.randn(1, 40, 4, 64).bfloat16() for _ in range(3))
    text = torch.randn(1, 10, 4, 64).bfloat16()
    joints: list[Any] = [(text[:, :, :2],) * 3, (text.float(),) * 3, (text, text, None)]
    errors = []
    for joint in joints:
        own = (text,) * 3 if place.rank == 0 else joint
        try:
            module(q, k, v, joint=own, joint_rows=(10,) * place.world)
            errors.append("")
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    report(errors=errors)
    assert_right(place, module, 65, 4, 4, 1)


def log_sum_exp_by_torch(place: Place) -> None:
    """Rank 1 wants what path "torch" lacks; later rank 1 closes, and rank 0 goes on calling."""
    place.join("gloo")
    module = UlyssesAttention(4, 64, device=place.device, impl="torch")
    q, k, v = whole(place, 50, 4, 4, 64)
    errors = []
    try:
        module(q, k, v, return_lse=place.rank == 1)
    except Exception as error:
        errors.append(f"{type(error).__name__}: {error}")
    assert_right(place, module, 65, 4, 4, 1)
    if place.rank == 1:
        module.close()
    else:
        try:
            module(q, k, v)
        except PeerError as error:
            errors.append(str(error))
    report(errors=errors)


def bad_profile(place: Place) -> None:
    """Rank 1 is told to plan with a profile that is not there."""
    if place.rank == 1:
        os.environ["XSTAGE_PROFILE"] = "/nowhere.json"
    place.join("gloo")
    reported(lambda: UlyssesAttention(4, 64, device=place.device).prepare(100))


def other_order(place: Place) -> None:
    """Two modules of one name and shape share memory, and rank 1 calls them in another order."""
    place.join("gloo")
    first, second = (UlyssesAttention(4, 64, device=place.device) for _ in range(2))
    first.prepare(100)
    second.prepare(100, share=first)
    order = [first, second] if place.rank == 0 else [second, first]
    q, k, v = whole(place, 50, 4, 4, 64)
    reported(lambda: [module(q, k, v) for module in order])


def dead_peer(place: Place) -> None:
    """Rank 1 dies before its part of a call."""
    place.join("gloo")
    module = UlyssesAttention(4, 64, device=place.device)
    nbytes = module.bytes(100)
    with SymmetricWorkspace(None, nbytes, device="cpu", timeout_ms=1500) as workspace:
        module.prepare(100, workspace=workspace)
        if place.rank == 1:
            os.kill(os.getpid(), 9)
        q, k, v = whole(place, 50, 4, 4, 64)
        reported(lambda: module(q, k, v))


def exchanges(place: Place, count: int) -> None:
    """`ulysses_a2a` there and back with plans that change from call to call."""
    place.join("gloo")
    plans = [
        AttentionPlan(
            even_split(s, place.world), even_split(s, place.world), even_split(h, place.world), g
        )
        for s, h, g in ((65, 6, 3), (7, 1, 1), (64, 8, 1))
    ]
    nbytes = max(plan.a2a_region_bytes(3, 2, 16) for plan in plans)
    with SymmetricWorkspace(None, nbytes, device=place.device) as workspace:
        lease = workspace.channel("a2a", nbytes, counter_bytes=0)
        for call in range(count):
            plan = plans[call % len(plans)]
            heads = sum(plan.heads)
            q, k, v = whole(place, sum(plan.rows), heads, heads // plan.kv_group, 16, call, 2)
            outs = ulysses_a2a(lease, plan, [mine(t, plan.rows, place.rank) for t in (q, k, v)])
            for index, (out, tensor) in enumerate(zip(outs, (q, k, v), strict=True)):
                wanted = reference.to_heads(plan, tensor, query=index == 0)[place.rank]
                assert torch.equal(out, wanted)
            back = ulysses_a2a(lease, plan.to_sequence(), outs[:1])
            assert torch.equal(back[0], mine(q, plan.rows, place.rank))
            del outs, out, back
    report(done=True)


def disagree(place: Place, **by_field: list[Any]) -> None:
    """Ranks make the module with other arguments; prepare names the field."""
    place.join("gloo")
    options = {name: values[place.rank] for name, values in by_field.items()}
    heads, head_dim = options.pop("heads", 4), options.pop("head_dim", 64)
    module = UlyssesAttention(heads, head_dim, device="cpu", **options)
    workspace = SymmetricWorkspace(None, 1 << 24, device="cpu")
    reported(lambda: module.prepare(100, workspace=workspace))


def loaded_from_rank_0(place: Place, path: str) -> None:
    """All ranks load the prepared module that rank 0 saved; each takes its own place."""
    place.join("gloo")
    original = UlyssesAttention(4, 64, device=place.device)
    original.prepare(50)
    if place.rank == 0:
        torch.save(original, path)
    dist.barrier()
    loaded = torch.load(path, weights_only=False)
    assert (loaded.path, loaded.rank, loaded.world) == (None, place.rank, place.world)
    for module in (loaded, original):
        assert_right(place, module, 50, 4, 4, seed=3)
        module.close()
    dist.destroy_process_group()
