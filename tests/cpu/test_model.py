"""The Burst-Gap law: closed forms against the recursion, and against bursts measured by a probe."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from xstage_ext import machine
from xstage_ext.model import BurstGap, Regime, burst_shadow, drain_us, paced, shadow_us

# The shipped profile changes with every calibration; these numbers belong to one probe.
PROBE = machine.load(pathlib.Path(__file__).parent / "data" / "h200x2_probe.json")

T0 = st.floats(0.01, 10.0)
R = st.floats(20.0, 900.0)
Q = st.floats(0.0, 8e6)
V = st.floats(1e3, 2e7)
G = st.floats(0.0, 60.0)
laws = st.builds(BurstGap, T0, R, Q, V)


def run(law: BurstGap, gap: float, bursts: int):
    return law.transient(np.full(bursts, gap))


@given(laws, G)
@settings(max_examples=300)
def test_recursion_reaches_the_steady_law_after_onset(law, gap):
    onset = float(law.bursts_until_onset(gap))
    steady = float(law.steady(gap))
    if np.isinf(onset):
        trace = run(law, gap, 50)
        np.testing.assert_allclose(trace.T_iss_us, law.T0_us)
        assert steady == pytest.approx(float(law.T0_us), abs=1e-9)
        return
    assume(onset < 3000)
    trace = run(law, gap, int(onset) + 4)
    np.testing.assert_allclose(trace.T_iss_us[-2:], steady, rtol=1e-6, atol=1e-6)


@given(laws, G)
@settings(max_examples=300)
def test_onset_is_the_first_burst_that_stalls(law, gap):
    onset = float(law.bursts_until_onset(gap))
    assume(np.isinf(onset) or onset < 3000)
    growth = float(law.drain_us - law.T0_us - gap)
    slack = float(law.T0_us - law.capacity_term_us)
    # Skip points where rounding decides which burst is the first.
    assume(abs(slack) > 1e-6 and abs(growth) > 1e-6)
    assume(abs(slack / growth - round(slack / growth)) > 1e-3)
    stalled = run(law, gap, 50 if np.isinf(onset) else int(onset) + 2).T_iss_us > law.T0_us + 1e-12
    assert (not stalled.any()) if np.isinf(onset) else (int(np.argmax(stalled)) == onset)


@given(laws, st.lists(G, min_size=1, max_size=40), st.floats(0.0, 8e6))
def test_bytes_are_conserved_and_capacity_holds(law, gaps, q0):
    trace = law.transient(np.array(gaps), q0_bytes=q0)
    rate = float(law.R_GBps) * 1e3
    assert (trace.T_iss_us >= law.T0_us).all()
    assert (trace.q_bytes >= 0).all()
    in_flight = trace.q_bytes + law.V_bytes - rate * trace.T_iss_us
    assert (in_flight <= np.maximum(law.Q_bytes, 0) + 1.0).all()
    issued = np.arange(len(gaps)) * float(law.V_bytes) + q0
    clock = np.concatenate([[0.0], np.cumsum(trace.T_iss_us + gaps)])[:-1]
    drained = issued - trace.q_bytes
    assert (drained <= rate * clock + 1.0).all()
    assert (trace.visible_us >= trace.T_iss_us).all()


@given(laws, G)
def test_terms_regimes_and_counterfactuals(law, gap):
    steady = float(law.steady(gap))
    t0, drain, capacity = float(law.T0_us), float(law.drain_us) - gap, float(law.capacity_term_us)
    assert steady == max(t0, drain, capacity)
    assert float(law.period(gap)) == pytest.approx(steady + gap)
    regime = Regime(int(law.regime(gap)))
    assert {Regime.FREE: t0, Regime.DRAIN: drain, Regime.CAPACITY: capacity}[regime] == steady
    assert float(law.two_term(gap)) <= steady
    if law.V_bytes <= law.Q_bytes + law.R_GBps * 1e3 * law.T0_us:
        assert float(law.two_term(gap)) == pytest.approx(steady, rel=1e-9, abs=1e-9)
    assert float(law.unbounded_async(gap)) == t0 <= steady
    assert float(law.rate_only(gap)) <= float(law.two_term(gap))
    assert float(law.completion_coupled(gap)) >= steady - 1e-9


@given(laws)
def test_recovery_gap_is_the_smallest_free_gap(law):
    gap = float(law.recovery_gap())
    if np.isinf(gap):
        assert law.capacity_term_us > law.T0_us
        assert law.regime(1e9) == Regime.CAPACITY
        return
    assert float(law.stall(gap)) == pytest.approx(0.0, abs=1e-9)
    if gap > 1e-3:
        assert float(law.stall(gap * (1 - 1e-3))) > 0.0


@given(laws, G, st.floats(1.0, 3.0))
def test_monotone(law, gap, factor):
    bigger = BurstGap(law.T0_us, law.R_GBps, law.Q_bytes, law.V_bytes * factor)
    faster = BurstGap(law.T0_us, law.R_GBps * factor, law.Q_bytes, law.V_bytes)
    deeper = BurstGap(law.T0_us, law.R_GBps, law.Q_bytes * factor, law.V_bytes)
    assert bigger.steady(gap) >= law.steady(gap)
    assert deeper.steady(gap) <= law.steady(gap)
    assert law.steady(gap * factor) <= law.steady(gap)
    if law.V_bytes >= law.Q_bytes:
        assert faster.steady(gap) <= law.steady(gap)


def test_fence_adds_its_latency():
    law = BurstGap(0.5, 400.0, 4e6, 4e6, visibility_us=0.9)
    assert law.completion_coupled(100.0) == pytest.approx(10.0 + 0.9)


def test_everything_broadcasts():
    law = BurstGap(np.array([[0.2], [0.6]]), 370.0, 2.8e6, np.array([1e6, 4e6, 8e6]))
    assert law.steady(3.0).shape == (2, 3)
    assert law.recovery_gap().shape == (2, 3)
    assert law.bursts_until_onset(3.0).shape == (2, 3)
    trace = law.transient(np.full((7, 1, 1), 3.0))
    assert trace.T_iss_us.shape == trace.q_bytes.shape == trace.visible_us.shape == (7, 2, 3)


@pytest.mark.parametrize("bad", [{"R_GBps": 0.0}, {"T0_us": -1.0}, {"V_bytes": np.nan}])
def test_refuses_what_is_no_law(bad):
    good = {"T0_us": 1.0, "R_GBps": 300.0, "Q_bytes": 1e6, "V_bytes": 1e6}
    with pytest.raises(ValueError, match=next(iter(bad))):
        BurstGap(**(good | bad))


# Isolated bursts of 132 SMs of an H200 (mean over producers), as the provisional profile's probe
# saw them: (mechanism, KiB per producer, us).
ISOLATED = [
    ("st", 2, 0.17),
    ("st", 16, 0.27),
    ("st", 24, 0.73),
    ("st", 32, 3.77),
    ("st", 48, 9.93),
    ("st", 64, 15.79),
    ("bulk", 8, 0.27),
    ("bulk", 16, 2.34),
    ("bulk", 32, 8.19),
    ("bulk", 64, 19.33),
]


@pytest.mark.parametrize(("name", "kib", "seen_us"), ISOLATED)
def test_isolated_bursts_of_the_probe(name, kib, seen_us):
    profile = PROBE
    law = BurstGap.of(profile.mechanism(name), 132, kib * 1024)
    assert float(law.steady(1e6)) == pytest.approx(seen_us, abs=0.5)


SHADOWS = [
    ("st", "load", 132, 32, 1.0, 8.69),
    ("st", "load", 132, 64, 8.0, 12.87),
    ("bulk", "bulk_load", 132, 32, 3.0, 8.03),
    ("bulk", "bulk_load", 132, 64, 1.0, 21.36),
    ("bulk", "load", 132, 64, 3.0, 2.31),
    ("st", "bulk_load", 132, 64, 3.0, 9.86),
    ("bulk", "load", 16, 32, 1.0, 0.19),
    ("st", "load", 132, 32, 30.0, 0.18),
]


@pytest.mark.parametrize(("name", "op", "k", "kib", "delay", "seen_us"), SHADOWS)
def test_shadows_of_the_probe(name, op, k, kib, delay, seen_us):
    predicted = burst_shadow(PROBE, name, op, k, kib * 1024, delay)
    assert float(predicted) == pytest.approx(seen_us, rel=0.2)


@given(st.floats(0, 60), st.floats(1e3, 2e5), st.floats(1, 132))
def test_shadow_shrinks_with_delay_and_never_below_base(delay, nbytes, k):
    profile = PROBE
    for key, shadow in profile.shadow.items():
        rate = profile.mechanism(key.split("/")[0]).R_GBps(k)
        now = shadow_us(shadow, rate, k, nbytes, delay)
        assert now >= shadow.base_us
        assert shadow_us(shadow, rate, k, nbytes, delay + 1.0) <= now
        assert now <= shadow.base_us + float(drain_us(k * nbytes, rate)) + 1e-9


def test_pacing_frees_what_a_burst_stalls():
    profile = PROBE
    tile_us, tile_bytes = 33.0, 65536
    burst = BurstGap.of(profile.mechanism("bulk"), 132, tile_bytes)
    law, gap = paced(profile, "bulk", 132, tile_bytes, tile_us, 2048)
    assert burst.steady(tile_us) > 5.0
    assert law.steady(gap) == pytest.approx(float(law.T0_us))
    # What the link cannot carry, pacing does not carry either.
    law, gap = paced(profile, "bulk", 132, tile_bytes, 10.0, 2048)
    assert float(law.steady(gap)) > float(law.T0_us)


def test_background_and_remote_share():
    mechanism = PROBE.mechanism("st")
    law = BurstGap.of(mechanism, 132, 32768, remote_share=0.5, background_GBps=173.0)
    assert float(law.V_bytes) == 132 * 32768 / 2
    assert float(law.R_GBps) == pytest.approx(float(mechanism.R_GBps(132)) - 173.0)
    assert float(law.T0_us) == float(mechanism.T0_us(132, 32768))
