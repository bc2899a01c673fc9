"""Base of every error that this package raises on purpose."""

from __future__ import annotations


class SpectrumKVError(Exception):
    """An expected failure whose message says what was expected, what came and what to do."""
