"""Errors of the sizing."""

from __future__ import annotations

from spectrumkv_sglang.errors import SpectrumKVError


class SizingError(SpectrumKVError):
    """A model, a file of speeds or a setting that nothing can be computed from; names it and what was expected."""
