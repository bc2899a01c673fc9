"""Real text for the probe: what is shipped, and files that an operator gives instead.

Shipped are two collections of short essays, written for this project and under its licence: ``text/haystack.txt``
(about 5,200 tokens) hides the needles, ``text/judged.txt`` (about 2,200 tokens) is what perplexity, KL and top-1
agreement are measured on. They have no essay in common and contain no digits, so that no number in them can be taken
for a needle's.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from spectrumkv_sglang.errors import SpectrumKVError

MIN_CHARACTERS = 2_000  # about 450 tokens of English
_ESSAY_SEPARATOR = "\n---\n"


class ProbeTextError(SpectrumKVError):
    """A text for the probe is missing or unusable."""


def load_essays(path: Path | None, *, shipped: str, option: str, required: bool = False) -> tuple[str, ...]:
    """Return a text's essays: the parts between lines that hold only ``---``, or the whole text as one.

    Args:
        path: a UTF-8 text file, or None for the shipped one.
        shipped: name of the shipped file.
        option: the command line's option for ``path``, named in errors.
        required: whether the command has no use for the shipped text, so that errors must not offer it.

    Raises:
        ProbeTextError: the file cannot be read, is not UTF-8, or holds fewer than ``MIN_CHARACTERS`` characters.
    """
    instead = "" if required else f", or leave {option} out to use the shipped text"
    if path is None:
        text = (resources.files("spectrumkv_sglang.probe") / "text" / shipped).read_text("utf-8")
    else:
        text = _read(path, option, instead)
    essays = tuple(essay.strip() for essay in text.replace("\r\n", "\n").split(_ESSAY_SEPARATOR) if essay.strip())
    characters = sum(map(len, essays))
    if characters < MIN_CHARACTERS:
        raise ProbeTextError(
            f"{option} {path}: the text has {characters} characters, expected at least {MIN_CHARACTERS:,}; give a "
            f"longer one{instead}"
        )
    return essays


def load_judged_text(path: Path | None = None, *, required: bool = False) -> str:
    """Return the text for teacher-forced scores, its essays joined by blank lines.

    Args:
        path: a UTF-8 text file (``--text``), or None for the shipped one.
        required: as in ``load_essays``.

    Raises:
        ProbeTextError: see ``load_essays``.
    """
    return "\n\n".join(load_essays(path, shipped="judged.txt", option="--text", required=required))


def _read(path: Path, option: str, instead: str) -> str:
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ProbeTextError(
            f"{option} {path}: not UTF-8 text (byte {error.start} is {error.object[error.start]:#04x}); convert it "
            f"with `iconv -t UTF-8`{instead}"
        ) from error
    except OSError as error:
        raise ProbeTextError(
            f"{option} {path}: {error.strerror or error}; give a readable text file{instead}"
        ) from error
