"""The evaluation's result as a file for machines."""

from __future__ import annotations

import msgspec

RESULT_FORMAT = 1

Interval = tuple[float, float]


class TextScores(msgspec.Struct, frozen=True):
    """One text: mean negative log-likelihood and KL divergence from native in nats a token, share of equal most likely
    tokens, wire / native bytes."""

    text: str
    nll: float
    ppl: float
    dppl_pct: float
    kl: float
    top1: float
    wire_ratio: float


class Intervals(msgspec.Struct, frozen=True):
    """95 % bootstrap intervals over texts."""

    ppl: Interval
    dppl_pct: Interval
    kl: Interval
    top1: Interval


class Generation(msgspec.Struct, frozen=True):
    """Greedy generation beside native's: tokens a text, how many of them were equal before the first difference (mean),
    share of positions with equal tokens."""

    tokens: int
    equal_before_difference: float
    agreement: float


class NeedleCounts(msgspec.Struct, frozen=True):
    """Hidden numbers that were found, of all."""

    passed: int
    trials: int


class Row(msgspec.Struct, frozen=True):
    """One method at one prefix length, over all texts.

    ``budget`` is what it had to keep to, None if its bytes follow from what it does; ``budget_reached`` is False when
    the least that it can send is more. ``intervals`` is None for a single text.
    """

    wire_ratio: float
    ppl: float
    dppl_pct: float
    kl: float
    top1: float
    intervals: Intervals | None
    budget: float | None
    budget_reached: bool
    tokens_by_tier: tuple[int, int, int] | None
    texts: list[TextScores]
    generation: Generation | None = None
    needles: NeedleCounts | None = None


class EvaluationResult(msgspec.Struct, frozen=True):
    """Everything that was measured. ``results`` are the rows of the longest prefix by method, ``native`` among them;
    ``by_prefix_tokens`` those of every length."""

    format: int
    model: str
    text: str
    prefix_tokens: list[int]
    continuation_tokens: int
    texts: int
    seed: int
    scorer: str
    device: str
    dtype: str
    kv_dtype: str
    native_bytes_per_token: int
    methods: dict[str, str]
    results: dict[str, Row]
    by_prefix_tokens: dict[str, dict[str, Row]]
    seconds: float
    date: str
    versions: dict[str, str]


def encode_result(result: EvaluationResult) -> bytes:
    """The result as indented JSON; a score that is no number, nan or inf, is null."""
    return msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n"
