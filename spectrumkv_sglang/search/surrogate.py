"""A Gaussian process over the points of a space: optuna's, which its GPSampler uses.

The only module that knows optuna's insides (`optuna._gp`): the package's version is pinned to 5.0, and a test holds the
predictions against data.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from spectrumkv_sglang.search.space import Point

_LEAST_DEVIATION = 1e-9


class Surrogate:
    """Mean and deviation of a quantity at every point, given it at some.

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

    def predict(self, known: Sequence[int], values: Sequence[float]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Mean and standard deviation at every point, float64 [points], given ``values`` at the places ``known``."""
        import torch

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # says that its modules may change
            from optuna._gp import gp, prior

        target = np.asarray(values, dtype=float)
        mean, deviation = float(target.mean()), max(float(target.std()), _LEAST_DEVIATION)
        process = gp.fit_kernel_params(
            X=self._inputs[list(known)],
            Y=(target - mean) / deviation,
            is_categorical=self._categorical,
            log_prior=prior.default_log_prior,
            minimum_noise=prior.DEFAULT_MINIMUM_NOISE_VAR,
            deterministic_objective=False,
        )
        with torch.no_grad():
            expected, variance = process.posterior(torch.from_numpy(self._inputs))
        return expected.numpy() * deviation + mean, np.sqrt(variance.numpy()) * deviation
