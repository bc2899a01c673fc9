"""What the controller benchmark makes of its samples: best fixed choice, settling, switches, targets, the whole."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
from controller import Fixed, arms_of
from controller_cost import seconds_per_room
from controller_report import report_of
from controller_samples import (
    CONTROLLER,
    NATIVE,
    Phase,
    Sample,
    bypass_cost,
    paired,
    phase_results,
    read_samples,
    whole,
)
from controller_simulation import Replayed
from controller_simulation import report_of as simulation_report_of

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
    first, second = phase_results(PHASES, samples)
    assert (first.late, first.avoidable, first.avoidable_settled) == (2, 2, 1)
    assert second.late == 0
    none = phase_results(PHASES, [replace(s, target_s=0.5) for s in run({(0, 1): NATIVE})])[0]
    assert (none.late, none.avoidable) == (8, 0)


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
