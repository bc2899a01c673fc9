"""Angles of a made-up model, the same in both processes of the transfer tests."""

from __future__ import annotations

import torch

from spectrumkv_sglang.payload.geometry import KVGeometry
from spectrumkv_sglang.payload.key_rotation import KeyRotation

POSITIONS = 1024


def key_angles(geometry: KVGeometry) -> KeyRotation:
    """Every layer turns by frequencies of its own; odd ones turn a quarter of their dims only, all put a factor on."""

    def layer(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        rotated = geometry.head_dim // 4 if number % 2 else geometry.head_dim
        frequencies = (100.0 * (number + 1)) ** -(torch.arange(0, rotated, 2) / rotated)
        angles = torch.outer(torch.arange(POSITIONS).float(), frequencies).repeat(1, 2)
        return angles.cos() * 1.25, angles.sin() * 1.25

    return KeyRotation(tuple(layer(number) for number in range(geometry.layers)))
