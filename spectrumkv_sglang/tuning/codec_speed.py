"""How fast each candidate's KV is packed and unpacked, from our own transfers."""

from __future__ import annotations

import math
from statistics import median

from spectrumkv_sglang.tuning.frontier import NATIVE, Candidate

SPEED_WEIGHT = 0.3
FULL_WEIGHT_BYTES = 1024 * 1024
"""Smaller transfers count for less: what they take is mostly the launch of kernels."""
FIRST_FADING = 0.9
"""Factor, a decision, of a first transfer's seconds: ten times too slow is forgotten after 22 decisions."""
MOST_SLOWER = 4.0
"""A sample counts as at most so many times slower than what is known: one stall is no speed."""
LEAST_SECONDS_PER_BYTE, MOST_SECONDS_PER_BYTE = 1e-15, 1.0
"""No codec is faster than a petabyte a second, and none that is slower than a byte a second is used."""


class CodecSpeeds:
    """Seconds a native byte, 1 / S, of each candidate. Not thread-safe.

    The first transfer of a candidate to a peer may compile kernels and touch memory for the first time. If it was far
    slower than the other candidates', or there are none to compare it with, it is believed less with every decision
    until a second one confirms it, so that the candidate is tried again.
    """

    def __init__(self) -> None:
        self._seconds_per_byte: dict[str, float] = {}
        self._first: dict[str, tuple[float, float]] = {}  # not confirmed: as measured, and what is left of it

    def add(self, candidate: Candidate, native_bytes: float, seconds: float, *, first: bool = False) -> bool:
        """Take in that packing and unpacking ``native_bytes`` took ``seconds``; False: refused as absurd.

        ``first``: it was the candidate's first transfer to its peer.
        """
        if not (math.isfinite(native_bytes) and math.isfinite(seconds) and native_bytes > 0 and seconds > 0):
            return False
        sample, before = seconds / native_bytes, self._seconds_per_byte.get(candidate.name)
        if not LEAST_SECONDS_PER_BYTE <= sample <= MOST_SECONDS_PER_BYTE:
            return False
        if first and before is None:
            self._first[candidate.name] = (sample, sample)
            return True
        if before is None:
            self._seconds_per_byte[candidate.name] = sample
            self._first.pop(candidate.name, None)
            return True
        if not first or sample < before:
            # Of logarithms, so that one slow transfer among fast ones does not count for all of them.
            weight = SPEED_WEIGHT * min(1.0, native_bytes / FULL_WEIGHT_BYTES)
            self._seconds_per_byte[candidate.name] = before * (min(sample, before * MOST_SLOWER) / before) ** weight
        return True

    def fade(self) -> bool:
        """A decision is at hand; returns whether `of` changes by it."""
        doubted = [name for name, (sample, _) in self._first.items() if self._is_doubted(name, sample)]
        for name in doubted:
            sample, left = self._first[name]
            self._first[name] = (sample, left * FIRST_FADING)
        return bool(doubted)

    def _is_doubted(self, name: str, sample: float) -> bool:
        others = [
            *self._seconds_per_byte.values(),
            *(first for other, (first, _) in self._first.items() if other != name),
        ]
        return not others or sample > MOST_SLOWER * median(others)

    def of(self, candidate: Candidate) -> float:
        """1 / S in seconds a byte: measured, else what the candidate states, else the median of what was measured."""
        if candidate is NATIVE:
            return 0.0
        measured = self._seconds_per_byte.get(candidate.name)
        if measured is not None:
            return measured
        if candidate.name in self._first:
            return self._first[candidate.name][1]
        if candidate.speed is not None:
            return 1.0 / candidate.speed
        known = [*self._seconds_per_byte.values(), *(sample for sample, _ in self._first.values())]
        return median(known) if known else 0.0
