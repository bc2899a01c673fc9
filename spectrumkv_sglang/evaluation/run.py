"""The evaluation itself: every text, every length, every method."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from spectrumkv_sglang.evaluation.bootstrap import TextBootstrap
from spectrumkv_sglang.evaluation.methods import observed_scorers
from spectrumkv_sglang.evaluation.model import EvalModel
from spectrumkv_sglang.evaluation.prefix import Method, MovedKV, Prefilled
from spectrumkv_sglang.evaluation.result import Generation, Intervals, NeedleCounts, Row, TextScores
from spectrumkv_sglang.evaluation.windows import TextWindow
from spectrumkv_sglang.loopback.judging import ContinuationJudge
from spectrumkv_sglang.loopback.plan import NATIVE, JudgedRecord
from spectrumkv_sglang.probe.needles import DEFAULT_ANSWER_TOKENS, NeedleTrial


@dataclass
class _Measured:
    """What one method gave, a text after the other."""

    judged: list[JudgedRecord] = field(default_factory=list)
    wire_bytes: list[int] = field(default_factory=list)
    native_bytes: list[int] = field(default_factory=list)
    tokens_by_tier: list[tuple[int, int, int]] = field(default_factory=list)
    generated: list[list[int]] = field(default_factory=list)

    def add_transfer(self, moved: MovedKV, native_bytes: int) -> None:
        self.wire_bytes.append(moved.wire_bytes)
        self.native_bytes.append(native_bytes)
        if moved.tokens_by_tier is not None:
            self.tokens_by_tier.append(moved.tokens_by_tier)


def run_texts(
    model: EvalModel,
    methods: Mapping[str, Method],
    windows: Sequence[TextWindow],
    prefix_tokens: int,
    *,
    generate: int,
    seed: int,
    advance: Callable[[], None],
) -> dict[str, Row]:
    """Rows of every method at one prefix length; ``methods`` begins with native.

    Args:
        generate: tokens of greedy generation, 0 for none.
        seed: of the intervals.
        advance: called after each prefill and after each method.
    """
    measured = {label: _Measured() for label in methods}
    judge, scorers = ContinuationJudge(), observed_scorers(methods)
    for window in windows:
        prefilled = model.prefill(window.name, window.prefix(prefix_tokens), scorers)
        advance()
        for label, method in methods.items():
            moved = method.move(prefilled.prefix)
            found = measured[label]
            found.add_transfer(moved, prefilled.prefix.native_bytes)
            found.judged.append(_judge(model, judge, moved, window, reference=label == NATIVE))
            if generate:
                found.generated.append(model.generate(moved, prefilled.next_token, generate))
            advance()
    bootstrap = TextBootstrap(len(windows), seed)
    native = measured[NATIVE]
    return {label: _row(methods[label], found, native, windows, bootstrap) for label, found in measured.items()}


def run_needles(
    model: EvalModel, methods: Mapping[str, Method], trials: Sequence[NeedleTrial], advance: Callable[[], None]
) -> dict[str, NeedleCounts]:
    """Numbers found by every method; ``advance`` is called as in `run_texts`."""
    passed, scorers = dict.fromkeys(methods, 0), observed_scorers(methods)
    for number, trial in enumerate(trials):
        prefilled = model.prefill(f"needle-{number}", trial.token_ids, scorers)
        advance()
        for label, method in methods.items():
            passed[label] += _finds(model, method, prefilled, trial)
            advance()
    return {label: NeedleCounts(count, len(trials)) for label, count in passed.items()}


def _finds(model: EvalModel, method: Method, prefilled: Prefilled, trial: NeedleTrial) -> bool:
    moved = method.move(prefilled.prefix)
    first = prefilled.next_token
    return trial.passed(model.decode([first, *model.generate(moved, first, DEFAULT_ANSWER_TOKENS - 1)]))


def _judge(
    model: EvalModel, judge: ContinuationJudge, moved: MovedKV, window: TextWindow, *, reference: bool
) -> JudgedRecord:
    continuation = [window.first, *window.continuation]
    judge.begin()
    judge.collect(model.logits_after(moved, continuation[:-1]))
    return judge.finish(continuation, reference=reference)


def _row(
    method: Method, found: _Measured, native: _Measured, windows: Sequence[TextWindow], bootstrap: TextBootstrap
) -> Row:
    nll = [record.nll for record in found.judged]
    native_nll = [record.nll for record in native.judged]
    ppl, change = bootstrap.perplexity(nll), bootstrap.change_pct(nll, native_nll)
    kl = bootstrap.mean([record.kl for record in found.judged])
    top1 = bootstrap.mean([record.top1 for record in found.judged])
    intervals = None
    if ppl.interval and change.interval and kl.interval and top1.interval:
        intervals = Intervals(ppl.interval, change.interval, kl.interval, top1.interval)
    wire_ratio = sum(found.wire_bytes) / sum(found.native_bytes)
    high, mid, low = (
        (sum(tier) for tier in zip(*found.tokens_by_tier, strict=True)) if found.tokens_by_tier else (0,) * 3
    )
    return Row(
        wire_ratio=wire_ratio,
        ppl=ppl.value,
        dppl_pct=change.value,
        kl=kl.value,
        top1=top1.value,
        intervals=intervals,
        budget=method.budget,
        budget_reached=method.budget is None or wire_ratio <= method.budget,
        tokens_by_tier=(high, mid, low) if found.tokens_by_tier else None,
        texts=[
            TextScores(
                text=window.name,
                nll=record.nll,
                ppl=_exp(record.nll),
                dppl_pct=100 * (_exp(record.nll - reference.nll) - 1),
                kl=record.kl,
                top1=record.top1,
                wire_ratio=wire / whole,
            )
            for window, record, reference, wire, whole in zip(
                windows, found.judged, native.judged, found.wire_bytes, found.native_bytes, strict=True
            )
        ],
        generation=_generation(found.generated, native.generated) if found.generated else None,
    )


def _generation(ours: Sequence[Sequence[int]], native: Sequence[Sequence[int]]) -> Generation:
    equal = [[a == b for a, b in zip(mine, theirs, strict=True)] for mine, theirs in zip(ours, native, strict=True)]
    before = [flags.index(False) if False in flags else len(flags) for flags in equal]
    tokens = len(equal[0])
    return Generation(tokens, sum(before) / len(before), sum(map(sum, equal)) / (tokens * len(equal)))


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
