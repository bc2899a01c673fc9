"""The search: propose a point, judge it text by text, stop where the rest cannot matter, until nothing is gained."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from spectrumkv_sglang.search.known_costs import KnownCosts
from spectrumkv_sglang.search.pareto import Box, Objectives, frontier
from spectrumkv_sglang.search.proposal import Proposer
from spectrumkv_sglang.search.pruning import Pruning, least_mean
from spectrumkv_sglang.search.trials import Trial, Trials

MOST_KL = 1.0
"""Nats a token; what loses more answers something else."""
GAIN_THAT_COUNTS = 0.001
"""An evaluation that adds less than this share of what is dominated counts as none."""

KLOfText = Callable[[int, int], float]
"""KL divergence of the point at a place on a text, nats a token, at least 0."""


@dataclass(frozen=True)
class Limits:
    """When a search ends.

    Attributes:
        evaluations: most points that are judged.
        patience: so many points in a row without a gain that counts end it.
    """

    evaluations: int
    patience: int


class Search:
    """One search over a space. What was judged is in ``trials``, which may hold some already.

    Args:
        costs: what is known of every point.
        texts: number of texts.
        kl: judges a point on a text.
        trials: where results are kept.
        pruning: what need not be judged.
        limits: when it ends.
        seed: of the starting points.
    """

    def __init__(
        self,
        costs: KnownCosts,
        texts: int,
        kl: KLOfText,
        trials: Trials,
        pruning: Pruning,
        limits: Limits,
        seed: int,
    ) -> None:
        self._costs, self._texts, self._kl = costs, texts, kl
        self.trials, self._pruning, self._limits = trials, pruning, limits
        self._proposer = Proposer(costs, pruning.least_kl, MOST_KL, seed)
        self._gains = _Gains()
        self.stopped_by = ""
        """Why it ended, for people."""
        self.ruled_out = 0
        """Points that no text was spent on, since bytes and speed alone rule them out."""

    def run(self) -> Iterator[Trial]:
        """Judge point after point; yields each when it is done."""
        while True:
            done = self.trials.finished
            measured = self.measured()
            excluded = self._pruning.cannot_reach(self._proposer.costs, [one for _, one in measured])
            excluded[[trial.place for trial in done]] = False
            self.ruled_out = int(excluded.sum())
            if len(done) >= self._limits.evaluations:
                self.stopped_by = f"{len(done)} points were judged (--evaluations)"
                return
            if self._without_gain() >= self._limits.patience:
                self.stopped_by = f"{self._limits.patience} points in a row gained nothing (--patience)"
                return
            judged = {trial.place: self._log_kl(trial) for trial in done}
            coordinates = [one.coordinates(self._pruning.least_kl) for _, one in measured]
            proposal = self._proposer.next(judged, coordinates, excluded)
            if proposal is None:
                self.stopped_by = "no point is left"
                return
            yield self._judge(proposal.place)

    def measured(self) -> list[tuple[int, Objectives]]:
        """(place, objectives) of the points that were judged to the end, those of too large a loss left out."""
        limit = math.inf if self._pruning.max_kl is None else self._pruning.max_kl
        return [
            (trial.place, self._costs.objectives(trial.place, least_mean(trial.kl, self._texts)))
            for trial in self.trials.finished
            if not trial.pruned and least_mean(trial.kl, self._texts) <= limit
        ]

    def frontier(self) -> list[tuple[int, Objectives]]:
        """The measured points that none dominates, fewest bytes first."""
        measured = self.measured()
        kept = frontier([one.coordinates(self._pruning.least_kl) for _, one in measured])
        return sorted((measured[place] for place in kept), key=lambda item: item[1].wire_ratio)

    def hypervolume(self) -> float:
        """Share of the box of this space that is dominated."""
        return self._proposer.box.hypervolume([one.coordinates(self._pruning.least_kl) for _, one in self.measured()])

    @property
    def box(self) -> Box:
        """Best and worst that this space can be."""
        return self._proposer.box

    def coordinates(self, objectives: Objectives) -> tuple[float, float, float]:
        """What points are compared by."""
        return objectives.coordinates(self._pruning.least_kl)

    def _judge(self, place: int) -> Trial:
        measured = [one for _, one in self.measured()]
        self.trials.begin(place)
        judged: list[float] = []
        reason = ""
        for text in range(self._texts):
            judged.append(self._kl(place, text))
            least = self._costs.objectives(place, least_mean(judged, self._texts))
            reason = self._pruning.surely_worse(least, measured)
            if reason and text + 1 < self._texts:
                break
        pruned = len(judged) < self._texts
        return self.trials.finish(judged, reason if pruned else "")

    def _log_kl(self, trial: Trial) -> float:
        """What the Gaussian process learns: of a point that was not judged to the end, the mean of what was."""
        mean = sum(trial.kl) / len(trial.kl)
        return math.log10(min(max(mean, self._pruning.least_kl), MOST_KL))

    def _without_gain(self) -> int:
        """Number of the last points in a row that gained nothing that counts."""
        done, gains = self.trials.finished, self._gains
        by_place = dict(self.measured())
        for trial in done[gains.seen :]:
            gains.seen += 1
            found = by_place.get(trial.place)
            if found is None:
                continue
            gains.coordinates.append(self.coordinates(found))
            volume = self.box.hypervolume(gains.coordinates)
            if volume > gains.best * (1 + GAIN_THAT_COUNTS):
                gains.best, gains.last = volume, gains.seen
        return len(done) - gains.last


@dataclass
class _Gains:
    """Of the trials so far: how many were looked at, what the measured ones come to, which gained something last."""

    seen: int = 0
    coordinates: list[tuple[float, float, float]] = field(default_factory=list)
    best: float = 0.0
    last: int = 0
