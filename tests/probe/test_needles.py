"""Needle trials: they fit, the needle is where it was asked for, and only the right number is an answer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from spectrumkv_sglang.probe.haystack import load_haystack
from spectrumkv_sglang.probe.needles import NeedleError, NeedleTrial, least_length, make_trials

HAYSTACK = load_haystack()
DEPTHS = (0.1, 0.5, 0.9)


@pytest.fixture(params=["chat_tokenizer", "base_tokenizer"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("length", [1500, 4000])
def test_prompt_and_answer_fill_the_length_and_no_more(tokenizer: Any, length: int) -> None:
    for trial in make_trials(tokenizer, HAYSTACK, lengths=[length], depths=DEPTHS, trials=6, answer_tokens=16):
        assert length - 500 < len(trial.token_ids) <= length - 16
        assert trial.length == length


@pytest.mark.parametrize("depth", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_the_needle_stands_where_it_was_asked_for(tokenizer: Any, depth: float) -> None:
    longest = max(len(sentence) for essay in HAYSTACK.essays for sentence in essay)
    (trial,) = make_trials(tokenizer, HAYSTACK, lengths=[4000], depths=[depth], trials=1, seed=9)
    before = tokenizer.decode(trial.token_ids[: trial.needle_token])
    after = tokenizer.decode(trial.token_ids[trial.needle_token :])
    assert after.lstrip().startswith(trial.needle)
    assert before.rstrip()[-1] in ".?!"
    if 0.0 < depth < 1.0:  # at the ends stand the instruction and the question
        assert abs(trial.needle_token - depth * 4000) <= longest
    else:
        text = HAYSTACK.filler(tokenizer, 4000, trial.seed)
        assert (text[0] in before) == (depth == 1.0)
        assert (text[0] in after) == (depth == 0.0)


def test_the_number_and_its_archive_stand_in_the_needle_only(tokenizer: Any) -> None:
    for trial in make_trials(tokenizer, HAYSTACK, lengths=[3000], trials=9):
        assert trial.prompt.count(trial.answer) == 1
        assert trial.needle in trial.prompt
        archive = trial.needle.split(" archive ")[0].split()[-1]
        assert trial.prompt.count(archive) == 3  # needle, question, beginning of the answer
        assert len(set(trial.answer)) == 5
        assert trial.answer[0] != "0"


def test_a_chat_model_is_asked_in_its_template_and_led_into_the_answer(chat_tokenizer: Any) -> None:
    (trial,) = make_trials(chat_tokenizer, HAYSTACK, lengths=[1500], trials=1)
    subject = trial.needle.rpartition(" ")[0]
    assert trial.prompt.startswith("<|im_start|>system\n")
    assert trial.prompt.endswith(f"?<|im_end|>\n<|im_start|>assistant\n{subject}")
    assert trial.token_ids == tuple(chat_tokenizer.encode(trial.prompt, add_special_tokens=False))


def test_a_base_model_is_left_in_the_middle_of_the_sentence(base_tokenizer: Any) -> None:
    (trial,) = make_trials(base_tokenizer, HAYSTACK, lengths=[1500], trials=1)
    assert trial.prompt.endswith(f"?\n{trial.needle.rpartition(' ')[0]}")
    assert trial.token_ids[0] == base_tokenizer.bos_token_id
    assert base_tokenizer.decode(trial.token_ids[1:]) == trial.prompt


@pytest.mark.parametrize(
    ("trials", "depths"),
    [(1, [0.5]), (2, [0.1, 0.9]), (3, [0.1, 0.5, 0.9]), (5, [0.1, 0.5, 0.9, 0.1, 0.5])],
)
def test_trials_are_spread_over_the_depths(base_tokenizer: Any, trials: int, depths: list[float]) -> None:
    made = make_trials(base_tokenizer, HAYSTACK, lengths=[1500, 2500], depths=DEPTHS, trials=trials)
    assert [(trial.length, trial.depth) for trial in made] == [(n, depth) for n in (1500, 2500) for depth in depths]
    assert len({trial.answer for trial in made}) == len(made)
    assert len({trial.seed for trial in made}) == len(made)


def test_a_seed_gives_the_same_trials_again_and_another_seed_others(base_tokenizer: Any) -> None:
    def made(seed: int) -> list[NeedleTrial]:
        return make_trials(base_tokenizer, HAYSTACK, lengths=[1500], trials=2, seed=seed)

    assert made(1) == made(1)
    assert {trial.answer for trial in made(1)}.isdisjoint(trial.answer for trial in made(2))


TRIAL = NeedleTrial(
    token_ids=(1,), prompt="", needle="", answer="53980", depth=0.5, needle_token=0, length=1500, seed=0
)


@pytest.mark.parametrize("text", ["53980", " 53980.", "is **53980**", "the code (53980)\n\nThe", "1. 53980", "v53980b"])
def test_the_number_anywhere_in_the_answer_passes(text: str) -> None:
    assert TRIAL.passed(text)


@pytest.mark.parametrize("text", ["", " 5398", "539801", "153980", "5 3 9 8 0", "53,980", "53890", "unknown"])
def test_anything_but_the_whole_number_fails(text: str) -> None:
    assert not TRIAL.passed(text)


def test_a_length_without_room_is_refused_with_what_to_do(base_tokenizer: Any) -> None:
    with pytest.raises(NeedleError, match=r"a length of 300 tokens has no room .* take \d+, .* longer context"):
        make_trials(base_tokenizer, HAYSTACK, lengths=[300])


@pytest.mark.parametrize("depth", [-0.1, 1.5])
def test_a_depth_outside_the_text_is_refused(base_tokenizer: Any, depth: float) -> None:
    with pytest.raises(NeedleError, match=rf"depth {depth} .* between 0 .* and 1"):
        make_trials(base_tokenizer, HAYSTACK, lengths=[1500], depths=[0.5, depth])


@pytest.mark.parametrize("change", [{"trials": 0}, {"lengths": []}, {"depths": []}])
def test_no_trials_are_refused(base_tokenizer: Any, change: dict[str, Any]) -> None:
    with pytest.raises(NeedleError, match="at least one of each"):
        make_trials(base_tokenizer, HAYSTACK, **{"lengths": [1500], **change})


def test_numbers_and_words_of_a_given_text_are_not_used_for_needles(base_tokenizer: Any, tmp_path: Path) -> None:
    file = tmp_path / "numbers.txt"
    file.write_text(" ".join(f"The walnut and the falcon weigh {n}." for n in range(10_000, 99_999, 7)))
    haystack = load_haystack(file)
    for trial in make_trials(base_tokenizer, haystack, lengths=[4000], trials=5):
        assert trial.prompt.count(trial.answer) == 1
        assert not trial.needle.startswith(("The access code of the walnut", "The access code of the falcon"))


def test_a_template_that_drops_the_message_is_refused(base_tokenizer: Any) -> None:
    base_tokenizer.chat_template = "{{ 'Hello' }}"
    try:
        with pytest.raises(NeedleError, match="template"):
            make_trials(base_tokenizer, HAYSTACK, lengths=[1500])
    finally:
        base_tokenizer.chat_template = None


LONG_SYSTEM_PROMPT = "You are a helpful and careful assistant. " * 60
TEMPLATE = "{{{{ '<s>' }}}}{prompt}{{% for m in messages %}}[{{{{ m['content'] }}}}]{{% endfor %}}"


def test_a_template_with_a_long_prompt_of_its_own_raises_the_shortest_length(chat_tokenizer: Any) -> None:
    short = least_length(chat_tokenizer)
    tokenizer = copy.deepcopy(chat_tokenizer)
    tokenizer.chat_template = TEMPLATE.format(prompt=LONG_SYSTEM_PROMPT)
    least = least_length(tokenizer)
    assert least > short + 400
    with pytest.raises(NeedleError, match="no room"):
        make_trials(tokenizer, load_haystack(), lengths=[512], trials=1)
    for seed in range(5):
        (trial,) = make_trials(tokenizer, load_haystack(), lengths=[least], trials=1, seed=seed)
        assert len(trial.token_ids) <= least


def test_a_template_that_raises_is_an_error_of_ours(chat_tokenizer: Any) -> None:
    tokenizer = copy.deepcopy(chat_tokenizer)
    tokenizer.chat_template = "{{ raise_exception('only tools may speak') }}"
    with pytest.raises(NeedleError, match=r"refuses a user's message \(only tools may speak\)"):
        least_length(tokenizer)
