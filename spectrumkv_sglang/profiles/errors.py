"""Errors of precision profiles."""

from __future__ import annotations

from spectrumkv_sglang.errors import SpectrumKVError


class ProfileError(SpectrumKVError):
    """A profile is unknown, malformed, or does not fit the model it is used with."""
