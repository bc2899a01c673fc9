"""The rotary embedding of a model's keys, by layer and position, for payloads whose keys travel without it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from spectrumkv_sglang.payload.errors import PayloadError


@dataclass(frozen=True)
class KeyRotation:
    """What a model turns its keys by.

    Attributes:
        layers: cos and sin of each layer, float32 [positions, rotated dims], with the factor that some scalings
            (YaRN) put on both. Layers may share tensors.
    """

    layers: tuple[tuple[torch.Tensor, torch.Tensor], ...]

    def at(self, first_position: int, rows: int) -> RotatedRows:
        """The part for ``rows`` tokens of a prompt from ``first_position`` on."""
        return RotatedRows(self, np.arange(first_position, first_position + rows, dtype=np.int64))


@dataclass(frozen=True)
class RotatedRows:
    """Rows of a payload and where in their prompt they stand.

    Attributes:
        rotation: of the model.
        positions: int64 [rows], in the order that the rows are in.
    """

    rotation: KeyRotation
    positions: npt.NDArray[np.int64]

    def check(self, layers: int, rows: int) -> None:
        """Raise PayloadError unless there is an angle for each of ``rows`` rows in each of ``layers`` layers."""
        found = len(self.rotation.layers)
        if found != layers:
            raise PayloadError(f"key rotation: expected angles of {layers} layers, got {found}")
        if self.positions.size != rows:
            raise PayloadError(f"key rotation: expected positions of {rows} rows, got {self.positions.size}")
        known = min((len(cos) for cos, _ in self.rotation.layers), default=0)
        if rows and not 0 <= self.positions.min() <= self.positions.max() < known:
            raise PayloadError(
                f"key rotation: expected positions 0 to {known - 1}, "
                f"got {self.positions.min()} to {self.positions.max()}"
            )

    def reordered(self, order: npt.NDArray[np.int64]) -> RotatedRows:
        """The rows in another order."""
        return RotatedRows(self.rotation, self.positions[order])

    def of(self, layer: int, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [end - first, rotated dims] of some rows in one layer."""
        cos, sin = self.rotation.layers[layer]
        index = torch.from_numpy(self.positions[first:end]).to(cos.device)
        return cos[index], sin[index]
