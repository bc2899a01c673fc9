"""What the controller benchmark measures, and what it comes to: phases, the whole, settling, targets. Pure functions.

An *arm* is a prefill server that answers every request: ``controller``, ``native`` (SGLang's own backend) and one for
each fixed candidate, named as the controller names it. A *phase* is a rate of the link; its requests are numbered.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

CONTROLLER, NATIVE = "controller", "native"
EXPLORING = "explore"
SETTLING = 3
"""Transfers after a change of rate that the controller may need; later ones are *settled*."""
NEAR = 1.05
"""A choice is a good one where its fixed arm takes at most so many times as long as the best arm."""
WARM_UP = -1
_DRAWS = 2000


@dataclass(frozen=True)
class Phase:
    """One rate of the link.

    Attributes:
        rate_gbps: Gb/s; 0: no limit.
        requests: that every arm answers in it.
        goodput_gbps: what a plain socket got.
        load: the machine's load average when it began.
        began_s: seconds since the run began.
    """

    rate_gbps: float
    requests: int
    goodput_gbps: float = 0.0
    load: float = 0.0
    began_s: float = 0.0

    @property
    def label(self) -> str:
        """Of tables and plots."""
        return f"{self.rate_gbps:g} Gb/s" if self.rate_gbps else "no limit"


@dataclass(frozen=True)
class Sample:
    """One request on one arm; seconds and bytes.

    Attributes:
        phase: its number; `WARM_UP` for what came before the first.
        number: of the request in the phase.
        sent_s: since the run began.
        ttft_s: request sent to answer received.
        transfer_s: sum over the chunks, start to end.
        pack_s, write_s, wait_s: sums over the payloads, which overlap.
        candidate, decision: what the controller chose and why; the arm's own name elsewhere.
        target_s, max_kl: TTFT target and largest KL that the request asked for, on every arm.
    """

    arm: str
    phase: int
    number: int
    prompt_tokens: int
    sent_s: float
    ttft_s: float
    transfer_s: float
    native_bytes: int
    wire_bytes: int
    chunks: int = 1
    writes: int = 0
    pack_s: float = 0.0
    write_s: float = 0.0
    wait_s: float = 0.0
    candidate: str = ""
    decision: str = ""
    target_s: float | None = None
    max_kl: float | None = None


@dataclass(frozen=True)
class Ratio:
    """Median of paired ratios, one a request, and the middle 95 % of its bootstrap."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class PhaseResult:
    """One phase.

    Attributes:
        transfer_s, ttft_s: median of each arm over the settled requests.
        best: fixed arm of the least median transfer.
        of_best: the controller's transfers over those of ``best``, settled requests.
        whole_of_best: sum of the controller's transfers over that of ``best``, all requests that both answered.
        settled_after: transfers until every choice that was no trial was a good one: its fixed arm at most `NEAR` times
            as long as the best of those that the controller may choose, or the same request on that arm; None: never.
        switches: changes of the candidate, trials left out.
        chosen: requests of each candidate.
    """

    phase: Phase
    transfer_s: dict[str, float]
    ttft_s: dict[str, float]
    best: str
    of_best: Ratio
    whole_of_best: float
    settled_after: int | None
    switches: int
    chosen: dict[str, int]


@dataclass(frozen=True)
class Whole:
    """The controller against one fixed arm over all phases, settling included: sums, and the mean of logarithms."""

    arm: str
    transfer_s: float
    transfer_ratio: float
    ttft_ratio: float
    geometric_transfer_ratio: float
    geometric_ttft_ratio: float


def read_samples(document: Mapping[str, Any]) -> tuple[list[Phase], list[Sample]]:
    """Phases and samples of a controller.json."""
    known = {field.name for field in fields(Sample)}
    phases = [Phase(**phase) for phase in document["phases"]]
    samples = [Sample(**{k: v for k, v in sample.items() if k in known}) for sample in document["samples"]]
    limit = document.get("settings", {}).get("max_kl")  # of the server: a request can only ask for less
    if limit is not None:
        samples = [replace(s, max_kl=min(float(limit), math.inf if s.max_kl is None else s.max_kl)) for s in samples]
    return phases, samples


def losses_of(document: Mapping[str, Any]) -> dict[str, float]:
    """KL that each fixed arm is said to cost, nats a token."""
    named = {c.get("label") or f"{Path(c['profile']).stem}@{c['budget']:g}": c["kl"] for c in document["candidates"]}
    return {NATIVE: 0.0, **named}


def choices_of(samples: Sequence[Sample], losses: Mapping[str, float]) -> list[str]:
    """Fixed arms among ``samples`` that lose no more than any of these requests allows: the controller's choices."""
    limit = min((s.max_kl for s in samples if s.max_kl is not None), default=math.inf)
    return [arm for arm in dict.fromkeys(s.arm for s in samples) if arm != CONTROLLER and losses.get(arm, 0.0) <= limit]


def phase_results(
    phases: Sequence[Phase], samples: Sequence[Sample], losses: Mapping[str, float] | None = None
) -> list[PhaseResult]:
    """Every phase that was measured to its end; ``losses`` as `losses_of`, without them all arms are choices."""
    return [
        _phase(phase, [s for s in samples if s.phase == number], losses or {})
        for number, phase in enumerate(phases)
        if any(s.phase == number for s in samples)
    ]


