"""Prompts of the transfer benchmark: random token ids, the same ones for every variant."""

from __future__ import annotations

import random

FIRST_TOKEN_ID = 100
"""Below lie the special tokens of most vocabularies."""


def prompt_of(tokens: int, repeat: int, vocabulary: int) -> list[int]:
    """``tokens`` token ids from `FIRST_TOKEN_ID` up to ``vocabulary``, which depend on nothing but the arguments."""
    drawn = random.Random(tokens * 1000 + repeat)
    return [drawn.randrange(FIRST_TOKEN_ID, vocabulary) for _ in range(tokens)]
