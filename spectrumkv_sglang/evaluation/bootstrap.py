"""Scores over several texts with confidence intervals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_Values = NDArray[np.float64]
_OfMean = Callable[[Any], Any]

RESAMPLES = 2000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A value over all texts and the interval that it lies in; no interval for one text."""

    value: float
    interval: tuple[float, float] | None


class TextBootstrap:
    """Percentile bootstrap over texts: the same resamples for every method, so that methods stay comparable.

    Args:
        texts: how many there are; each counts the same.
        seed: of the resamples.
    """

    def __init__(self, texts: int, seed: int) -> None:
        generator = np.random.default_rng([seed, texts])
        self._drawn = generator.integers(0, texts, size=(RESAMPLES, texts)) if texts > 1 else None

    def mean(self, values: Sequence[float]) -> Estimate:
        """Mean of one value a text."""
        return self._estimate(np.asarray(values, np.float64), lambda mean: mean)

    def perplexity(self, nll: Sequence[float]) -> Estimate:
        """Perplexity of mean negative log-likelihoods, one a text, in nats."""
        return self._estimate(np.asarray(nll, np.float64), _exp)

    def change_pct(self, nll: Sequence[float], native_nll: Sequence[float]) -> Estimate:
        """Change in perplexity against native, %, each text beside itself."""
        difference = np.asarray(nll, np.float64) - np.asarray(native_nll, np.float64)
        return self._estimate(difference, lambda mean: 100 * (_exp(mean) - 1))

    def exponent(self, lengths: Sequence[int], values: Sequence[Sequence[float]]) -> Estimate:
        """The a of the least-squares line log(mean value) = a log(length) + c.

        Args:
            lengths: at least two different ones.
            values: above 0, [lengths][texts]; a text keeps its place at every length, so that a resample draws whole
                texts.
        """
        x = np.log(np.asarray(lengths, np.float64))
        x -= x.mean()
        weights = x / (x @ x)
        found = np.asarray(values, np.float64)
        value = float(weights @ np.log(found.mean(axis=1)))
        if self._drawn is None:
            return Estimate(value, None)
        return Estimate(value, _percentiles(weights @ np.log(found[:, self._drawn].mean(axis=2))))

    def ratio(self, values: Sequence[float], others: Sequence[float]) -> Estimate:
        """Mean of ``values`` / mean of ``others``, one value above 0 a text, each text beside itself."""
        ours, theirs = np.asarray(values, np.float64), np.asarray(others, np.float64)
        value = float(ours.mean() / theirs.mean())
        if self._drawn is None:
            return Estimate(value, None)
        return Estimate(value, _percentiles(ours[self._drawn].mean(axis=1) / theirs[self._drawn].mean(axis=1)))

    def _estimate(self, values: _Values, of_mean: _OfMean) -> Estimate:
        value = float(of_mean(values.mean()))
        if self._drawn is None:
            return Estimate(value, None)
        return Estimate(value, _percentiles(of_mean(values[self._drawn].mean(axis=1))))


def _percentiles(resampled: _Values) -> tuple[float, float]:
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(resampled, [tail, 100 - tail])
    return float(low), float(high)


def _exp(mean: _Values) -> _Values:
    with np.errstate(over="ignore"):
        return np.exp(mean)
