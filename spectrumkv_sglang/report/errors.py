"""Errors of the report."""

from __future__ import annotations

from spectrumkv_sglang.errors import SpectrumKVError


class ReportError(SpectrumKVError):
    """An input that cannot be shown, or a page that cannot be written; says what was expected and what came."""
