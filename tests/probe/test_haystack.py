"""Filler: real text of a chosen length in tokens, the same for the same seed, cut at the ends of sentences."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from spectrumkv_sglang.probe.haystack import Haystack, load_haystack
from spectrumkv_sglang.probe.texts import ProbeTextError

HAYSTACK = load_haystack()


def test_sentences_put_together_are_the_text() -> None:
    for essay in HAYSTACK.essays:
        text = "".join(essay)
        assert text.startswith("\n\n")
        assert all(sentence.startswith((" ", "\n\n")) for sentence in essay)
        assert all(sentence.endswith((".", "?", "!")) for sentence in essay)
    file = Path(__file__).parents[2] / "spectrumkv_sglang/probe/text/haystack.txt"
    whole = "\n---".join("".join(essay)[1:] for essay in HAYSTACK.essays)
    assert whole.strip() == file.read_text().strip()


@pytest.mark.parametrize("tokens", [100, 1500, 4000, 20_000])
def test_length_is_what_was_asked_for_but_for_one_sentence(chat_tokenizer: Any, tokens: int) -> None:
    sentences = HAYSTACK.filler(chat_tokenizer, tokens, seed=3)
    counted = len(chat_tokenizer.encode("".join(sentences), add_special_tokens=False))
    assert tokens - 120 < counted <= tokens * 1.002
    assert all(sentence.endswith((".", "?", "!")) for sentence in sentences)


def test_a_seed_gives_the_same_text_again_and_another_seed_another(chat_tokenizer: Any) -> None:
    once = HAYSTACK.filler(chat_tokenizer, 1000, seed=1)
    assert HAYSTACK.filler(chat_tokenizer, 1000, seed=1) == once
    assert HAYSTACK.filler(chat_tokenizer, 1000, seed=2) != once
    assert HAYSTACK.filler(chat_tokenizer, 2000, seed=1)[: len(once)] == once


def test_nothing_is_repeated_until_the_whole_text_has_been_used(base_tokenizer: Any) -> None:
    every = sorted(sentence for essay in HAYSTACK.essays for sentence in essay)
    sentences = HAYSTACK.filler(base_tokenizer, 60_000, seed=5)  # one token a byte
    assert len(sentences) > 2 * len(every)
    first, second = sentences[: len(every)], sentences[len(every) : 2 * len(every)]
    assert sorted(first) == every
    assert sorted(second) == every
    assert first != second


def test_a_given_text_without_separators_keeps_its_order(base_tokenizer: Any, tmp_path: Path) -> None:
    file = tmp_path / "book.txt"
    file.write_text("\n".join(f"Line {i} of a\nbook, which goes on." for i in range(100)))
    haystack = load_haystack(file)
    sentences = haystack.filler(base_tokenizer, 2 * file.stat().st_size, seed=4)
    numbers = [int(sentence.split()[1]) for sentence in sentences]
    assert numbers[0] != 0
    assert all(after == (before + 1) % 100 for before, after in itertools.pairwise(numbers))
    assert sentences[0].strip() == f"Line {numbers[0]} of a book, which goes on."


@pytest.mark.parametrize(
    "text", ["word " * 1000, "x" * 3000, "第一句很短。" * 500], ids=["words", "letters", "chinese"]
)
def test_text_without_western_sentences_is_cut_too(base_tokenizer: Any, text: str, tmp_path: Path) -> None:
    file = tmp_path / "odd.txt"
    file.write_text(text, encoding="utf-8")
    (essay,) = load_haystack(file).essays
    assert max(map(len, essay)) <= 602
    assert "".join("".join(essay).split()) == "".join(text.split())
    assert load_haystack(file).filler(base_tokenizer, 2000, seed=0)


def test_no_room_gives_no_text(base_tokenizer: Any) -> None:
    assert Haystack(((" A sentence.",),)).filler(base_tokenizer, 3, seed=0) == []


def test_an_unusable_file_is_named_with_its_option(tmp_path: Path) -> None:
    with pytest.raises(ProbeTextError, match=r"--haystack .*absent\.txt: No such file"):
        load_haystack(tmp_path / "absent.txt")
