"""Scorers that the evaluation compares: those of ``importance.scorers``, and ways to observe that do not serve."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from spectrumkv_sglang.importance.scorers import AttentionScorer, ExactScorer, WindowScorer, make_scorer, scorer_names

SAMPLED_QUERIES = 64
"""Queries that every sampling scorer looks at, so that they differ in which ones alone."""


@dataclass(frozen=True)
class Observation:
    """How a prefill's attention becomes importance.

    Attributes:
        queries: whose attention is read.
        normalised: divide by the number of read queries that could attend to a token. False: the raw column sum, which
            favours early tokens.
        value_weighted: attention times the Euclidean norm of the token's value in the same layer and KV head, relative
            to that head's mean norm (VATP, arXiv 2406.12335, there with the 1-norm): attention to a value near zero
            changes nothing.
    """

    queries: AttentionScorer
    normalised: bool = True
    value_weighted: bool = False


_ONLY_HERE: Mapping[str, Observation] = MappingProxyType(
    {
        "last-64": Observation(WindowScorer(SAMPLED_QUERIES, 0)),
        "strided": Observation(WindowScorer(0, SAMPLED_QUERIES)),
        "value-norm": Observation(WindowScorer(), value_weighted=True),
        "exact-value-norm": Observation(ExactScorer(), value_weighted=True),
        "exact-raw": Observation(ExactScorer(), normalised=False),
    }
)
SERVED_OBSERVING = WindowScorer.name
"""The scorer that the configuration of a method names when its scores come from one that does not serve."""


def evaluated_scorers() -> tuple[str, ...]:
    """Names of all scorers that a row may have: the served ones first."""
    return (*scorer_names(), *_ONLY_HERE)


def observation(name: str) -> Observation | None:
    """What the scorer ``name`` observes; None for a rule, which observes nothing."""
    if name in _ONLY_HERE:
        return _ONLY_HERE[name]
    scorer = make_scorer(name)
    return Observation(scorer) if isinstance(scorer, AttentionScorer) else None


def served_name(name: str) -> str:
    """The scorer that a server's configuration may name for ``name``: itself, or one that reads observed scores too."""
    return SERVED_OBSERVING if name in _ONLY_HERE else name
