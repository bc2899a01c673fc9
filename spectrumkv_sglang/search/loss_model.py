"""What is known of a loss before anything was judged: keys and values add to it, each by its precision.

The KL of a point is taken as a sum of what its keys and what its values bring about, and the logarithm of each part as
linear in the point's choices. Where rounding errors are small, a KL goes with their square, and one bit more quarters
that: these are the slopes that the fit starts from and departs from as far as what was judged asks for. Coefficients
are those of largest posterior probability, their covariance is that of the linearised model (Laplace's approximation).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from spectrumkv_sglang.search.space import Point

MIDDLE_BITS = 4
_LN10 = float(np.log(10.0))
_PER_BIT = float(np.log10(4.0))
# Mean and deviation of what is expected of a coefficient, in decades of KL.
_AT_MIDDLE = (-2.0, 1.0)
_BIT = (-_PER_BIT, 0.15)
_CHOICE = (0.0, 0.3)
_EDGE = (0.0, 0.1)
_UPGRADED = (-_PER_BIT, 0.3)
"""All tokens upgraded: one step of bits more."""
ERROR = 0.1
"""Decades by which a judged KL is expected to be off what such a sum says."""

Floats = NDArray[np.float64]


class LossModel:
    """Logarithm (base 10) of the KL at every point, given it at some.

    Args:
        points: of the space.
    """

    def __init__(self, points: Sequence[Point]) -> None:
        keys = _columns(points, "key_bits", ("key_scales", "key_transform"))
        values = _columns(points, "value_bits", ("value_scales", "value_transform"))
        self._keys, self._values = (np.column_stack([column for column, _ in part]) for part in (keys, values))
        expected = np.array([prior for _, prior in [*keys, *values]])
        self._mean, self._deviation = expected[:, 0], expected[:, 1]

    def fit(self, known: Sequence[int], log_kl: Sequence[float]) -> tuple[Floats, Floats]:
        """Expected value and its variance at every point, float64 [points], given ``log_kl`` at places ``known``."""
        from scipy.optimize import least_squares

        places, target = np.asarray(known, dtype=int), np.asarray(log_kl, dtype=float)

        def residuals(coefficients: Floats) -> Floats:
            fit = (self._predict(coefficients, places) - target) / ERROR
            return np.concatenate([fit, (coefficients - self._mean) / self._deviation])

        def jacobian(coefficients: Floats) -> Floats:
            return np.vstack([self._slopes(coefficients, places) / ERROR, np.diag(1 / self._deviation)])

        found = least_squares(residuals, self._mean.copy(), jac=jacobian)
        covariance = np.linalg.inv(found.jac.T @ found.jac)
        everywhere = np.arange(len(self._keys))
        slopes = self._slopes(found.x, everywhere)
        variance = np.einsum("ij,jk,ik->i", slopes, covariance, slopes)
        return self._predict(found.x, everywhere), np.maximum(variance, 0.0)

    def _parts(self, coefficients: Floats, places: NDArray[np.int_]) -> tuple[Floats, Floats]:
        split = self._keys.shape[1]
        return self._keys[places] @ coefficients[:split], self._values[places] @ coefficients[split:]

    def _predict(self, coefficients: Floats, places: NDArray[np.int_]) -> Floats:
        keys, values = self._parts(coefficients, places)
        return np.asarray(np.logaddexp(keys * _LN10, values * _LN10) / _LN10)

    def _slopes(self, coefficients: Floats, places: NDArray[np.int_]) -> Floats:
        keys, values = self._parts(coefficients, places)
        share = 1 / (1 + 10.0 ** np.clip(values - keys, -50, 50))  # of the keys in the sum
        return np.hstack([self._keys[places] * share[:, None], self._values[places] * (1 - share)[:, None]])


def _columns(points: Sequence[Point], bits: str, choices: Sequence[str]) -> list[tuple[Floats, tuple[float, float]]]:
    """What a part's logarithm is linear in, and what is expected of each coefficient."""

    def numbers(axis: str) -> Floats:
        return np.array([getattr(point, axis) for point in points], dtype=float)

    columns = [(np.ones(len(points)), _AT_MIDDLE), (numbers(bits) - MIDDLE_BITS, _BIT)]
    for axis in choices:
        taken = sorted({getattr(point, axis) for point in points})
        columns += [
            (np.array([getattr(point, axis) == choice for point in points], dtype=float), _CHOICE)
            for choice in taken[1:]
        ]
    return [*columns, (numbers("edges"), _EDGE), (numbers("upgrade"), _UPGRADED)]
