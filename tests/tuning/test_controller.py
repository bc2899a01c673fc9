"""Decisions: which candidate, for which reason, how soon after a change, and never below the accuracy asked for."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_link import (
    AGGRESSIVE,
    BALANCED,
    CANDIDATES,
    GBPS,
    MIB,
    NEAR,
    PACKED,
    SPEEDS,
    SimulatedLink,
)

from spectrumkv_sglang.observability.reasons import DecisionReason
from spectrumkv_sglang.tuning.controller import Controller
from spectrumkv_sglang.tuning.decision import Ask, Measured
from spectrumkv_sglang.tuning.frontier import NATIVE, Candidate
from spectrumkv_sglang.tuning.request_limits import RequestLimits, read_limits
from spectrumkv_sglang.tuning.settings import ControllerSettings

UNLIMITED = 80 * GBPS


@pytest.mark.parametrize("stalled", [NEAR.name, BALANCED.name, AGGRESSIVE.name])
@pytest.mark.parametrize("rate", [0.1, 1.0])
def test_a_candidate_whose_first_transfer_stalled_is_tried_again(stalled: str, rate: float) -> None:
    link = SimulatedLink(rate=rate * GBPS, stalls={stalled: 10.0})
    for _ in range(60):
        link.send()
    for _ in range(20):
        assert link.seconds(link.send().candidate, 32 * MIB) <= 1.05 * link.seconds(link.best(32 * MIB), 32 * MIB)


def test_a_first_native_transfer_that_stalled_is_tried_again() -> None:
    link = SimulatedLink(rate=UNLIMITED, stalls={NATIVE.name: 5.0})
    chosen = [link.send().candidate for _ in range(30)]
    assert link.stalls == {NATIVE.name: 0.0}
    assert set(chosen[-10:]) == {NATIVE}


def test_without_a_sample_the_safe_candidate() -> None:
    link = SimulatedLink()
    assert (link.send().candidate, link.send().reason) == (NEAR, DecisionReason.ENVELOPE)


@pytest.mark.parametrize(("rate", "best"), [(0.1, AGGRESSIVE), (1.0, BALANCED), (80.0, NATIVE)])
def test_the_fastest_for_the_link(rate: float, best: Candidate) -> None:
    link = SimulatedLink(rate=rate * GBPS)
    for _ in range(10):
        link.send()
    assert link.best(32 * MIB) is best
    last = link.send()
    assert link.seconds(last.candidate, 32 * MIB) <= 1.05 * link.seconds(best, 32 * MIB)
    assert last.expected_s == pytest.approx(link.seconds(last.candidate, 32 * MIB))
    if rate != 1.0:  # there, others are as good
        assert last.candidate is best


@pytest.mark.parametrize("rates", [(1.0, 0.1, 80.0, 0.5), (80.0, 0.1, 80.0, 1.0), (0.1, 80.0, 1.0, 0.1)])
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_it_settles_within_three_transfers_of_a_change(rates: tuple[float, ...], noise: float) -> None:
    link = SimulatedLink(noise=noise)
    for rate in rates:
        link.rate = rate * GBPS
        for _ in range(3):
            link.send()
        for _ in range(20):
            chosen = link.send().candidate
            best = link.seconds(link.best(32 * MIB), 32 * MIB)
            assert link.seconds(chosen, 32 * MIB) <= 1.05 * best


def test_a_short_fast_phase_is_noticed_though_native_writes_many_pieces() -> None:
    """SGLang's own path is slower than the link alone would tell: what was seen of it decides, and there is an end."""
    link = SimulatedLink(rate=UNLIMITED, native_pieces=1 / (2 * GBPS), settings={"explore": 0.1})
    chosen = [link.send().candidate for _ in range(200)]
    assert Counter(chosen[100:]).most_common(1)[0][0] is link.best(32 * MIB) is PACKED
    assert link.controller.counts.switches <= 12


@pytest.mark.parametrize("rate", [0.1, 0.9, 1.0, 1.1, 2.0, 5.0, 80.0])
def test_noise_does_not_make_it_swing(rate: float) -> None:
    link = SimulatedLink(rate=rate * GBPS, noise=0.4)
    for _ in range(500):
        link.send()
    assert link.controller.counts.switches <= 10


def test_a_link_that_swings_with_every_transfer() -> None:
    link = SimulatedLink()
    for number in range(300):
        link.rate = (GBPS, 0.2 * GBPS)[number % 2]
        link.send()
    assert link.controller.counts.switches <= 10


