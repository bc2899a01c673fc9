"""Rounding to few levels and back, with the scales that would travel beside the codes."""

from __future__ import annotations

import torch

from spectrumkv_sglang.payload.geometry import KVGeometry

PARAM_BYTES = 2
"""Scales and zeros are float16."""


def affine_groups(x: torch.Tensor, bits: int, axis: int, group: int) -> torch.Tensor:
    """Asymmetric rounding of groups of ``group`` neighbours along ``axis``: scale and zero (the group's least value)
    in float16, codes 0 .. 2^bits - 1.

    Args:
        x: float32; a last group may be shorter.
        bits: of a code.
        axis: that groups lie along.
        group: elements of a group.

    Returns:
        float32 like ``x``, what dequantising gives. Its error is at most half a scale, plus what float16 rounds off
        scale and zero.
    """
    pieces = []
    for piece in x.split(group, dim=axis):
        low, high = piece.amin(axis, keepdim=True), piece.amax(axis, keepdim=True)
        zero = _float16(low)
        scale = _float16((high - zero) / (2**bits - 1))
        codes = torch.where(scale > 0, (piece - zero) / scale, 0.0).round().clamp(0, 2**bits - 1)
        pieces.append(codes * scale + zero)
    return torch.cat(pieces, dim=axis)


def symmetric(x: torch.Tensor, bits: int, axes: tuple[int, ...]) -> torch.Tensor:
    """Symmetric rounding with one float16 scale over ``axes``: the largest magnitude / (2^(bits-1) - 1)."""
    levels = 2 ** (bits - 1) - 1
    scale = _float16(x.abs().amax(axes, keepdim=True) / levels)
    return torch.where(scale > 0, x / scale, 0.0).round().clamp(-levels, levels) * scale


def code_bytes(elements: int, bits: int) -> int:
    """Bytes of ``elements`` codes, packed without gaps."""
    return -(-elements * bits // 8)


def codes_of_tokens(geometry: KVGeometry, tokens: int, bits: int) -> int:
    """Bytes of the codes of one layer's keys and values of ``tokens`` tokens."""
    rows = tokens * geometry.kv_heads
    return code_bytes(rows * geometry.head_dim, bits) + code_bytes(rows * geometry.v_head_dim, bits)


def groups_of(extent: int, group: int) -> int:
    """Groups along an axis of ``extent``."""
    return -(-extent // group)


def _float16(x: torch.Tensor) -> torch.Tensor:
    """Rounded to float16 and held at its largest, so that no scale is infinite."""
    return x.clamp(-65504, 65504).half().float()
