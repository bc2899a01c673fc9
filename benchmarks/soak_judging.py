"""Whether an answer is right: pure functions over tokens and log-probabilities, for `soak.py`.

A plain server is asked for each prompt alone, and again for all of them at once, which shows how much batching and
prefix hits change by rounding. An answer of the pair is

- *right*: one of the plain server's answers, token for token, and each token's log-probability within a limit of it.
  The limit finds KV that is damaged without changing the most likely token.
- *a tie*: where it first leaves a plain answer it takes that answer's second choice, whose log-probability is less than
  ``tie_gap`` below the first; what comes before is right as above. What comes after cannot be compared.
- *wrong*: anything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Verdict(str, Enum):
    """How a request ended. ``DIFFERS`` is for profiles that lose precision, where other tokens are not yet wrong."""

    RIGHT = "right"
    TIE = "tie"
    DIFFERS = "differs"
    WRONG = "wrong"
    ERROR = "error"
    ABORTED = "aborted by us"


@dataclass(frozen=True)
class Expected:
    """One answer of the plain server.

    Attributes:
        tokens: token ids, all that were asked for.
        logprobs: natural logarithm of each token's probability.
        seconds: at each position, the second most likely token.
        gaps: at each position, how much lower that one's log-probability is.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    seconds: tuple[int, ...] = ()
    gaps: tuple[float, ...] = ()


@dataclass(frozen=True)
class Limits:
    """What still counts as rounding, in log-probability (nats)."""

    tie_gap: float = 1e-3
    most_shift: float = 0.02


@dataclass(frozen=True)
class Judgement:
    """A verdict and what it rests on.

    Attributes:
        verdict: right, tie, differs or wrong.
        position: of the first other token; -1 without one.
        gap: of the plain server's first and second choice there.
        shift: largest difference of log-probabilities before it.
    """

    verdict: Verdict
    position: int = -1
    gap: float = 0.0
    shift: float = 0.0


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Position of the first token that differs, or that only one has; -1: there is none."""
    for position in range(max(len(ours), len(theirs))):
        if ours[position : position + 1] != theirs[position : position + 1]:
            return position
    return -1


def judge(
    expected: Sequence[Expected], tokens: Sequence[int], logprobs: Sequence[float], limits: Limits, *, lossy: bool
) -> Judgement:
    """Compare an answer with all of ``expected`` and take the best verdict. ``lossy``: what is wrong only differs."""
    found = [_against(one, tokens, logprobs, limits, lossy=lossy) for one in expected]
    order = (Verdict.RIGHT, Verdict.TIE, Verdict.DIFFERS, Verdict.WRONG)
    return min(found, key=lambda one: (order.index(one.verdict), -one.position))


def _against(
    expected: Expected, tokens: Sequence[int], logprobs: Sequence[float], limits: Limits, *, lossy: bool
) -> Judgement:
    position = first_difference(tuple(tokens), expected.tokens)
    compared = len(tokens) if position < 0 else position
    both = zip(expected.logprobs[:compared], logprobs[:compared], strict=False)
    shift = max((abs(theirs - ours) for theirs, ours in both), default=0.0)
    gap = expected.gaps[position] if 0 <= position < len(expected.gaps) else 0.0
    bad = Verdict.DIFFERS if lossy else Verdict.WRONG
    if lossy:
        return Judgement(Verdict.RIGHT if position < 0 else bad, position, gap, shift)
    if shift > limits.most_shift:
        return Judgement(bad, position, gap, shift)
    if position < 0:
        return Judgement(Verdict.RIGHT, position, gap, shift)
    second = expected.seconds[position] if position < len(expected.seconds) else None
    took_second = position < len(tokens) and tokens[position] == second
    tie = took_second and gap < limits.tie_gap
    return Judgement(Verdict.TIE if tie else bad, position, gap, shift)
