"""Whether a precision map is worth its detail: maps of equal bytes, judged on text that calibration has not seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import msgspec

from spectrumkv_sglang.calibration.allocated_profile import make_profile, profile_yaml
from spectrumkv_sglang.calibration.allocation import Allocation, NominalChunk, allocate
from spectrumkv_sglang.calibration.candidates import Candidates
from spectrumkv_sglang.calibration.expected_cost import ExpectedCost, Granularity
from spectrumkv_sglang.calibration.sensitivity import Sensitivity
from spectrumkv_sglang.config import load_config
from spectrumkv_sglang.evaluation.bootstrap import TextBootstrap
from spectrumkv_sglang.evaluation.model import EvalModel
from spectrumkv_sglang.evaluation.prefix import Method, NativeMethod
from spectrumkv_sglang.evaluation.progress import Advance
from spectrumkv_sglang.evaluation.result import Interval, Row
from spectrumkv_sglang.evaluation.run import run_texts, texts_work
from spectrumkv_sglang.evaluation.served_path import ProfileMethod
from spectrumkv_sglang.evaluation.windows import TextWindow
from spectrumkv_sglang.loopback.plan import NATIVE

_LEAST_BUDGET = 1e-9
_LEAST_KL = 1e-12
"""Nats; a ratio needs numbers above 0."""


@dataclass(frozen=True)
class Contender:
    """A map under a budget.

    Attributes:
        allocation: the map.
        tokens: whether important tokens travel better as far as bytes are left.
    """

    allocation: Allocation
    tokens: bool


class CheckedMap(msgspec.Struct, frozen=True):
    """What a contender came to: KL that was expected of its map, and what was measured."""

    expected_kl: float
    row: Row


class Comparison(msgspec.Struct, frozen=True):
    """KL of ``ours`` / KL of ``simpler``, at equal bytes; below 1: ours is better. No interval for one text."""

    ours: str
    simpler: str
    ratio: float
    interval: Interval | None

    @property
    def helps(self) -> bool | None:
        """Whether the interval lies below 1; False if above; None where the texts do not tell."""
        if self.interval is None or self.interval[0] <= 1 <= self.interval[1]:
            return None
        return self.interval[1] < 1


class HeldOutCheck(msgspec.Struct, frozen=True):
    """Contenders by label, and the comparisons between them."""

    windows: list[str]
    maps: dict[str, CheckedMap]
    comparisons: list[Comparison]


def contenders(
    sensitivity: Sensitivity, candidates: Candidates, chunk: NominalChunk, allocation: Allocation, target: float
) -> dict[str, Contender]:
    """What is compared, by label.

    Without a choice of tokens: one precision each for keys and values, and finer maps of no more bytes. With it: both
    fill the budget by token importance, so that they spend the same bytes.
    """
    simple = allocate(ExpectedCost(sensitivity, candidates, Granularity.PARTS), candidates, chunk, target)
    finer = [Granularity.LAYERS]
    if allocation.granularity is Granularity.HEADS:
        finer.append(Granularity.HEADS)
    found = {"keys and values": Contender(simple, tokens=False)}
    for granularity in finer:
        expected = ExpectedCost(sensitivity, candidates, granularity)
        equal_bytes = allocate(expected, candidates, chunk, simple.wire_ratio)
        found[f"{granularity.value}, same bytes"] = Contender(equal_bytes, tokens=False)
    found["keys and values, tokens"] = Contender(simple, tokens=True)
    found[f"{allocation.granularity.value}, tokens"] = Contender(allocation, tokens=True)
    return found


def check_held_out(
    model: EvalModel,
    windows: Sequence[TextWindow],
    prefix_tokens: int,
    found: Mapping[str, Contender],
    chunk: NominalChunk,
    budget: float,
    seed: int,
    folder: Path,
    advance: Advance,
) -> HeldOutCheck:
    """Move the windows' prefixes by every contender, with the code that serves, and judge what follows.

    Args:
        chunk: that the maps were made for.
        budget: wire / native bytes of contenders that choose tokens; raised to what the largest of their maps takes at
            this length, where sinks weigh more than in the nominal chunk.
        seed: of the intervals.
        folder: for the contenders' files while this runs.
        advance: told of `held_out_work`.
    """
    here = replace(chunk, tokens=prefix_tokens)
    choosing = [contender.allocation for contender in found.values() if contender.tokens]
    budget = max([budget, *(here.wire_ratio(allocation.cells, allocation.transforms) for allocation in choosing)])
    methods: dict[str, Method] = {NATIVE: NativeMethod()}
    for number, (label, contender) in enumerate(found.items()):
        path = folder / f"map-{number}.yaml"
        profile = make_profile(contender.allocation, f"map-{number}", label, contender.allocation.wire_ratio)
        path.write_text(profile_yaml(profile, []), encoding="utf-8")
        methods[label] = _method(path, label, budget if contender.tokens else _LEAST_BUDGET)
    rows = run_texts(model, methods, windows, prefix_tokens, generate=0, seed=seed, advance=advance)
    maps = {label: CheckedMap(contender.allocation.expected_kl, rows[label]) for label, contender in found.items()}
    comparisons = [_compare(maps, ours, simpler, seed) for ours, simpler in _pairs(found)]
    return HeldOutCheck([window.name for window in windows], maps, comparisons)


def held_out_work(windows: Sequence[TextWindow], prefix_tokens: int, found: Mapping[str, Contender]) -> float:
    """What `check_held_out` takes, in tokens of prefill."""
    return texts_work(windows, len(found) + 1, prefix_tokens, 0)


def _method(path: Path, label: str, budget: float) -> ProfileMethod:
    config = load_config(None, {}, {"profile": ("profile", str(path)), "min_tokens": ("min_tokens", 0)})
    # Not validated again: a budget that no map reaches, where no token is to travel better than the map says.
    return ProfileMethod(config.model_copy(update={"budget": budget}), label)


def _pairs(found: Mapping[str, Contender]) -> list[tuple[str, str]]:
    """Labels of a finer map and of the next coarser one, with and without a choice of tokens."""
    return [
        (finer, coarser)
        for tokens in (False, True)
        for coarser, finer in pairwise([label for label, contender in found.items() if contender.tokens is tokens])
    ]


def _compare(maps: Mapping[str, CheckedMap], ours: str, simpler: str, seed: int) -> Comparison:
    kl = {label: [max(text.kl, _LEAST_KL) for text in maps[label].row.texts] for label in (ours, simpler)}
    estimate = TextBootstrap(len(kl[ours]), seed).ratio(kl[ours], kl[simpler])
    return Comparison(ours, simpler, estimate.value, estimate.interval)
