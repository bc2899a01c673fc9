"""The loop over texts, methods and needles."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from spectrumkv_sglang.evaluation.methods import make_methods
from spectrumkv_sglang.evaluation.model import EvalModel
from spectrumkv_sglang.evaluation.needle_runs import needles_work, run_needles
from spectrumkv_sglang.evaluation.prefix import Method, NativeMethod
from spectrumkv_sglang.evaluation.result import Row
from spectrumkv_sglang.evaluation.run import run_texts, texts_work
from spectrumkv_sglang.evaluation.windows import TextWindow
from spectrumkv_sglang.probe.needles import NeedleTrial


def _tokens(seed: int, count: int) -> tuple[int, ...]:
    return tuple(torch.randint(2, 97, (count,), generator=torch.Generator().manual_seed(seed)).tolist())


def _window(number: int) -> TextWindow:
    return TextWindow(f"text-{number}", (1,), _tokens(number, 39), 7, _tokens(number + 100, 9))


WINDOWS = [_window(number) for number in range(3)]


@pytest.fixture
def methods(tmp_path: Path) -> dict[str, Method]:
    folder = tmp_path / "profiles"
    folder.mkdir()
    return make_methods(["int8"], ["int4", "pdtrim@0.6"], budget=None, scorer="window", seed=0, folder=folder)


def _run(model: EvalModel, methods: dict[str, Method], work: list[float]) -> dict[str, Row]:
    return run_texts(model, methods, WINDOWS, 24, generate=3, seed=0, advance=work.append)


def test_rows_over_texts(small_model: Callable[..., EvalModel], methods: dict[str, Method]) -> None:
    work: list[float] = []
    rows = _run(small_model("llama"), methods, work)
    assert list(rows) == ["native", "int8", "int4", "pdtrim@0.6"]
    assert len(work) == len(WINDOWS) * (1 + len(rows))
    assert sum(work) == texts_work(WINDOWS, len(rows), 24, 3)
    for row in rows.values():
        assert [scores.text for scores in row.texts] == ["text-0", "text-1", "text-2"]
        assert row.ppl == pytest.approx(math.exp(sum(scores.nll for scores in row.texts) / 3))
        assert row.kl == pytest.approx(sum(scores.kl for scores in row.texts) / 3)
        assert row.intervals is not None
        assert row.intervals.kl[0] <= row.kl <= row.intervals.kl[1]
    assert rows["native"].kl == rows["native"].dppl_pct == 0.0
    assert rows["int8"].kl < rows["int4"].kl < rows["pdtrim@0.6"].kl


def test_perplexity_is_that_of_the_continuation_in_the_whole_text(small_model: Callable[..., EvalModel]) -> None:
    """The first scored token is predicted by what follows the prefix, so every prediction reads the moved KV."""
    model = small_model("llama")
    row = run_texts(model, {"native": NativeMethod()}, WINDOWS[:1], 24, generate=0, seed=0, advance=[].append)
    window = WINDOWS[0]
    ids = [*window.prefix(24), window.first, *window.continuation]
    with torch.inference_mode():
        logprobs = model._model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
    nll = [-float(logprobs[24 + i, token]) for i, token in enumerate(window.continuation)]
    assert row["native"].ppl == pytest.approx(math.exp(sum(nll) / len(nll)), rel=1e-4)


def test_the_same_seed_gives_the_same_rows(small_model: Callable[..., EvalModel], methods: dict[str, Method]) -> None:
    model = small_model("llama")
    assert _run(model, methods, []) == _run(model, methods, [])


def test_needles_count_the_answers_that_hold_the_number(small_model: Callable[..., EvalModel]) -> None:
    model = small_model("llama")
    prompt = _tokens(5, 30)
    prefilled = model.prefill("needle-0", prompt, {})
    answer = [prefilled.next_token, *model.generate(NativeMethod().move(prefilled.prefix), prefilled.next_token, 15)]
    found = NeedleTrial(
        token_ids=prompt,
        prompt="",
        needle="",
        answer=str(answer[3]),
        depth=0.5,
        needle_token=0,
        length=46,
        seed=0,
    )
    trials = [found, replace(found, answer="12345")]
    work: list[float] = []
    counts = run_needles(model, {"native": NativeMethod()}, trials, work.append)
    assert (counts["native"].passed, counts["native"].trials) == (1, 2)
    assert len(work) == 4
    assert sum(work) == needles_work(trials, 1)