def test_short_prompts_are_packed() -> None:
    link = SimulatedLink()
    link.send()
    assert link.send(prompt_tokens=63).reason is DecisionReason.BELOW_MIN
    assert link.send(prompt_tokens=64).reason is not DecisionReason.BELOW_MIN


def test_rooms_under_way_share_the_link() -> None:
    link = SimulatedLink(rate=8 * GBPS)
    for _ in range(20):
        link.send()
    assert link.send().candidate is NATIVE
    assert [link.controller.sending(link.peer) for _ in range(20)] == list(range(1, 21))
    assert link.controller.decide(Ask(link.peer, 32 * MIB, 1000)).candidate is AGGRESSIVE
    assert [link.controller.sent(link.peer) for _ in range(20)] == list(range(20, 0, -1))
    assert link.controller.decide(Ask(link.peer, 32 * MIB, 1000)).candidate is NATIVE


# ---- what must not be trusted ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sample", [(0.0, 1.0), (1e6, -1.0), (math.nan, 1.0), (1e6, 0.0), (math.inf, 1.0), (1e12, 1e-9)], ids=str
)
def test_absurd_samples_lead_to_the_safe_candidate(sample: tuple[float, float]) -> None:
    link = SimulatedLink(rate=0.1 * GBPS)
    for native in (False, True):
        link.controller.link_sample(link.peer, *sample, native)
    assert link.controller.decide(Ask(link.peer, 1e6, 1000)).reason is DecisionReason.NO_SAMPLE
    for _ in range(5):
        link.send()
    assert link.send().candidate is AGGRESSIVE
    for _ in range(3):
        link.controller.link_sample(link.peer, *sample, False)
    decision = link.controller.decide(Ask(link.peer, 1e6, 1000))
    assert (decision.candidate, decision.reason) == (NEAR, DecisionReason.NO_SAMPLE)
    assert link.controller.counts.refused_samples >= 4


@pytest.mark.parametrize("jump", [-1e9, -50.0, 1e4, 1e12, math.nan, -math.inf])
def test_clock_jumps_lead_to_the_safe_candidate(jump: float) -> None:
    link = SimulatedLink(rate=0.1 * GBPS)
    for _ in range(5):
        link.send()
    link.now += jump
    decision = link.controller.decide(Ask(link.peer, 32 * MIB, 1000))
    assert (decision.candidate, decision.reason) == (NEAR, DecisionReason.NO_SAMPLE)
    link.now = 2e12
    for _ in range(3):
        link.send()
    assert link.send().candidate is AGGRESSIVE


@pytest.mark.parametrize("size", [0.0, -5.0, math.nan, math.inf])
def test_an_absurd_size_leads_to_the_safe_candidate(size: float) -> None:
    link = SimulatedLink()
    link.send()
    assert link.controller.decide(Ask(link.peer, size, 1000)).candidate is NEAR


def test_absurd_results_are_refused() -> None:
    link = SimulatedLink()
    decision = link.send()
    for seconds, unpack in ((math.nan, 0.1), (-1.0, 0.1), (0.0, 0.1), (1.0, -1.0), (1.0, math.inf)):
        link.controller.finished(decision, Measured(1e6, 1e6, seconds, 0.1, unpack))
    assert link.controller.counts.refused_samples == 5
    link.controller.finished(decision, Measured(1e300, 1e300, 1e-300, 1e-300, 1e300))  # finite: must not raise
    link.controller.decide(Ask(link.peer, 1e6, 1000))


def test_a_peer_is_not_another() -> None:
    link = SimulatedLink(rate=0.1 * GBPS)
    for _ in range(5):
        link.send()
    link.peer = "decode:2"
    assert link.send().reason is DecisionReason.NO_SAMPLE
    assert link.controller.bandwidths() == (pytest.approx(0.1 * GBPS), pytest.approx(0.1 * GBPS))


# ---- limits ------------------------------------------------------------------------------------------------------


def test_a_request_may_ask_for_more_accuracy_but_not_for_less() -> None:
    link = SimulatedLink(rate=0.1 * GBPS, settings={"max_kl": 0.01})
    for _ in range(5):
        link.send()
    assert link.send().candidate is BALANCED
    assert link.send().reason is DecisionReason.ACCURACY_FLOOR
    assert link.send(limits=RequestLimits(max_kl=0.001)).candidate is NEAR
    assert link.send(limits=RequestLimits(max_kl=1.0)).candidate is BALANCED
    assert link.send(limits=RequestLimits(max_kl=0.0)).candidate in (NATIVE, PACKED)


