"""The evaluation's result as a file for machines."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from spectrumkv_sglang.evaluation.errors import EvaluationError

RESULT_FORMAT = 2

Interval = tuple[float, float]
Kind = Literal["native", "profile", "baseline"]


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
    the least that it can send is more. ``intervals`` is None for a single text. ``needles`` were hidden one in a
    prompt, ``multi_needles`` several in one (``evaluation.multi_needles``).
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
    multi_needles: NeedleCounts | None = None


class Growth(msgspec.Struct, frozen=True):
    """KL ~ length^exponent over the lengths of a run, and its 95 % bootstrap interval over texts (None: one text)."""

    exponent: float
    interval: Interval | None


class EvaluationResult(msgspec.Struct, frozen=True):
    """Everything that was measured. ``results`` are the rows of the longest prefix by method, ``native`` among them;
    ``by_prefix_tokens`` those of every length; ``growth`` what they come to by method, empty for one length. ``kinds``
    says of each method whether a profile or a baseline was asked for."""

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
    kinds: dict[str, Kind]
    results: dict[str, Row]
    by_prefix_tokens: dict[str, dict[str, Row]]
    growth: dict[str, Growth]
    seconds: float
    date: str
    versions: dict[str, str]


def encode_result(result: EvaluationResult) -> bytes:
    """The result as indented JSON; a score that is no number, nan or inf, is null."""
    return msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n"


def read_result(path: Path) -> EvaluationResult:
    """Read what `encode_result` wrote.

    Raises:
        EvaluationError: no such file, another format, or scores that are no numbers.
    """
    try:
        content = path.read_bytes()
        found = msgspec.json.decode(content)
        if isinstance(found, dict) and found.get("format") != RESULT_FORMAT:
            raise EvaluationError(
                f"{path} has format {found.get('format')!r}, expected {RESULT_FORMAT}: evaluate again with this version"
            )
        return msgspec.json.decode(content, type=EvaluationResult)
    except OSError as error:
        raise EvaluationError(f"{path}: {error.strerror or error}; give a file of spectrumkv eval --json") from error
    except msgspec.MsgspecError as error:
        raise EvaluationError(f"{path} is no result of spectrumkv eval --json: {error}") from error
