"""The evaluation on texts: every text, every method, at one length of the prefix."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from spectrumkv_sglang.evaluation.bootstrap import TextBootstrap
from spectrumkv_sglang.evaluation.judging import NativeReference
from spectrumkv_sglang.evaluation.methods import observations
from spectrumkv_sglang.evaluation.model import EvalModel
from spectrumkv_sglang.evaluation.prefix import Method, MovedKV
from spectrumkv_sglang.evaluation.progress import Advance
from spectrumkv_sglang.evaluation.result import Generation, Intervals, Row, TextScores
from spectrumkv_sglang.evaluation.windows import TextWindow
from spectrumkv_sglang.evaluation.work import generated_work, judged_work
from spectrumkv_sglang.loopback.plan import NATIVE, JudgedRecord


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
    advance: Advance,
) -> dict[str, Row]:
    """Rows of every method at one prefix length; ``methods`` begins with native.

    Args:
        generate: tokens of greedy generation, 0 for none.
        seed: of the intervals.
        advance: told of `texts_work`.
    """
    measured = {label: _Measured() for label in methods}
    observed = observations(methods)
    for window in windows:
        prefilled = model.prefill(window.name, window.prefix(prefix_tokens), observed)
        advance(prefix_tokens)
        reference: NativeReference | None = None
        for label, method in methods.items():
            moved = method.move(prefilled.prefix)
            found = measured[label]
            found.add_transfer(moved, prefilled.prefix.native_bytes)
            logits = model.logits_after(moved, [window.first, *window.continuation[:-1]])
            if reference is None:
                reference = NativeReference(logits, window.continuation)
            found.judged.append(reference.judge(logits))
            if generate:
                found.generated.append(model.generate(moved, prefilled.next_token, generate))
            advance(_method_work(len(window.continuation), generate))
    bootstrap = TextBootstrap(len(windows), seed)
    native = measured[NATIVE]
    return {label: _row(methods[label], found, native, windows, bootstrap) for label, found in measured.items()}


def texts_work(windows: Sequence[TextWindow], methods: int, prefix_tokens: int, generate: int) -> float:
    """What `run_texts` takes, in tokens of prefill."""
    return sum(prefix_tokens + methods * _method_work(len(window.continuation), generate) for window in windows)


def _method_work(continuation_tokens: int, generate: int) -> float:
    return judged_work(continuation_tokens) + generated_work(generate)


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
