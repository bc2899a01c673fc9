"""Which requests of a controller's run were late for their TTFT target, and whether some fixed profile was not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from controller_samples import CONTROLLER, SETTLING, Phase, Sample, choices_of

FEASIBLE = 0.1
"""A profile is feasible in a phase where its fixed arm is late in at most such a share of the requests."""


@dataclass(frozen=True)
class Violations:
    """Of one phase.

    Attributes:
        target_s: of its requests.
        late: requests over their target, by arm.
        avoidable: the controller's, of those that a fixed arm which it may choose answered in time.
        feasible: those of ``avoidable`` that such an arm answered in time which is feasible (`FEASIBLE`): violations
            that a feasible profile would have avoided.
        avoidable_settled, feasible_settled: the same without the first requests of the phase.
    """

    phase: Phase
    target_s: float
    late: dict[str, int]
    avoidable: int
    avoidable_settled: int
    feasible: int
    feasible_settled: int


def violations(
    phases: Sequence[Phase], samples: Sequence[Sample], losses: Mapping[str, float] | None = None
) -> list[Violations]:
    """Of every phase whose requests had a target; ``losses`` as `controller_samples.losses_of`."""
    found = []
    for number, phase in enumerate(phases):
        asked = [s for s in samples if s.phase == number and s.target_s is not None]
        if asked:
            found.append(_of_phase(phase, asked, losses or {}))
    return found


def _of_phase(phase: Phase, samples: Sequence[Sample], losses: Mapping[str, float]) -> Violations:
    arms = list(dict.fromkeys(s.arm for s in samples))
    late = {arm: sum(_is_late(s) for s in samples if s.arm == arm) for arm in arms}
    choices = choices_of(samples, losses)
    feasible = [arm for arm in choices if late[arm] <= FEASIBLE * sum(s.arm == arm for s in samples)]
    own = [s.number for s in samples if s.arm == CONTROLLER and _is_late(s)]
    avoidable = [number for number in own if number in _in_time(samples, choices)]
    avoided = [number for number in own if number in _in_time(samples, feasible)]
    return Violations(
        phase=phase,
        target_s=max(s.target_s or 0.0 for s in samples),
        late=late,
        avoidable=len(avoidable),
        avoidable_settled=sum(number >= SETTLING for number in avoidable),
        feasible=len(avoided),
        feasible_settled=sum(number >= SETTLING for number in avoided),
    )


def _is_late(sample: Sample) -> bool:
    return sample.target_s is not None and sample.ttft_s > sample.target_s


def _in_time(samples: Sequence[Sample], arms: Sequence[str]) -> set[int]:
    """Numbers of the requests that one of ``arms`` answered in time."""
    return {s.number for s in samples if s.arm in arms and not _is_late(s)}
