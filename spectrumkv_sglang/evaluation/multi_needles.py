"""Several numbers hidden in one text and asked for one by one.

One prefix, moved once, answers all questions: each question is fed behind the moved KV by itself, together with its
answer. An answer counts when every token of the number is the most likely one after those before it, which is what
greedy generation would have given. The question is new to decode here, as in a conversation's next turn; with single
needles (``probe.needles``) it is part of what travels.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from spectrumkv_sglang.probe.haystack import Haystack, Tokenizer
from spectrumkv_sglang.probe.needles import (
    NeedleError,
    archives_not_in,
    draw_archives,
    draw_number,
    needle_sentence,
    prompt_frame,
)

NEEDLES = 8
_INTRODUCTION = "The following text contains several access codes. Read it and remember the access codes."
_LEAST_FILLER_TOKENS = 256
_SPARE_TOKENS = 16  # sentences encoded together may take more tokens than one by one


@dataclass(frozen=True)
class NeedleQuestion:
    """One of the hidden numbers.

    Attributes:
        needle: the hidden sentence.
        answer: its number.
        question_ids: tokens from behind the text to the beginning of the answer.
        answer_ids: tokens of the number.
    """

    needle: str
    answer: str
    question_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]

    @property
    def fed_ids(self) -> tuple[int, ...]:
        """What is fed behind the prefix: all but the answer's last token, which is only predicted."""
        return (*self.question_ids, *self.answer_ids[:-1])

    def passed(self, logits: torch.Tensor) -> bool:
        """Whether the answer is what greedy generation gives; ``logits`` [len(fed_ids), vocabulary]."""
        predicted = logits[-len(self.answer_ids) :].argmax(-1).tolist()
        return predicted == list(self.answer_ids)


@dataclass(frozen=True)
class MultiNeedleTrial:
    """One prefix with several needles, evenly spread over it.

    Attributes:
        token_ids: of the prefix, special tokens included, up to where a question would stand.
        text: the same as text.
        questions: in the order of their needles.
    """

    token_ids: tuple[int, ...]
    text: str
    questions: tuple[NeedleQuestion, ...]


def make_multi_trial(
    tokenizer: Tokenizer, haystack: Haystack, *, length: int, seed: int, needles: int = NEEDLES
) -> MultiNeedleTrial:
    """A trial whose prefix, together with the longest question and answer, has at most ``length`` tokens.

    Raises:
        NeedleError: ``length`` has no room for the needles in some text, or the haystack no free names for them.
    """
    drawn = random.Random(seed)
    candidates = draw_archives(drawn)
    numbers = _numbers(drawn, needles, "")
    around = _around(tokenizer, candidates, numbers)
    if length - around < _LEAST_FILLER_TOKENS:
        raise NeedleError(
            f"a length of {length} tokens has no room for {needles} needles in some text: this model's chat template "
            f"needs at least {around + _LEAST_FILLER_TOKENS}; give longer --prefix-tokens"
        )
    filler = haystack.filler(tokenizer, length - around, seed)
    text = "".join(filler)
    archives = archives_not_in(text, candidates, needles)[:needles]
    hidden = dict(zip(archives, _numbers(drawn, needles, text), strict=True))
    frame = prompt_frame(tokenizer, archives[0], _INTRODUCTION)
    prefix = frame.head + _with_needles(tokenizer, filler, [needle_sentence(*pair) for pair in hidden.items()])
    questions = [_question(tokenizer, archive, number) for archive, number in hidden.items()]
    return MultiNeedleTrial(
        token_ids=tuple(tokenizer.encode(prefix, add_special_tokens=frame.add_special_tokens)),
        text=prefix,
        questions=tuple(questions),
    )


def _around(tokenizer: Tokenizer, archives: Sequence[str], numbers: Sequence[str]) -> int:
    """Tokens beside the text with the longest names: the frame with its question and answer, and the needles."""
    by_length = sorted(archives, key=lambda name: -len(tokenizer.encode(name, add_special_tokens=False)))
    frame = prompt_frame(tokenizer, by_length[0], _INTRODUCTION)
    needles = [f" {needle_sentence(*pair)}" for pair in zip(by_length, numbers, strict=False)]
    counted = [frame.head, *needles, f"{frame.tail} {numbers[0]}"]
    return _SPARE_TOKENS + sum(len(tokenizer.encode(part, add_special_tokens=True)) for part in counted)


def _with_needles(tokenizer: Tokenizer, filler: Sequence[str], needles: Sequence[str]) -> str:
    """The text with needle i in front of the sentence at (i + 1/2) / needles of its tokens."""
    lengths = [len(tokenizer.encode(sentence, add_special_tokens=False)) for sentence in filler]
    total, position, waiting = sum(lengths), 0, list(needles)
    pieces: list[str] = []
    for sentence, tokens in zip(filler, lengths, strict=True):
        while waiting and position >= (len(needles) - len(waiting) + 0.5) / len(needles) * total:
            pieces.append(f" {waiting.pop(0)}")
        pieces.append(sentence)
        position += tokens
    return "".join([*pieces, *(f" {needle}" for needle in waiting)])


def _question(tokenizer: Tokenizer, archive: str, number: str) -> NeedleQuestion:
    tail = prompt_frame(tokenizer, archive, _INTRODUCTION).tail
    asked = tokenizer.encode(tail, add_special_tokens=False)
    answered = tokenizer.encode(f"{tail} {number}", add_special_tokens=False)
    # A tokenizer may join the end of the question with what follows: then that token belongs to the answer.
    same = next((i for i, (a, b) in enumerate(zip(asked, answered, strict=False)) if a != b), len(asked))
    return NeedleQuestion(needle_sentence(archive, number), number, tuple(answered[:same]), tuple(answered[same:]))


def _numbers(drawn: random.Random, count: int, text: str) -> list[str]:
    """Different numbers that ``text`` does not contain."""
    numbers: list[str] = []
    while len(numbers) < count:
        number = draw_number(drawn)
        if number not in text and number not in numbers:
            numbers.append(number)
    return numbers
