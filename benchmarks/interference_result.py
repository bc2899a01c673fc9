"""Decode throughput in windows with and without arriving KV, and what it loses."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from spectrumkv_sglang.errors import SpectrumKVError

QUIET = "quiet"
BASE = "plain-tuned"


class WindowError(SpectrumKVError):
    """Answers that were never under way all at once."""


@dataclass(frozen=True)
class Window:
    """A span in which all answers were under way.

    Attributes:
        seconds: its length.
        tokens: tokens that came in it, of all answers.
        itl_ms_p50: median time between two tokens of one answer.
        itl_ms_p99: its 99th percentile.
    """

    seconds: float
    tokens: int
    itl_ms_p50: float
    itl_ms_p99: float


@dataclass(frozen=True)
class Round:
    """One window of one variant.

    Attributes:
        variant: name.
        kind: "quiet", or how prompts arrived.
        repeat: number of the repetition, from 0.
        window: decode's tokens.
        arrivals: prompts that were sent.
        late: those that started late, see `Arrivals`.
        arrival_seconds: median time that one took; None without any.
        link_bytes: bytes that left prefill's interface within the window.
        cpu_seconds: of both servers' process trees within the window.
    """

    variant: str
    kind: str
    repeat: int
    window: Window
    arrivals: int
    late: int
    arrival_seconds: float | None
    link_bytes: int
    cpu_seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Decode throughput of all answers together."""
        return self.window.tokens / self.window.seconds


def window_of(answers: Sequence[Sequence[tuple[float, int]]]) -> Window:
    """The window from the last answer's first token to the first answer's last one.

    Args:
        answers: for each answer, when chunks came (seconds), with the number of tokens so far.

    Raises:
        WindowError: there is no such span.
    """
    start = max(times[0][0] for times in answers)
    end = min(times[-1][0] for times in answers)
    inside = [[(at, tokens) for at, tokens in times if start <= at <= end] for times in answers]
    gaps = [
        (later[0] - earlier[0]) / (later[1] - earlier[1]) * 1e3
        for times in inside
        for earlier, later in pairwise(times)
        for _ in range(later[1] - earlier[1])
    ]
    tokens = sum(times[-1][1] - times[0][1] for times in inside if times)
    if end <= start or tokens == 0 or len(gaps) < 2:
        raise WindowError(
            "the answers were not all under way at once: make them longer, --stream-tokens (the last one started "
            f"{start - end:.3f} s after the end of the first)"
        )
    return Window(
        seconds=end - start,
        tokens=tokens,
        itl_ms_p50=statistics.median(gaps),
        itl_ms_p99=statistics.quantiles(gaps, n=100, method="inclusive")[-1],
    )


@dataclass(frozen=True)
class Spread:
    """Median, smallest and largest of what the repetitions gave."""

    median: float
    least: float
    most: float


@dataclass(frozen=True)
class InterferenceRow:
    """One variant and kind over all repetitions.

    Attributes:
        variant: name.
        kind: see `Round`.
        tokens_per_second: decode throughput.
        loss: share of the same repetition's quiet throughput that is lost; None for quiet rounds.
        of_base: what is kept of the quiet throughput, relative to what the tuned plain pair keeps in the same
            repetition and kind; 1 is equal.
        lost_per_arrival: tokens that decode generated less for each prompt that arrived.
        itl_ms_p50: median time between tokens, median over the repetitions.
        itl_ms_p99: 99th percentile, median over the repetitions.
        arrivals: prompts in a round.
        late: those that started late, of all rounds.
        arrival_seconds: time that one took.
        link_gbps: rate at which bytes left prefill within the window.
        cpu_seconds_per_second: cores that both servers kept busy.
    """

    variant: str
    kind: str
    tokens_per_second: Spread
    loss: Spread | None
    of_base: Spread | None
    lost_per_arrival: float | None
    itl_ms_p50: float
    itl_ms_p99: float
    arrivals: float
    late: int
    arrival_seconds: float | None
    link_gbps: float
    cpu_seconds_per_second: float


def rows_of(rounds: Sequence[Round]) -> list[InterferenceRow]:
    """Rows by kind and variant, in their order of appearance.

    Losses pair each round with the quiet one of the same variant and repetition; a repetition that lacks either counts
    for nothing.
    """
    by_case = {(one.variant, one.kind, one.repeat): one for one in rounds}
    cases = dict.fromkeys((one.kind, one.variant) for one in sorted(rounds, key=lambda one: one.kind != QUIET))
    kinds = list(dict.fromkeys(kind for kind, _ in cases))
    return [_row(variant, kind, by_case) for kind, variant in sorted(cases, key=lambda case: kinds.index(case[0]))]


def _row(variant: str, kind: str, by_case: dict[tuple[str, str, int], Round]) -> InterferenceRow:
    own = [one for one in by_case.values() if (one.variant, one.kind) == (variant, kind)]
    kept = {one.repeat: share for one in own if (share := _kept(one, by_case)) is not None}
    against = []
    for repeat, share in kept.items():
        base = by_case.get((BASE, kind, repeat))
        base_share = _kept(base, by_case) if base is not None else None
        if base_share:
            against.append(share / base_share)
    lost = [
        (1 - kept[one.repeat]) / kept[one.repeat] * one.window.tokens / one.arrivals
        for one in own
        if one.arrivals and kept.get(one.repeat)
    ]
    took = [one.arrival_seconds for one in own if one.arrival_seconds is not None]
    return InterferenceRow(
        variant=variant,
        kind=kind,
        tokens_per_second=_spread([one.tokens_per_second for one in own]),
        loss=_spread([1 - share for share in kept.values()]) if kept else None,
        of_base=_spread(against) if against else None,
        lost_per_arrival=statistics.median(lost) if lost else None,
        itl_ms_p50=statistics.median(one.window.itl_ms_p50 for one in own),
        itl_ms_p99=statistics.median(one.window.itl_ms_p99 for one in own),
        arrivals=statistics.median(one.arrivals for one in own),
        late=sum(one.late for one in own),
        arrival_seconds=statistics.median(took) if took else None,
        link_gbps=statistics.median(one.link_bytes * 8e-9 / one.window.seconds for one in own),
        cpu_seconds_per_second=statistics.median(one.cpu_seconds / one.window.seconds for one in own),
    )


def _kept(one: Round, by_case: dict[tuple[str, str, int], Round]) -> float | None:
    """Share of the quiet throughput that a round with arrivals keeps."""
    quiet = by_case.get((one.variant, QUIET, one.repeat))
    return one.tokens_per_second / quiet.tokens_per_second if quiet is not None and one.kind != QUIET else None


def _spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values))
