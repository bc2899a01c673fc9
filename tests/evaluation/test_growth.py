"""Growth of the error with the prefix, from rows."""

from __future__ import annotations

import pytest

from spectrumkv_sglang.evaluation.growth import growth_of, in_words
from spectrumkv_sglang.evaluation.result import Growth, Row, TextScores


def row(*kl: float) -> Row:
    texts = [TextScores(f"text-{i}", 1.0, 2.7, 0.0, value, 1.0, 0.5) for i, value in enumerate(kl)]
    return Row(0.5, 2.7, 0.0, sum(kl) / len(kl), 1.0, None, None, True, None, texts)


def test_each_method_has_its_exponent() -> None:
    rows = {
        "2000": {"native": row(0.0, 0.0), "grows": row(0.04, 0.4), "flat": row(0.02, 0.1)},
        "500": {"native": row(0.0, 0.0), "grows": row(0.01, 0.1), "flat": row(0.02, 0.1)},
    }
    grown = growth_of(rows, seed=0)
    assert list(grown) == ["grows", "flat"]
    assert grown["grows"].exponent == pytest.approx(1.0)
    assert grown["grows"].interval == pytest.approx((1.0, 1.0))
    assert grown["flat"].exponent == pytest.approx(0.0)


def test_one_length_has_no_growth() -> None:
    assert growth_of({"500": {"int8": row(0.01, 0.02)}}, seed=0) == {}


@pytest.mark.parametrize(
    ("interval", "words"),
    [
        ((0.1, 0.5), "+0.30 [+0.10, +0.50], grows"),
        ((-0.1, 0.5), "+0.30 [-0.10, +0.50], flat within the interval"),
        ((-0.5, -0.1), "+0.30 [-0.50, -0.10], falls"),
        (None, "+0.30"),
    ],
)
def test_in_words(interval: tuple[float, float] | None, words: str) -> None:
    assert in_words(Growth(0.3, interval)) == words
