"""Rate and distortion of every method on one model and text, and which of them lie on the frontier.

A method is beaten where another one takes at most its bytes and loses less. Bytes within half a percent count as the
same: budgets are reached to about that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from spectrumkv_sglang.evaluation.bootstrap import Estimate, TextBootstrap
from spectrumkv_sglang.evaluation.errors import EvaluationError
from spectrumkv_sglang.evaluation.result import EvaluationResult, Row

SAME_BYTES = 1.005


@dataclass(frozen=True)
class Point:
    """One method. ``ours``: a profile with its own scorer; not a baseline, and no control with tiers from another
    scorer."""

    label: str
    ours: bool
    row: Row

    @property
    def kl_by_text(self) -> list[float]:
        """KL of each text, in the order of the run."""
        return [scores.kl for scores in self.row.texts]

    def beats(self, other: Point) -> bool:
        """Whether it loses less at the same bytes or fewer."""
        return self.row.wire_ratio <= SAME_BYTES * other.row.wire_ratio and self.row.kl < other.row.kl


@dataclass(frozen=True)
class Beaten:
    """A method that beats another: KL of the other over its own, with the interval over texts."""

    by: Point
    times: Estimate

    @property
    def certain(self) -> bool:
        """Whether texts agree: the interval of the ratio lies above 1."""
        return self.times.interval is not None and self.times.interval[0] > 1


@dataclass(frozen=True)
class Panel:
    """One model and text at one length of the prefix."""

    model: str
    text: str
    prefix_tokens: int
    texts: int
    seed: int
    points: tuple[Point, ...]

    @property
    def title(self) -> str:
        """For people."""
        return f"{self.model}, {self.text}, {self.texts} windows, {self.prefix_tokens:,} tokens"

    def frontier(self) -> list[Point]:
        """Points that none beats, by their bytes."""
        points = [point for point in self.points if not any(other.beats(point) for other in self.points)]
        return sorted(points, key=lambda point: point.row.wire_ratio)

    def our_line(self) -> list[Point]:
        """Our points that none of ours beats, by their bytes."""
        ours = [point for point in self.points if point.ours]
        return sorted(
            (point for point in ours if not any(other.beats(point) for other in ours)),
            key=lambda point: point.row.wire_ratio,
        )

    def beaten(self, point: Point) -> list[Beaten]:
        """Everything that beats ``point``, the most certain and then the largest ratio first."""
        bootstrap = TextBootstrap(self.texts, self.seed)
        found = [
            Beaten(other, bootstrap.ratio(point.kl_by_text, other.kl_by_text))
            for other in self.points
            if other.beats(point)
        ]
        return sorted(found, key=lambda one: (not one.certain, -one.times.value))


def panels_of(results: Sequence[EvaluationResult], prefix_tokens: int | None) -> list[Panel]:
    """One panel for each model, text, length and drawing of windows; files that agree in these are put together, and of
    a method that is in several of them the last one's row is taken. Methods that lose nothing have no point.

    Args:
        prefix_tokens: length to show; None: the longest of each file.

    Raises:
        EvaluationError: a file without that length.
    """
    points: dict[tuple[str, str, int, int, int, int], dict[str, Point]] = {}
    for result in results:
        length = max(result.prefix_tokens) if prefix_tokens is None else prefix_tokens
        if str(length) not in result.by_prefix_tokens:
            raise EvaluationError(
                f"{Path(result.model).name} was evaluated at prefixes of {result.prefix_tokens} tokens, not of {length}"
            )
        drawn = (result.texts, result.seed, result.continuation_tokens)
        key = (Path(result.model).name, Path(result.text).stem, length, *drawn)
        of_panel = points.setdefault(key, {})
        for label, row in result.by_prefix_tokens[str(length)].items():
            if row.kl > 0:
                ours = result.kinds[label] == "profile" and ":" not in label.rpartition("/")[2]
                of_panel[label] = Point(label, ours, row)
    return [
        Panel(model, text, length, texts, seed, tuple(found.values()))
        for (model, text, length, texts, seed, _), found in points.items()
    ]
