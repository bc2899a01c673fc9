"""What can end a calibration."""

from __future__ import annotations

from spectrumkv_sglang.errors import SpectrumKVError


class CalibrationError(SpectrumKVError):
    """The calibration cannot go on; says what was expected, what came and what to do."""
