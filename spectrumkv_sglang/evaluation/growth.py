"""How the error grows with the length of the prefix: KL ~ length^a."""

from __future__ import annotations

from collections.abc import Mapping

from spectrumkv_sglang.evaluation.bootstrap import TextBootstrap
from spectrumkv_sglang.evaluation.result import Growth, Row


def growth_of(rows: Mapping[str, Mapping[str, Row]], seed: int) -> dict[str, Growth]:
    """The exponent of every method whose KL is above 0 at all lengths.

    Args:
        rows: by length of the prefix in tokens, then by method; the same texts at every length.
        seed: of the bootstrap over texts.

    Returns:
        By method; empty for a single length.
    """
    lengths = sorted(rows, key=int)
    if len(lengths) < 2:
        return {}
    grown = {}
    for label, longest in rows[lengths[-1]].items():
        kl = [[scores.kl for scores in rows[length][label].texts] for length in lengths]
        if any(not value > 0 for of_length in kl for value in of_length):
            continue
        estimate = TextBootstrap(len(longest.texts), seed).exponent([int(length) for length in lengths], kl)
        grown[label] = Growth(estimate.value, estimate.interval)
    return grown


def in_words(growth: Growth) -> str:
    """The exponent with its interval, and what it says."""
    if growth.interval is None:
        return f"{growth.exponent:+.2f}"
    low, high = growth.interval
    verdict = "grows" if low > 0 else "falls" if high < 0 else "flat within the interval"
    return f"{growth.exponent:+.2f} [{low:+.2f}, {high:+.2f}], {verdict}"
