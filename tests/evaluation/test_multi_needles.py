"""Several needles in one text: where they are, what is asked, and which answers count."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from spectrumkv_sglang.evaluation.model import EvalModel, read_model_files
from spectrumkv_sglang.evaluation.multi_needles import NEEDLES, MultiNeedleTrial, NeedleQuestion, make_multi_trial
from spectrumkv_sglang.evaluation.needle_runs import multi_needles_work, run_multi_needles
from spectrumkv_sglang.evaluation.prefix import NativeMethod
from spectrumkv_sglang.launch.model import fetch_model
from spectrumkv_sglang.probe.haystack import load_haystack
from spectrumkv_sglang.probe.needles import NeedleError

TOKENIZER = read_model_files(fetch_model(Path(__file__).parents[2] / "build" / "models")).tokenizer


def make(length: int = 1024, seed: int = 0) -> MultiNeedleTrial:
    return make_multi_trial(TOKENIZER, load_haystack(), length=length, seed=seed)


def test_prefix_question_and_answer_fit_the_length() -> None:
    for length in (600, 1024):
        trial = make(length)
        longest = max(len(question.question_ids) + len(question.answer_ids) for question in trial.questions)
        assert 0.85 * length < len(trial.token_ids) + longest <= length


def test_needles_are_spread_over_the_text() -> None:
    trial = make()
    assert len(trial.questions) == NEEDLES
    places = [trial.text.index(question.needle) / len(trial.text) for question in trial.questions]
    assert places == sorted(places)
    assert places[0] < 0.25
    assert places[-1] > 0.85
    assert all(0.05 < b - a < 0.25 for a, b in pairwise(places))


def test_numbers_and_archives_occur_once() -> None:
    trial = make()
    assert len({question.answer for question in trial.questions}) == NEEDLES
    for question in trial.questions:
        assert trial.text.count(question.answer) == 1
        archive = re.fullmatch(r"The access code of the (\w+) archive is \d{5}\.", question.needle)
        assert archive is not None
        assert len(re.findall(rf"\b{archive[1]}\b", trial.text.lower())) == 1
        assert TOKENIZER.decode(question.question_ids).endswith(f"The access code of the {archive[1]} archive is")
        assert TOKENIZER.decode(question.answer_ids).strip() == question.answer


def test_the_seed_decides_the_trial() -> None:
    assert make(seed=1) == make(seed=1)
    assert make(seed=1) != make(seed=2)


def test_a_length_without_room_is_refused() -> None:
    with pytest.raises(NeedleError, match=r"no room for 8 needles.*at least \d+; give longer --prefix-tokens"):
        make(400)


def test_an_answer_counts_when_greedy_generation_gives_it(small_model: Callable[..., EvalModel]) -> None:
    model = small_model("llama")
    prompt, asked = tuple(range(2, 32)), (40, 41)
    prefilled = model.prefill("multi-needle-0", prompt, {})
    moved = NativeMethod().move(prefilled.prefix)
    first = int(model.logits_after(moved, asked)[-1].argmax())
    second = int(model.logits_after(moved, [*asked, first])[-1].argmax())
    right = NeedleQuestion("", "", asked, (first, second))
    wrong_end = NeedleQuestion("", "", asked, (first, (second + 1) % 97))
    wrong_start = NeedleQuestion("", "", asked, ((first + 1) % 97, second))
    trial = MultiNeedleTrial(prompt, "", (wrong_start, right, wrong_end, right))
    work: list[float] = []
    counts = run_multi_needles(model, {"native": NativeMethod()}, [trial], work.append)
    assert (counts["native"].passed, counts["native"].trials) == (2, 4)
    assert sum(work) == multi_needles_work([trial], 1)


def test_only_the_most_likely_tokens_pass() -> None:
    question = NeedleQuestion("", "", (5,), (1, 2))
    assert question.fed_ids == (5, 1)
    assert question.passed(torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]))
    assert not question.passed(torch.tensor([[0.0, 1.0, 0.0], [0.0, 2.0, 1.0]]))
