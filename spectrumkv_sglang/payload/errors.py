"""Errors of the payload format."""

from __future__ import annotations

from spectrumkv_sglang.errors import SpectrumKVError


class PayloadError(SpectrumKVError):
    """A payload, its description, or the memory for it is not what the format needs."""
