"""A Gaussian process over the points of a space: optuna's, which its GPSampler uses, about what `loss_model` expects.

The only module that knows optuna's insides (`optuna._gp`): the package's version is pinned to 5.0, and a test holds the
predictions against data.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spectrumkv_sglang.search.loss_model import LossModel
from spectrumkv_sglang.search.space import Point

_LEAST_DEVIATION = 0.05
"""Decades: what was judged is never taken to be as exact as a few points that happen to fit."""
_FITTED_EVERY = 8
"""The kernel's parameters are fitted anew after so many points, and after each of the first ones: a fit takes a second
of 200 points."""


class Surrogate:
    """Mean and deviation of the logarithm of a loss at every point, given it at some.

    What is predicted depends on the points that are known and their order alone.

    Args:
        points: of the space.
    """

    def __init__(self, points: Sequence[Point]) -> None:
        names = [("key_bits", False), ("value_bits", False), ("edges", False), ("upgrade", False)]
        names += [(axis, True) for axis in ("key_scales", "value_scales", "key_transform", "value_transform")]
        columns, categorical = [], []
        for axis, is_category in names:
            choices = sorted({getattr(point, axis) for point in points})
            if len(choices) == 1:
                continue
            column = np.array([getattr(point, axis) if not is_category else 0 for point in points], dtype=float)
            if is_category:
                column = np.array([choices.index(getattr(point, axis)) for point in points], dtype=float)
            else:
                column = (column - column.min()) / (column.max() - column.min())
            columns.append(column)
            categorical.append(is_category)
        self._inputs = np.column_stack(columns) if columns else np.zeros((len(points), 1))
        self._categorical = np.array(categorical or [False])
        self._expected = LossModel(points)
        self._fitted: tuple[tuple[int, ...], tuple[float, ...], Any] | None = None

    def predict(self, known: Sequence[int], values: Sequence[float]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Mean and standard deviation at every point, float64 [points], given ``values`` at the places ``known``."""
        import torch

        expected, uncertainty = self._expected.fit(known, values)
        residuals = np.asarray(values, dtype=float) - expected[list(known)]
        scale = _scale(residuals)
        process = self._process(list(known), list(values), residuals / scale)
        with torch.no_grad():
            mean, variance = process.posterior(torch.from_numpy(self._inputs))
        return expected + mean.numpy() * scale, np.sqrt(variance.numpy() * scale**2 + uncertainty)

    def _process(self, known: list[int], values: list[float], residuals: NDArray[np.float64]) -> Any:
        """The process given ``residuals``, with the kernel that was fitted to the points up to some number."""
        import torch

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # says that its modules may change
            from optuna._gp import gp

        first = len(known) if len(known) < 4 * _FITTED_EVERY else len(known) - len(known) % _FITTED_EVERY
        kernel = self._kernel(known[:first], values[:first])
        if first == len(known):
            return kernel
        process = gp.GPRegressor(
            is_categorical=torch.from_numpy(self._categorical),
            X_train=torch.from_numpy(self._inputs[known]),
            y_train=torch.from_numpy(residuals),
            inverse_squared_lengthscales=kernel.inverse_squared_lengthscales,
            kernel_scale=kernel.kernel_scale,
            noise_var=kernel.noise_var,
        )
        process._cache_matrix()
        return process

    def _kernel(self, known: list[int], values: list[float]) -> Any:
        """The process fitted to these points; the last one is kept."""
        key = tuple(known), tuple(values)
        if self._fitted is not None and self._fitted[:2] == key:
            return self._fitted[2]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from optuna._gp import gp, prior

        expected, _ = self._expected.fit(known, values)
        residuals = np.asarray(values, dtype=float) - expected[known]
        process = gp.fit_kernel_params(
            X=self._inputs[known],
            Y=residuals / _scale(residuals),
            is_categorical=self._categorical,
            log_prior=prior.default_log_prior,
            minimum_noise=prior.DEFAULT_MINIMUM_NOISE_VAR,
            deterministic_objective=False,
        )
        self._fitted = (*key, process)
        return process


def _scale(residuals: NDArray[np.float64]) -> float:
    return max(float(np.sqrt((residuals**2).mean())), _LEAST_DEVIATION)