def whole(samples: Sequence[Sample]) -> list[Whole]:
    """The controller against every fixed arm, over the requests that all arms answered."""
    measured = [sample for sample in samples if sample.phase != WARM_UP]
    arms = list(dict.fromkeys(sample.arm for sample in measured))
    table = {arm: {(s.phase, s.number): s for s in measured if s.arm == arm} for arm in arms}
    common = set.intersection(*(set(requests) for requests in table.values()))
    own = [table[CONTROLLER][key] for key in sorted(common)]
    results = []
    for arm in arms:
        other = [table[arm][key] for key in sorted(common)]
        results.append(
            Whole(
                arm=arm,
                transfer_s=sum(s.transfer_s for s in other),
                transfer_ratio=_sum_ratio(own, other, _transfer),
                ttft_ratio=_sum_ratio(own, other, _ttft),
                geometric_transfer_ratio=_geometric_ratio(own, other, _transfer),
                geometric_ttft_ratio=_geometric_ratio(own, other, _ttft),
            )
        )
    return results


def bypass_cost(
    phases: Sequence[Phase], samples: Sequence[Sample], of: Callable[[Sample], float] | None = None
) -> Ratio | None:
    """The controller's native transfers over those of plain SGLang, same requests, where the link has no limit.

    ``of``: what is compared; the transfer time by default.
    """
    unlimited = {number for number, phase in enumerate(phases) if not phase.rate_gbps}
    plain = {(s.phase, s.number): s for s in samples if s.arm == NATIVE}
    value = of or _transfer
    ratios = [
        value(s) / value(plain[s.phase, s.number])
        for s in samples
        if s.arm == CONTROLLER and s.phase in unlimited and s.candidate == NATIVE and (s.phase, s.number) in plain
    ]
    return paired(ratios) if len(ratios) > 1 else None


def paired(ratios: Sequence[float]) -> Ratio:
    """Median of ``ratios`` and the middle 95 % of its bootstrap, drawn with a fixed seed."""
    chance = random.Random(0)
    medians = sorted(statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(_DRAWS))
    return Ratio(statistics.median(ratios), medians[round(0.025 * _DRAWS)], medians[round(0.975 * _DRAWS) - 1])


def _transfer(sample: Sample) -> float:
    return sample.transfer_s


def _ttft(sample: Sample) -> float:
    return sample.ttft_s


def _phase(phase: Phase, samples: Sequence[Sample], losses: Mapping[str, float]) -> PhaseResult:
    arms = list(dict.fromkeys(sample.arm for sample in samples))
    settled = {arm: [s for s in samples if s.arm == arm and s.number >= SETTLING] for arm in arms}
    # A phase that was cut short, or is no longer than the settling, is judged by what there is.
    if not all(settled.values()):
        settled = {arm: [s for s in samples if s.arm == arm] for arm in arms}
    transfer = {arm: statistics.median(s.transfer_s for s in settled[arm]) for arm in arms}
    choices = choices_of(samples, losses)
    best = min(choices, key=lambda arm: transfer[arm])
    other = {s.number: s for s in samples if s.arm == best}
    own = sorted((s for s in samples if s.arm == CONTROLLER), key=lambda s: s.number)
    both = [s for s in own if s.number in other]
    good = {arm for arm in choices if transfer[arm] <= NEAR * transfer[best]}
    steady = [s for s in own if s.decision != EXPLORING]
    return PhaseResult(
        phase=phase,
        transfer_s=transfer,
        ttft_s={arm: statistics.median(s.ttft_s for s in settled[arm]) for arm in arms},
        best=best,
        of_best=paired([s.transfer_s / other[s.number].transfer_s for s in settled[CONTROLLER] if s.number in other]),
        whole_of_best=_sum_ratio(both, [other[s.number] for s in both], _transfer),
        settled_after=_settled_after(own, good, {number: s.transfer_s for number, s in other.items()}),
        switches=sum(a.candidate != b.candidate for a, b in itertools.pairwise(steady)),
        chosen={c: sum(s.candidate == c for s in own) for c in dict.fromkeys(s.candidate for s in own)},
    )


def _settled_after(own: Sequence[Sample], good: set[str], best_s: Mapping[int, float]) -> int | None:
    """By cost, not by name: a choice is good too where this request took hardly longer than on the best arm."""

    def is_bad(sample: Sample) -> bool:
        if sample.decision == EXPLORING or sample.candidate in good:
            return False
        return sample.transfer_s > NEAR * best_s.get(sample.number, 0.0)

    bad = [s.number for s in own if is_bad(s)]
    if not bad:
        return 0
    return None if bad[-1] == own[-1].number else bad[-1] + 1


def _sum_ratio(own: Sequence[Sample], other: Sequence[Sample], of: Callable[[Sample], float]) -> float:
    return sum(map(of, own)) / sum(map(of, other))


def _geometric_ratio(own: Sequence[Sample], other: Sequence[Sample], of: Callable[[Sample], float]) -> float:
    logs = [math.log(of(a) / of(b)) for a, b in zip(own, other, strict=True)]
    return math.exp(statistics.mean(logs))