def test_a_safe_candidate_that_nobody_knows_the_loss_of() -> None:
    link = SimulatedLink(safe=Candidate("mine@0.3", b=0.3, kl=math.inf))
    ask = {"native_bytes": 1e6, "prompt_tokens": 1000}
    assert link.controller.decide(Ask(link.peer, **ask)).candidate.name == "mine@0.3"
    limited = link.controller.decide(Ask(link.peer, **ask, limits=RequestLimits(max_kl=5.0)))
    assert (limited.candidate, limited.reason) == (NATIVE, DecisionReason.ACCURACY_FLOOR)


def test_a_parameter_that_is_not_understood_leads_to_the_safe_candidate_and_keeps_the_floor() -> None:
    link = SimulatedLink(rate=0.1 * GBPS)
    for _ in range(5):
        link.send()
    bad = link.send(limits=read_limits({"ttft": 3}))
    assert (bad.candidate, bad.reason) == (NEAR, DecisionReason.BAD_REQUEST)
    strict = link.send(limits=read_limits({"ttft": 3, "max_kl": 0.0}))
    assert (strict.candidate, strict.reason) == (NATIVE, DecisionReason.ACCURACY_FLOOR)


@pytest.mark.parametrize(
    ("value", "limits"),
    [
        (None, RequestLimits()),
        ({}, RequestLimits()),
        ({"ttft_target_s": 2, "max_kl": 0}, RequestLimits(2.0, 0.0)),
        ({"max_kl": None}, RequestLimits()),
    ],
)
def test_parameters_that_are_understood(value: Any, limits: RequestLimits) -> None:
    assert read_limits(value) == limits


@pytest.mark.parametrize(
    "value", [3, "x", [], {"max_kl": "0.1"}, {"max_kl": True}, {"max_kl": -1}, {"max_kl": math.nan},
              {"ttft_target_s": 0}, {"ttft_target_s": math.inf}, {"MAX_KL": 0.1}, {1: 2}, {"max_kl": 10**400}]
)  # fmt: skip
def test_parameters_that_are_not(value: Any) -> None:
    found = read_limits(value)
    assert found.problem
    assert (found.ttft_target_s, found.max_kl) == (None, None)


def test_what_decode_refuses_is_not_taken() -> None:
    link = SimulatedLink(rate=0.1 * GBPS)
    for _ in range(5):
        link.send()
    assert link.send(forbidden=frozenset({AGGRESSIVE.name})).candidate is BALANCED
    everything = frozenset(c.name for c in CANDIDATES)
    decision = link.send(forbidden=everything)
    assert (decision.candidate, decision.reason) == (NATIVE, DecisionReason.FIXED)


def test_no_target_is_missed_that_some_candidate_would_meet() -> None:
    """Targets between the fastest and the slowest: whoever meets them is taken, where anybody does."""
    link = SimulatedLink(rate=GBPS, settings={"explore": 0.5})
    size = 32 * MIB
    for _ in range(60):
        link.send(size)
    times = [link.seconds(c, size) for c in (NATIVE, *CANDIDATES)]
    for share in (0.5, 1.001, 1.05, 1.2, 1.5, 3.0):
        target = min(times) * share
        for _ in range(20):
            before = link.controller.counts.violations
            decision = link.send(size, limits=RequestLimits(ttft_target_s=target))
            if share > 1:
                assert link.seconds(decision.candidate, size) <= target
                assert link.controller.counts.violations == before
            else:
                assert decision.candidate is link.best(size)
                assert link.controller.counts.violations == before + 1


def test_time_that_has_passed_counts_towards_the_target() -> None:
    link = SimulatedLink(rate=0.1 * GBPS, settings={"ttft_target_s": 2.0})
    link.send()
    assert link.send(elapsed_s=1.5).allowance_s == pytest.approx(0.5)
    late = link.send(elapsed_s=3.0)
    assert (late.allowance_s, late.reason) == (0.0, DecisionReason.SLO)
    assert late.candidate is link.best(32 * MIB)


def test_a_candidate_that_misses_its_target_too_often_rests() -> None:
    link = SimulatedLink(rate=0.1 * GBPS)
    for _ in range(5):
        link.send()
    size = 32 * MIB
    decisions = []
    for number in range(40):
        decision = link.controller.decide(
            Ask(link.peer, size, 1000, RequestLimits(ttft_target_s=link.seconds(AGGRESSIVE, size) * 1.45))
        )
        decisions.append(decision)
        slow = decision.candidate is AGGRESSIVE and number % 3 == 0
        seconds = link.seconds(decision.candidate, size) * (1.5 if slow else 1.0)
        codec = size / SPEEDS[decision.candidate.name]
        wire = size * decision.candidate.b
        link.now += seconds
        link.controller.finished(decision, Measured(size, wire, seconds, codec / 2, codec / 2))
    rested = [d for d in decisions if d.reason is DecisionReason.COOLDOWN]
    assert 8 <= len(rested) <= 24
    assert {d.candidate for d in rested} == {BALANCED}
    assert decisions[0].candidate is decisions[9].candidate is AGGRESSIVE
    assert link.controller.counts.violations >= 3


