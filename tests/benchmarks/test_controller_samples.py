"""What the controller benchmark makes of its samples: best fixed choice, settling, switches, targets, the whole."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from controller import Fixed, _phases, arms_of
from controller_cost import seconds_per_room
from controller_report import report_of
from controller_samples import (
    CONTROLLER,
    NATIVE,
    Phase,
    Sample,
    bypass_cost,
    losses_of,
    paired,
    phase_results,
    read_samples,
    whole,
)
from controller_simulation import Replayed
from controller_simulation import report_of as simulation_report_of
from controller_targets import violations

PHASES = [Phase(1.0, 8, goodput_gbps=0.8), Phase(0.0, 8, goodput_gbps=8.0, began_s=100.0)]
FAST = "fast@0.5"
TIMES = {(0, NATIVE): 1.0, (0, FAST): 0.6, (1, NATIVE): 0.1, (1, FAST): 0.2}


def sample(arm: str, phase: int, number: int, seconds: float, candidate: str = "", **fields: object) -> Sample:
    native = 100_000_000
    wire = native if (candidate or arm) == NATIVE else native // 2
    sent = phase * 100.0 + number
    return Sample(  # type: ignore[arg-type]
        arm, phase, number, 1000, sent, seconds + 0.3, seconds, native, wire, candidate=candidate or arm, **fields
    )


def run(chosen: dict[tuple[int, int], str] | None = None) -> list[Sample]:
    """Both arms and a controller that takes the best but where ``chosen`` says otherwise."""
    samples = []
    for phase in (0, 1):
        for number in range(8):
            samples += [sample(arm, phase, number, TIMES[phase, arm], pack_s=0.05) for arm in (NATIVE, FAST)]
            candidate = (chosen or {}).get((phase, number), FAST if phase == 0 else NATIVE)
            samples.append(sample(CONTROLLER, phase, number, TIMES[phase, candidate], candidate, decision="envelope"))
    return samples


def test_the_best_fixed_choice_of_a_phase() -> None:
    first, second = phase_results(PHASES, run())
    assert (first.best, second.best) == (FAST, NATIVE)
    assert (first.of_best.median, first.settled_after, first.switches) == (pytest.approx(1.0), 0, 0)


def test_settling_and_switches() -> None:
    first, second = phase_results(PHASES, run({(0, 0): NATIVE, (0, 2): NATIVE, (1, 7): FAST}))
    assert (first.settled_after, first.switches) == (3, 3)
    assert (second.settled_after, second.switches) == (None, 1)
    assert first.of_best.median == pytest.approx(1.0)  # of the settled requests alone


def test_trials_count_neither_as_switches_nor_against_settling() -> None:
    samples = [replace(s, decision="explore") if s.candidate != FAST and s.arm == CONTROLLER and s.phase == 0 else s
               for s in run({(0, 5): NATIVE})]  # fmt: skip
    assert (phase_results(PHASES, samples)[0].settled_after, phase_results(PHASES, samples)[0].switches) == (0, 0)


def test_over_the_whole() -> None:
    native, fast = (next(w for w in whole(run()) if w.arm == arm) for arm in (NATIVE, FAST))
    assert native.transfer_ratio == pytest.approx((0.6 + 0.1) / (1.0 + 0.1))
    assert fast.geometric_transfer_ratio == pytest.approx(0.5**0.5)


def test_a_target_that_a_fixed_arm_met_was_avoidable() -> None:
    samples = [replace(s, target_s=1.0) for s in run({(0, 1): NATIVE, (0, 6): NATIVE})]
    first, second = violations(PHASES, samples)
    assert first.late == {NATIVE: 8, FAST: 0, CONTROLLER: 2}
    assert (first.avoidable, first.avoidable_settled, first.feasible, first.feasible_settled) == (2, 1, 2, 1)
    assert second.late[CONTROLLER] == 0
    none = violations(PHASES, [replace(s, target_s=0.5) for s in run({(0, 1): NATIVE})])[0]
    assert (none.late[CONTROLLER], none.avoidable) == (8, 0)
    assert violations(PHASES, run()) == []


def test_an_arm_that_was_in_time_by_chance_is_no_feasible_profile() -> None:
    samples = [replace(s, target_s=0.5) for s in run()]
    lucky = [replace(s, ttft_s=0.4) if (s.arm, s.phase, s.number) == (NATIVE, 0, 5) else s for s in samples]
    first = violations(PHASES, lucky)[0]
    assert (first.late[CONTROLLER], first.avoidable, first.feasible) == (8, 1, 0)


def test_an_arm_that_loses_more_than_the_requests_allow_is_no_choice() -> None:
    samples = [replace(s, max_kl=0.01, target_s=1.0) for s in run({(0, n): NATIVE for n in range(8)})]
    first = phase_results(PHASES, samples, {NATIVE: 0.0, FAST: 0.1})[0]
    assert (first.best, first.of_best.median, first.settled_after) == (NATIVE, pytest.approx(1.0), 0)
    late = violations(PHASES, samples, {NATIVE: 0.0, FAST: 0.1})[0]
    assert (late.late[CONTROLLER], late.avoidable) == (8, 0)
    allowed = {**document(), "samples": [asdict(s) for s in samples]}
    assert f"{FAST} (loses more than was asked for)" in report_of(allowed)
    assert f"{NATIVE} (loses" not in report_of(allowed)


def test_a_choice_that_took_no_longer_than_the_best_arm_is_settled() -> None:
    slow = run({(0, 7): NATIVE})
    assert phase_results(PHASES, slow)[0].settled_after is None
    equal = [replace(s, transfer_s=0.62) if (s.arm, s.phase, s.number) == (CONTROLLER, 0, 7) else s for s in slow]
    assert phase_results(PHASES, equal)[0].settled_after == 0


RECORDED = json.loads((Path(__file__).parents[2] / "docs/results/controller_gpu.json").read_text())


def test_a_recorded_run_in_which_the_smallest_candidate_was_best_everywhere() -> None:
    phases, samples = read_samples(RECORDED)
    results = phase_results(phases, samples, losses_of(RECORDED))
    assert [result.best for result in results] == ["aggressive@0.2"] * 6
    assert all(result.of_best.median < 1.05 and result.whole_of_best < 1.05 for result in results)
    assert [(result.settled_after, result.switches) for result in results] == [(0, 0)] * 6


def test_a_recorded_run_under_a_target_and_a_largest_kl() -> None:
    with_target = {**RECORDED, "samples": [{**s, "target_s": 0.6} for s in RECORDED["samples"]]}
    phases, samples = read_samples({**with_target, "settings": {"max_kl": "0.005"}})
    losses = losses_of(RECORDED)
    assert {result.best for result in phase_results(phases, samples, losses)} == {"balanced@0.3"}
    late = violations(phases, samples, losses)
    assert [one.late["native"] for one in late] == [0, 8, 0, 8, 0, 0]
    assert sum(one.late[CONTROLLER] for one in late) == 0
    # Had it been SGLang's own path, `balanced`, in time but once, would have avoided what was late.
    unaware = [s for s in samples if s.arm != CONTROLLER]
    unaware += [replace(s, arm=CONTROLLER) for s in samples if s.arm == NATIVE]
    assert [one.feasible for one in violations(phases, unaware, losses)] == [0, 0, 0, 8, 0, 0]


def test_phases_say_what_their_requests_ask_for() -> None:
    assert _phases("10:12,2.5:8:0.6,0:16::0.001,1:4:2:0.05") == [
        (10.0, 12, None, None),
        (2.5, 8, 0.6, None),
        (0.0, 16, None, 0.001),
        (1.0, 4, 2.0, 0.05),
    ]


def test_what_bypassing_costs() -> None:
    samples = [replace(s, transfer_s=s.transfer_s * 1.02) if s.arm == CONTROLLER else s for s in run()]
    cost = bypass_cost(PHASES, samples)
    assert cost is not None
    assert cost.median == pytest.approx(1.02)
    assert paired([1.0, 1.0, 4.0]).median == 1.0


def document() -> dict[str, object]:
    return {
        "model": "m", "device": "cpu", "sglang": "0", "cores": 2, "prompt_tokens": 1000, "fresh": False,
        "target_s": None, "failures": ["one"], "settings": {}, "safe": FAST,
        "candidates": [{"profile": "fast", "budget": 0.5, "kl": 0.1}],
        "phases": [asdict(phase) for phase in PHASES], "samples": [asdict(s) for s in run()],
    }  # fmt: skip


def test_a_report_names_every_arm_and_what_failed() -> None:
    text = report_of(document())
    for part in (FAST, NATIVE, "no limit", "1 Gb/s", "* one"):
        assert part in text
    assert read_samples(document())[1] == run()


def test_the_simulator_is_fed_with_the_phase_without_a_limit_and_predicts_the_other() -> None:
    replayed = Replayed(document(), payload_bytes=1e9)
    free = {c.arm: c for c in replayed.compared() if not c.phase.rate_gbps}
    assert free[FAST].error == pytest.approx(0.0, abs=0.01)
    limited = {c.arm: c for c in replayed.compared() if c.phase.rate_gbps}
    # .2 s without a limit, of which .05 s on the link of 1 GB/s; .1 GB/s then take .5 s.
    assert limited[FAST].predicted_s == pytest.approx(0.2 - 0.05 + 0.5, rel=0.02)
    assert limited[NATIVE].predicted_s == pytest.approx(1.0, rel=0.02)
    assert "decisions alike" in simulation_report_of(replayed)


def test_all_of_our_arms_share_a_decode_and_only_one_has_a_controller() -> None:
    candidates = (Fixed("int8", 0.52, 0.002), Fixed("balanced", 0.3, 0.005))
    arms = arms_of(candidates, candidates[0], {"explore": "0"})
    assert [arm.name for arm in arms] == [CONTROLLER, NATIVE, "int8@0.52", "balanced@0.3"]
    ours = [arm for arm in arms if arm.profile is not None]
    assert len({arm.decode_key for arm in ours}) == 1
    assert [arm.prefill_env.get("SPECTRUMKV_CONTROLLER_ENABLED") for arm in ours] == [None, "false", "false"]


def test_rooms_whose_cost_is_measured_bypass_and_take_cpu_time() -> None:
    found = seconds_per_room(20)
    assert len(found) == 20
    assert sum(found) > 0
