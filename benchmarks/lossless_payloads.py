"""Payloads to compress: a pool through profiles, and native KV with its bytes in other orders."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from spectrumkv_sglang.kernels.precision import Precision
from spectrumkv_sglang.payload.codec import pack_payload
from spectrumkv_sglang.payload.key_rotation import KeyRotation
from spectrumkv_sglang.payload.kv_buffers import KVBuffers
from spectrumkv_sglang.payload.layout import plan_layout
from spectrumkv_sglang.profiles.profile import load_profile
from spectrumkv_sglang.transfer.pool_view import PoolView

HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Payload:
    """Bytes that would travel.

    Attributes:
        name: of the row.
        data: the bytes.
        element: what most of them are: "half" for bfloat16 or float16, "e4m3", else "byte".
    """

    name: str
    data: bytes
    element: str = "byte"


def on_cpu(view: PoolView) -> PoolView:
    """A copy of a pool in the host's memory."""
    buffers = KVBuffers(k=[k.cpu() for k in view.buffers.k], v=[v.cpu() for v in view.buffers.v])
    rotation = view.rotation
    if isinstance(rotation, KeyRotation):
        rotation = KeyRotation(tuple((cos.cpu(), sin.cpu()) for cos, sin in rotation.layers))
    return dataclasses.replace(view, buffers=buffers, device=torch.device("cpu"), rotation=rotation)


def profile_payload(view: PoolView, name: str) -> Payload:
    """The body of the payload of every row of a pool in the lowest tier of a profile."""
    profile, rows = load_profile(name), view.pool_slots
    tier = max(profile.tiers_defined)
    counts = np.bincount([tier], minlength=3) * rows
    table = profile.table(view.geometry)
    layout = plan_layout(view.geometry, table, counts.tolist())
    out = torch.zeros(layout.total_bytes, dtype=torch.uint8)
    tiers = np.full(rows, tier, dtype=np.uint8)
    pack_payload(view.buffers, torch.arange(rows), tiers, layout, out, rotated=view.rotated(table, 0, rows))
    precisions = {profile.tiers[tier].keys, profile.tiers[tier].values}
    element = "byte"
    if precisions == {Precision.NATIVE} and view.buffers.k[0].dtype in HALVES:
        element = "half"
    elif precisions == {Precision.FP8_E4M3}:
        element = "e4m3"
    return Payload(name, out[layout.prologue_bytes :].numpy().tobytes(), element)


def native_planes(view: PoolView) -> Iterator[Payload]:
    """Native KV of two bytes an element, cut into its upper and its lower bytes.

    *by channel*: the rows of one channel follow one another in place of the channels of a row. *exponents*: the upper
    bytes after the sign has gone to the lowest bit, so that a bfloat16's eight bits of exponent are one byte.
    """
    if view.buffers.k[0].dtype not in HALVES:
        return
    layers = [tensor.view(torch.int16) for pair in zip(view.buffers.k, view.buffers.v, strict=True) for tensor in pair]
    rows = np.concatenate([layer.numpy().view(np.uint16).ravel() for layer in layers])
    channels = np.concatenate([layer.permute(1, 2, 0).numpy().view(np.uint16).ravel() for layer in layers])
    high, low = _upper(rows), _lower(rows)
    yield Payload("native, byte planes", high + low)
    yield Payload("native, upper bytes", high)
    yield Payload("native, lower bytes", low)
    yield Payload("native, upper bytes by channel", _upper(channels))
    yield Payload("native, exponents", _upper(_sign_last(rows)))
    yield Payload("native, exponents by channel", _upper(_sign_last(channels)))


def _sign_last(words: np.ndarray) -> np.ndarray:
    return (words << np.uint16(1)) | (words >> np.uint16(15))


def _upper(words: np.ndarray) -> bytes:
    return (words >> np.uint16(8)).astype(np.uint8).tobytes()


def _lower(words: np.ndarray) -> bytes:
    return (words & np.uint16(0xFF)).astype(np.uint8).tobytes()
