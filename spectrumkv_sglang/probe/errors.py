"""What can end a probe before it has a result."""

from __future__ import annotations

from spectrumkv_sglang.errors import SpectrumKVError


class ProbeError(SpectrumKVError):
    """The probe cannot go on; says what was expected, what came and what to do."""
