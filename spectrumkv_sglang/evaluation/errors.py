"""What can end an evaluation before it has a result."""

from __future__ import annotations

from spectrumkv_sglang.errors import SpectrumKVError


class EvaluationError(SpectrumKVError):
    """The evaluation cannot go on; says what was expected, what came and what to do."""
