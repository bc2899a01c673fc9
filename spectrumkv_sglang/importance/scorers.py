"""Where token importance comes from: which queries to observe, or a rule that needs no attention.

One small class each. Adding one is a class and a line in ``_SCORERS``; the configuration field ``scorer`` names it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


class AttentionScorer(ABC):
    """Importance is the attention that chosen queries of each prefill chunk pay (``observed_attention``)."""

    name: str
    needs_attention = True

    @abstractmethod
    def sample_queries(self, chunk_tokens: int) -> NDArray[np.int64]:
        """Chosen queries as strictly increasing indices int64 into the chunk's ``chunk_tokens`` new tokens."""


class RuleScorer(ABC):
    """Importance is a rule on the position: no attention is observed. Controls and baselines."""

    name: str
    needs_attention = False

    @abstractmethod
    def scores(self, first_position: int, rows: int, room: int) -> NDArray[np.float32]:
        """Importance float32 ``[rows]`` of the tokens at ``first_position``, ... of the prompt of ``room``."""


Scorer = AttentionScorer | RuleScorer


@dataclass(frozen=True)
class WindowScorer(AttentionScorer):
    """The last ``window`` queries of the chunk and ``stride_samples`` more, evenly spread over the rest.

    The window follows SnapKV (arXiv 2404.14469); the strided sample keeps tokens visible that only the middle of a
    long chunk reads (ZipCache's probe tokens, arXiv 2405.14256).
    """

    window: int = 32
    stride_samples: int = 32
    name = "window"

    def __post_init__(self) -> None:
        if self.window < 0 or self.stride_samples < 0 or self.window + self.stride_samples == 0:
            raise ValueError(
                f"window ({self.window}) and stride samples ({self.stride_samples}) must not be negative, nor both 0"
            )

    def sample_queries(self, chunk_tokens: int) -> NDArray[np.int64]:
        before_window = max(0, chunk_tokens - self.window)
        if before_window <= self.stride_samples:
            return np.arange(chunk_tokens, dtype=np.int64)
        middle_of_stride = (np.arange(self.stride_samples) * 2 + 1) * before_window // max(1, 2 * self.stride_samples)
        return np.concatenate([middle_of_stride, np.arange(before_window, chunk_tokens)]).astype(np.int64)


@dataclass(frozen=True)
class ExactScorer(AttentionScorer):
    """Every query: exact normalised column sums of the attention matrix. The slow reference for the others."""

    name = "exact"

    def sample_queries(self, chunk_tokens: int) -> NDArray[np.int64]:
        return np.arange(chunk_tokens, dtype=np.int64)


@dataclass(frozen=True)
class RandomScorer(RuleScorer):
    """Uniform random importance, the same for the same seed, room and position of the chunk."""

    seed: int = 0
    name = "random"

    def scores(self, first_position: int, rows: int, room: int) -> NDArray[np.float32]:
        generator = np.random.default_rng([self.seed, room, first_position])
        return generator.random(rows, dtype=np.float32)


@dataclass(frozen=True)
class PositionScorer(RuleScorer):
    """The later, the more important: a recency rule (SpectrumKV's own runs score by position, not by attention)."""

    name = "position"

    def scores(self, first_position: int, rows: int, room: int) -> NDArray[np.float32]:
        return np.arange(first_position + 1, first_position + rows + 1, dtype=np.float32)


@dataclass(frozen=True)
class UniformScorer(RuleScorer):
    """All tokens alike: the budget then upgrades in prompt order."""

    name = "uniform"

    def scores(self, first_position: int, rows: int, room: int) -> NDArray[np.float32]:
        return np.ones(rows, dtype=np.float32)


_SCORERS: dict[str, type[WindowScorer | ExactScorer | RandomScorer | PositionScorer | UniformScorer]] = {
    scorer.name: scorer for scorer in (WindowScorer, ExactScorer, RandomScorer, PositionScorer, UniformScorer)
}


def scorer_names() -> tuple[str, ...]:
    """Names that ``make_scorer`` knows."""
    return tuple(_SCORERS)


def make_scorer(name: str, *, window: int = 32, stride_samples: int = 32, seed: int = 0) -> Scorer:
    """The scorer called ``name``; ``window`` and ``stride_samples`` (queries a chunk) are for "window", ``seed`` for
    "random". ``ValueError`` naming the choices if there is none."""
    if name not in _SCORERS:
        raise ValueError(f"unknown scorer {name!r}: choose from {', '.join(_SCORERS)}")
    if name == WindowScorer.name:
        return WindowScorer(window, stride_samples)
    if name == RandomScorer.name:
        return RandomScorer(seed)
    return _SCORERS[name]()
