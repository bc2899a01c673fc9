"""Pieces of real text: prefixes of several lengths that lead up to one continuation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from spectrumkv_sglang.evaluation.errors import EvaluationError

DEFAULT_TEXTS = 4


@dataclass(frozen=True)
class TextWindow:
    """One piece of text.

    Attributes:
        name: of the piece.
        special: tokens that the tokenizer puts in front of a text.
        lead: tokens up to the continuation.
        first: the token after the prefix: what prefill would have sampled, and the first that decode computes.
        continuation: the tokens to be predicted after it.
    """

    name: str
    special: tuple[int, ...]
    lead: tuple[int, ...]
    first: int
    continuation: tuple[int, ...]

    def prefix(self, tokens: int) -> list[int]:
        """The last ``tokens`` tokens before the continuation, the special ones in front counted. The continuation is
        the same for all lengths, so that they can be compared."""
        return [*self.special, *self.lead[len(self.lead) - (tokens - len(self.special)) :]]


def cut_windows(
    tokenizer: Any,
    text: str,
    *,
    prefix_tokens: Sequence[int],
    continuation_tokens: int,
    texts: int | None,
    seed: int,
    context_tokens: int | None,
) -> list[TextWindow]:
    """Windows of ``text`` that do not overlap, each for the longest prefix, drawn by ``seed``.

    Args:
        texts: how many; None: up to 4, as many as there are.
        context_tokens: the model's limit, None for none.

    Raises:
        EvaluationError: lengths that make no sense or exceed the context, or fewer windows than ``texts``.
    """
    special = tuple(tokenizer.encode("", add_special_tokens=True))
    longest, shortest = max(prefix_tokens), min(prefix_tokens)
    if shortest < len(special) + 1:
        raise EvaluationError(f"--prefix-tokens {shortest}: expected at least {len(special) + 1}")
    whole = longest + 1 + continuation_tokens
    if context_tokens is not None and whole > context_tokens:
        raise EvaluationError(
            f"--prefix-tokens {longest} and --continuation-tokens {continuation_tokens} make {whole} tokens with the "
            f"one between them, but the model's context has {context_tokens}: give shorter ones"
        )
    ids = tokenizer.encode(text, add_special_tokens=False)
    step = whole - len(special)
    there = len(ids) // step
    if there < (texts or 1):
        raise EvaluationError(
            f"the text has {len(ids):,} tokens, {texts or 1} windows of {step:,} need {(texts or 1) * step:,}: give a "
            "longer --text, fewer --texts, or shorter --prefix-tokens"
        )
    drawn = np.random.default_rng(seed).permutation(there)[: min(there, texts or DEFAULT_TEXTS)]
    return [
        _window(ids[start * step : (start + 1) * step], special, start, continuation_tokens)
        for start in sorted(drawn.tolist())
    ]


def _window(ids: list[int], special: tuple[int, ...], number: int, continuation_tokens: int) -> TextWindow:
    split = len(ids) - continuation_tokens
    return TextWindow(f"text-{number}", special, tuple(ids[: split - 1]), ids[split - 1], tuple(ids[split:]))