# ---- exploring ---------------------------------------------------------------------------------------------------


def test_exploring_is_bounded_in_number_and_cost() -> None:
    link = SimulatedLink(rate=1.2 * GBPS, settings={"explore": 0.1})
    for _ in range(20):
        link.send()
    best = link.seconds(link.best(32 * MIB), 32 * MIB)
    tried = [d for d in (link.send() for _ in range(500)) if d.reason is DecisionReason.EXPLORE]
    assert 20 < len(tried) < 90
    assert all(link.seconds(d.candidate, 32 * MIB) <= 1.3 * best for d in tried)


def trace(seed: int) -> list[tuple[str, str]]:
    link = SimulatedLink(rate=1.2 * GBPS, noise=0.2, settings={"explore": 0.2, "seed": seed})
    decisions = [link.send(size=(8 + number % 5 * 40) * MIB) for number in range(200)]
    return [(d.candidate.name, d.reason.value) for d in decisions]


def test_a_seed_decides_everything() -> None:
    assert trace(3) == trace(3)
    assert trace(3) != trace(4)


# ---- the accuracy floor ------------------------------------------------------------------------------------------

KL = st.floats(0, 1) | st.just(math.inf)
CANDIDATE = st.tuples(st.floats(0.05, 1.1), KL, st.none() | st.floats(1e6, 1e12))
SAMPLE = st.tuples(st.floats(allow_nan=True, allow_infinity=True), st.floats(allow_nan=True, allow_infinity=True))
STEP = st.fixed_dictionaries(
    {
        "max_kl": st.none() | st.floats(0, 1),
        "target": st.none() | st.floats(1e-3, 10),
        "tokens": st.integers(1, 2000),
        "size": st.floats(1, 1e11) | st.floats(allow_nan=True),
        "elapsed": st.floats(0, 20),
        "forbidden": st.sets(st.integers(0, 7)),
        "bad": st.booleans(),
        "jump": st.sampled_from([0.0, 0.0, 0.0, 1.0, -5.0, 1e6]),
        "rate": st.floats(1e5, 1e11),
        "sample": st.none() | SAMPLE,
        "slow": st.floats(0.2, 8),
    }
)


@settings(max_examples=300, deadline=None)
@given(
    candidates=st.lists(CANDIDATE, max_size=8),
    safe=CANDIDATE,
    configured=st.none() | st.floats(0, 1),
    explore=st.floats(0, 0.5),
    steps=st.lists(STEP, min_size=1, max_size=30),
)
def test_the_accuracy_asked_for_is_never_undercut(
    candidates: list[tuple[float, float, float | None]],
    safe: tuple[float, float, float | None],
    configured: float | None,
    explore: float,
    steps: list[dict[str, Any]],
) -> None:
    """Over random frontiers, links, results, clocks and requests."""
    made = [Candidate(f"c{number}", *fields) for number, fields in enumerate(candidates)]
    now = 0.0
    controller = Controller(
        made,
        Candidate("safe", *safe),
        ControllerSettings(max_kl=configured, explore=explore),
        min_tokens=64,
        clock=lambda: now,
    )
    for step in steps:
        now += step["jump"]
        limits = RequestLimits(step["target"], step["max_kl"], "unreadable" if step["bad"] else "")
        forbidden = {f"c{number}" for number in step["forbidden"]}
        ask = Ask("peer", step["size"], step["tokens"], limits, step["elapsed"], forbidden)
        decision = controller.decide(ask)
        for limit in (step["max_kl"], configured):
            assert limit is None or decision.candidate.kl <= limit
        assert decision.candidate.name not in forbidden
        if step["sample"] is not None:
            controller.link_sample("peer", *step["sample"], bool(step["tokens"] % 2))
        size = step["size"] if math.isfinite(step["size"]) and step["size"] > 0 else 1e6
        wire = size * decision.candidate.b
        controller.link_sample("peer", wire, wire / step["rate"], decision.candidate is NATIVE)
        seconds = wire / step["rate"] * step["slow"]
        controller.finished(decision, Measured(size, wire, seconds, seconds / 3, seconds / 3))
