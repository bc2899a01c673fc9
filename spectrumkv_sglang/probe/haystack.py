"""Filler text of a chosen length in tokens, cut at the ends of sentences.

The essays of the text follow one another in an order that the seed gives. When a haystack is longer than the text, all
of them come again in a new order, so a haystack much longer than about 5,200 tokens of shipped text repeats itself:
give a larger text with ``--haystack`` to probe long contexts on text without repetitions.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from spectrumkv_sglang.probe.texts import load_essays

_PARAGRAPH_BREAK = "\n\n"
_MAX_SENTENCE_CHARACTERS = 600  # a text without full stops is cut at spaces instead
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"')\]”’]*\s+|(?<=[。！？])")


class Tokenizer(Protocol):
    """What the probe uses of a transformers tokenizer."""

    chat_template: Any

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return token ids."""
        ...

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> Any:
        """Return the conversation as text."""
        ...


@dataclass(frozen=True)
class Haystack:
    """A text to hide needles in.

    Attributes:
        essays: for each essay its sentences; each begins with what stands before it, a space or a paragraph break.
    """

    essays: tuple[tuple[str, ...], ...]

    def filler(self, tokenizer: Tokenizer, tokens: int, seed: int) -> list[str]:
        """Return whole sentences of at most ``tokens`` tokens together; joined they are the text.

        The count adds up the sentences encoded one by one, which can differ from the joined text's by a few tokens.
        The same seed gives the same sentences; a larger ``tokens`` only appends to them.
        """
        sentences: list[str] = []
        lengths: dict[str, int] = {}
        room = tokens
        for sentence in self._endless(seed):
            if sentence not in lengths:
                lengths[sentence] = len(tokenizer.encode(sentence, add_special_tokens=False))
            room -= lengths[sentence]
            if room < 0:
                return sentences
            sentences.append(sentence)
        return sentences

    def _endless(self, seed: int) -> Iterator[str]:
        order = random.Random(seed)
        essays = list(self.essays)
        if len(essays) == 1:
            start = order.randrange(len(essays[0]))
            essays = [essays[0][start:], essays[0][:start]]
            while True:
                yield from (sentence for essay in essays for sentence in essay)
        while True:
            order.shuffle(essays)
            yield from (sentence for essay in essays for sentence in essay)


def load_haystack(path: Path | None = None) -> Haystack:
    """Return the shipped haystack, or the one in a text file.

    Args:
        path: a UTF-8 text file (``--haystack``). Lines that hold only ``---`` part essays, whose order a seed may
            change; a text without them is kept in order, from a sentence that the seed chooses and round again.

    Raises:
        ProbeTextError: the file cannot be read, is not UTF-8, or is too short.
    """
    essays = load_essays(path, shipped="haystack.txt", option="--haystack")
    return Haystack(tuple(tuple(_sentences(essay)) for essay in essays))


def _sentences(essay: str) -> Iterator[str]:
    for paragraph in re.split(r"\n\s*\n", essay):
        before = _PARAGRAPH_BREAK
        start = 0
        text = " ".join(paragraph.split())
        for end in (*(match.end() for match in _SENTENCE_END.finditer(text)), len(text)):
            for piece in _pieces(text[start:end].strip()):
                yield before + piece
                before = "" if piece[-1] in "。！？" else " "
            start = end


def _pieces(sentence: str) -> Iterator[str]:
    while len(sentence) > _MAX_SENTENCE_CHARACTERS:
        cut = sentence.rfind(" ", 0, _MAX_SENTENCE_CHARACTERS)
        cut = cut if cut > 0 else _MAX_SENTENCE_CHARACTERS
        yield sentence[:cut]
        sentence = sentence[cut:].strip()
    if sentence:
        yield sentence
