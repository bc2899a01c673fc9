"""Prose out of MediaWiki markup: running paragraphs stay, everything else goes.

Left out are templates, tables, files, references, formulas, lists, link-only sections and paragraphs too short to be
prose. What stays is read by language models, so a lost sentence matters less than left markup.
"""

from __future__ import annotations

import bz2
import html
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from xml.etree import ElementTree

LEAST_PARAGRAPH = 120
"""Characters of a paragraph that stays."""
LEAST_ARTICLE = 2_000
"""Characters of an article that stays."""

_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_EMPTY_ELEMENT = re.compile(r"<(ref|references|br|hr)\b[^<>]*?/?>(?!</)", re.IGNORECASE)
_EMPTY_REFERENCE = re.compile(r"<ref\b[^<>]*/>", re.IGNORECASE)
_ELEMENT_WITH_CONTENT = re.compile(
    r"<(ref|math|gallery|timeline|table|source|syntaxhighlight|pre|code|imagemap|nowiki|div)\b[^<>]*>.*?</\1\s*>",
    re.DOTALL | re.IGNORECASE,
)
_TAG = re.compile(r"</?[a-zA-Z][^<>]*>")
_INNERMOST_TEMPLATE = re.compile(r"\{\{([^{}]*)\}\}")
_INNERMOST_TABLE = re.compile(r"\{\|(?:(?!\{\||\|\}).)*\|\}", re.DOTALL)
_INNERMOST_LINK = re.compile(r"\[\[([^\[\]]*)\]\]")
_EXTERNAL_LINK = re.compile(r"\[(?:https?|ftp)://[^\s\]]+\s*([^\]]*)\]")
_QUOTES = re.compile(r"'{2,}")
_HEADING = re.compile(r"^(={2,6})\s*(.*?)\s*\1\s*$")
_NO_PROSE = re.compile(r"^[*#:;|!{}\[]|^\s|^__")
_EMPTY_BRACKETS = re.compile(r"\s*\([\s,;:]*\)")
_AFTER_BRACKET = re.compile(r"\(\s*[,;:]\s*")
_BEFORE_PUNCTUATION = re.compile(r"\s+([,.;:)])(?=\s|$)")
_SPACES = re.compile(r"[ \t\u00a0]+")
_LINKED_WITHOUT_TEXT = re.compile(r"^:?(?:file|image|category|media|[a-z]{2,3}(?:-[a-z]+)*):", re.IGNORECASE)
_CLOSING_SECTIONS = frozenset(
    {"see also", "references", "external links", "further reading", "notes", "bibliography", "footnotes", "sources"}
)


def articles_of_dump(dump: Path) -> Iterator[str]:
    """Every article of a bzip2-compressed MediaWiki dump that is long enough, its title as its first line."""
    with bz2.open(dump) as file:
        for _, element in ElementTree.iterparse(file):
            if _name(element) != "page":
                continue
            found = {_name(child): child.text or "" for child in element.iter()}
            is_redirect = "redirect" in found or found.get("text", "").lstrip().lower().startswith("#redirect")
            if found.get("ns", "0") == "0" and not is_redirect:
                prose = prose_of(found.get("text", ""))
                if len(prose) >= LEAST_ARTICLE:
                    yield f"{found['title']}\n\n{prose}"
            element.clear()


def prose_of(markup: str) -> str:
    """The running text of an article, its paragraphs parted by blank lines."""
    paragraphs = []
    for line in _without_blocks(markup).split("\n"):
        heading = _HEADING.match(line)
        if heading and heading[2].strip().lower() in _CLOSING_SECTIONS:
            break
        if heading or _NO_PROSE.match(line):
            continue
        paragraph = _plain(line)
        if len(paragraph) >= LEAST_PARAGRAPH:
            paragraphs.append(paragraph)
    return "\n\n".join(paragraphs)


def _without_blocks(markup: str) -> str:
    text = _COMMENT.sub("", markup)
    text = _EMPTY_REFERENCE.sub("", text)
    text = _ELEMENT_WITH_CONTENT.sub("", text)
    text = _until_still(_INNERMOST_TEMPLATE, _text_of_template, text)
    text = _until_still(_INNERMOST_TABLE, "", text)
    return _until_still(_INNERMOST_LINK, _text_of_link, text)


def _text_of_template(template: re.Match[str]) -> str:
    """The few templates that stand for words of a sentence; nothing for all others."""
    name, *fields = (field.strip() for field in template[1].split("|"))
    given = [field for field in fields if "=" not in field]
    match name.lower():
        case "convert" if len(given) >= 2:
            return f"{given[0]} {given[1]}"
        case "lang" if len(given) >= 2:
            return given[1]
        case "as of" if given:
            return f"As of {given[0]}"
    return ""


def _text_of_link(link: re.Match[str]) -> str:
    target, _, label = link[1].partition("|")
    if _LINKED_WITHOUT_TEXT.match(target.strip()):
        return ""
    return label.rpartition("|")[2] or target.removeprefix(":")


def _plain(line: str) -> str:
    text = _EXTERNAL_LINK.sub(r"\1", line)
    text = html.unescape(html.unescape(_TAG.sub("", _EMPTY_ELEMENT.sub(" ", text))))
    text = _QUOTES.sub("", text)
    text = _SPACES.sub(" ", text)
    text = _AFTER_BRACKET.sub("(", text)
    text = _EMPTY_BRACKETS.sub("", text)
    return _BEFORE_PUNCTUATION.sub(r"\1", text).strip(" ,;:")


def _until_still(pattern: re.Pattern[str], replacement: str | Callable[[re.Match[str]], str], text: str) -> str:
    """Replace innermost constructs until none is left, so that nested ones go from the inside out."""
    while True:
        replaced = pattern.sub(replacement, text)
        if replaced == text:
            return text
        text = replaced


def _name(element: ElementTree.Element) -> str:
    return element.tag.rpartition("}")[2]
