"""The prompts of `soak.py`: short, long, and with beginnings in common, all drawn from one seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

from spectrumkv_sglang.launch.prompts import LONG_PROMPTS

SHARED_DOCUMENTS = 8


@dataclass(frozen=True)
class SoakPrompt:
    """One prompt.

    Attributes:
        kind: "short", "long" or "shared prefix".
        text: what is asked.
        new_tokens: tokens to generate, no fewer.
    """

    kind: str
    text: str
    new_tokens: int


def soak_prompts(count: int, longest_words: int, seed: int) -> list[SoakPrompt]:
    """``count`` distinct prompts: 3 in 10 of a sentence or two, 3 in 10 long, 4 in 10 that begin with one of 8 texts.

    A long one has between half of ``longest_words`` and all of them; a shared text has half of them.
    """
    drawn = random.Random(seed)
    sentences = [part.strip() + "." for prompt in LONG_PROMPTS for part in prompt.text.split(".") if len(part) > 20]
    documents = [_words(drawn, sentences, longest_words // 2) for _ in range(SHARED_DOCUMENTS)]
    prompts = []
    for number in range(count):
        new_tokens = drawn.randint(8, 16)
        if number % 10 < 3:
            prompt = SoakPrompt("short", f"{number}. {drawn.choice(sentences)} {drawn.choice(sentences)}", new_tokens)
        elif number % 10 < 6:
            words = drawn.randint(longest_words // 2, longest_words)
            prompt = SoakPrompt("long", f"{number}. {_words(drawn, sentences, words)}", new_tokens)
        else:
            question = f"{drawn.choice(sentences)} Remark {number}: {drawn.choice(sentences)}"
            prompt = SoakPrompt("shared prefix", f"{drawn.choice(documents)} {question}", new_tokens)
        prompts.append(prompt)
    return prompts


def _words(drawn: random.Random, sentences: list[str], count: int) -> str:
    words: list[str] = []
    while len(words) < count:
        words += drawn.choice(sentences).split()
    return " ".join(words[:count])
