"""Hidden numbers, found or not after each method has moved the prompt's KV."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from spectrumkv_sglang.evaluation.methods import observations
from spectrumkv_sglang.evaluation.model import EvalModel
from spectrumkv_sglang.evaluation.multi_needles import MultiNeedleTrial
from spectrumkv_sglang.evaluation.prefix import Method, Prefilled
from spectrumkv_sglang.evaluation.progress import Advance
from spectrumkv_sglang.evaluation.result import NeedleCounts
from spectrumkv_sglang.evaluation.work import generated_work, judged_work
from spectrumkv_sglang.probe.needles import DEFAULT_ANSWER_TOKENS, NeedleTrial


def run_needles(
    model: EvalModel, methods: Mapping[str, Method], trials: Sequence[NeedleTrial], advance: Advance
) -> dict[str, NeedleCounts]:
    """Numbers found by every method, one a prompt, generated; ``advance`` is told of `needles_work`."""
    passed, observed = dict.fromkeys(methods, 0), observations(methods)
    for number, trial in enumerate(trials):
        prefilled = model.prefill(f"needle-{number}", trial.token_ids, observed)
        advance(len(trial.token_ids))
        for label, method in methods.items():
            passed[label] += _finds(model, method, prefilled, trial)
            advance(generated_work(DEFAULT_ANSWER_TOKENS))
    return {label: NeedleCounts(count, len(trials)) for label, count in passed.items()}


def run_multi_needles(
    model: EvalModel, methods: Mapping[str, Method], trials: Sequence[MultiNeedleTrial], advance: Advance
) -> dict[str, NeedleCounts]:
    """Numbers found by every method, several a prompt, teacher-forced; ``advance`` is told of `multi_needles_work`."""
    passed, observed = dict.fromkeys(methods, 0), observations(methods)
    for number, trial in enumerate(trials):
        prefilled = model.prefill(f"multi-needle-{number}", trial.token_ids, observed)
        advance(len(trial.token_ids))
        for label, method in methods.items():
            fed = [question.fed_ids for question in trial.questions]
            answers = model.logits_after_each(method.move(prefilled.prefix), fed)
            passed[label] += sum(
                question.passed(logits) for question, logits in zip(trial.questions, answers, strict=True)
            )
            advance(_questions_work(trial))
    asked = sum(len(trial.questions) for trial in trials)
    return {label: NeedleCounts(count, asked) for label, count in passed.items()}


def needles_work(trials: Sequence[NeedleTrial], methods: int) -> float:
    """What `run_needles` takes, in tokens of prefill."""
    return sum(len(trial.token_ids) + methods * generated_work(DEFAULT_ANSWER_TOKENS) for trial in trials)


def multi_needles_work(trials: Sequence[MultiNeedleTrial], methods: int) -> float:
    """What `run_multi_needles` takes, in tokens of prefill."""
    return sum(len(trial.token_ids) + methods * _questions_work(trial) for trial in trials)


def _questions_work(trial: MultiNeedleTrial) -> float:
    return sum(judged_work(len(question.fed_ids)) for question in trial.questions)


def _finds(model: EvalModel, method: Method, prefilled: Prefilled, trial: NeedleTrial) -> bool:
    def said(token_ids: list[int]) -> bool:
        """Whether the number has been said and something else after it, which no further token takes back."""
        text = model.decode(token_ids)
        return not text.rstrip().endswith(trial.answer) and trial.passed(text)

    first = prefilled.next_token
    generated = model.generate(method.move(prefilled.prefix), first, DEFAULT_ANSWER_TOKENS - 1, said)
    return trial.passed(model.decode([first, *generated]))
