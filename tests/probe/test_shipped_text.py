"""The shipped essays: enough of them, prose all through, and nothing in them that a needle could be mistaken for."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

import pytest

from spectrumkv_sglang.probe.needles import _ARCHIVES
from spectrumkv_sglang.probe.texts import MIN_CHARACTERS, ProbeTextError, load_essays, load_judged_text

HAYSTACK = load_essays(None, shipped="haystack.txt", option="--haystack")
JUDGED = load_essays(None, shipped="judged.txt", option="--text")


def _sentences(essays: tuple[str, ...]) -> list[str]:
    return [sentence for essay in essays for sentence in re.split(r"(?<=[.?!])\s+", essay)]


@pytest.mark.parametrize(("essays", "count", "least"), [(HAYSTACK, 14, 20_000), (JUDGED, 6, 9_500)])
def test_there_is_enough_text(essays: tuple[str, ...], count: int, least: int) -> None:
    assert len(essays) == count
    assert sum(map(len, essays)) >= least
    assert all(len(essay) > 1_000 for essay in essays)


def test_no_digit_and_no_word_of_a_needle_occurs() -> None:
    text = " ".join(HAYSTACK + JUDGED).lower()
    assert not re.search(r"\d", text)
    assert set(re.findall(r"\w+", text)) & {*_ARCHIVES, "archive", "code", "access"} == set()


def test_no_sentence_occurs_twice() -> None:
    sentences = _sentences(HAYSTACK + JUDGED)
    assert len(sentences) > 200
    assert len(set(sentences)) == len(sentences)


def test_it_is_prose() -> None:
    for paragraph in (paragraph for essay in HAYSTACK + JUDGED for paragraph in essay.split("\n\n")):
        assert "\n" not in paragraph
        assert paragraph[0].isupper()
        assert paragraph.endswith((".", "?", "!"))
        assert len(paragraph.split()) > 50
    assert {character for character in " ".join(HAYSTACK + JUDGED) if not character.isalpha()} <= set(" \n.,;:?!'-")


def test_the_judged_text_is_the_essays_without_their_separators() -> None:
    text = load_judged_text()
    assert text == "\n\n".join(JUDGED)
    assert "---" not in text


def test_the_files_are_package_data() -> None:
    folder = resources.files("spectrumkv_sglang.probe").joinpath("text")
    assert sorted(file.name for file in folder.iterdir()) == ["haystack.txt", "judged.txt"]


def test_a_given_text_replaces_the_shipped_one(tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("Ein Satz über Flüsse.\r\n" * 200, encoding="utf-8")
    assert load_judged_text(file).startswith("Ein Satz über Flüsse.\nEin Satz")


def _latin_1(file: Path) -> None:
    file.write_bytes("Flüsse ".encode("latin-1") * 1000)


def _empty(file: Path) -> None:
    file.write_text("\n---\n \n")


def _short(file: Path) -> None:
    file.write_text("x" * (MIN_CHARACTERS - 1))


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda file: None, "No such file or directory; give a readable text file"),
        (Path.mkdir, "Is a directory; give a readable text file"),
        (_latin_1, r"not UTF-8 text \(byte 2 is 0xfc\); convert it with `iconv"),
        (_empty, r"the text has 0 characters, expected at least 2,000; give a longer one"),
        (_short, r"the text has 1999 characters, expected at least 2,000"),
    ],
    ids=["missing", "directory", "latin-1", "empty", "short"],
)
def test_an_unusable_file_is_refused_with_what_to_do(make, complaint: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    make(file)
    with pytest.raises(ProbeTextError, match=complaint) as caught:
        load_judged_text(file)
    assert str(caught.value).startswith(f"--text {file}: ")
    assert "leave --text out to use the shipped text" in str(caught.value)
    with pytest.raises(ProbeTextError, match=complaint) as required:  # by a command that has no use for the shipped one
        load_judged_text(file, required=True)
    assert "leave --text out" not in str(required.value)
