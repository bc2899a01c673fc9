"""The error of this package."""

from __future__ import annotations

from spectrumkv_sglang.errors import SpectrumKVError


class TuneError(SpectrumKVError):
    """A search that cannot be made or gone on with; says what to do."""
