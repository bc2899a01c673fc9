"""One HTML page without a single external resource, and its pictures as PNG files."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path

from spectrumkv_sglang.report.content import Picture, Section, Table
from spectrumkv_sglang.report.errors import ReportError

PNG_DPI = 110


def render(title: str, made: str, sections: Sequence[Section]) -> str:
    """The page. Everything that comes from an input is escaped; pictures are inline SVG.

    Args:
        made: line under the title: when, from what.
    """
    import jinja2

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.tests["picture"] = lambda shown: isinstance(shown, Picture)
    numbers = iter(range(1, 10**6))
    # The template marks it as safe: matplotlib escapes the text that it writes into its SVG.
    environment.filters["svg"] = lambda picture: _svg(picture, next(numbers))
    template = resources.files("spectrumkv_sglang.report").joinpath("page.html").read_text(encoding="utf-8")
    return environment.from_string(template).render(title=title, made=made, sections=_told_apart(sections))


def _told_apart(sections: Sequence[Section]) -> list[Section]:
    """Sections whose titles are alike get a number, so that links to them differ."""
    titles = [section.title for section in sections]
    return [
        replace(one, title=f"{one.title}, {titles[: place + 1].count(one.title)} of {titles.count(one.title)}")
        if titles.count(one.title) > 1
        else one
        for place, one in enumerate(sections)
    ]


def write_page(path: Path, page: str) -> None:
    """Write the page.

    Raises:
        ReportError: it cannot be written.
    """
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ReportError(f"--out {path}: {error.strerror or error}") from error


def write_pictures(folder: Path, sections: Sequence[Section]) -> list[Path]:
    """Every picture as a PNG file in ``folder``, which is made if it is not there.

    Raises:
        ReportError: they cannot be written.
    """
    written: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for section in sections:
            for shown in section.shown:
                if isinstance(shown, Table):
                    continue
                path = folder / f"{len(written) + 1:02}-{re.sub(r'[^a-z0-9]+', '-', shown.name.lower())}.png"
                path.write_bytes(_saved(shown, "png"))
                written.append(path)
    except OSError as error:
        raise ReportError(f"--png {folder}: {error.strerror or error}") from error
    return written


def _svg(picture: Picture, index: int) -> str:
    """The picture from <svg> on; ids are its own, since all pictures share the page's."""
    text = _saved(picture, "svg").decode()
    text = text[text.index("<svg") :]
    text = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>p{index}-", text)
    return text.replace("<svg ", '<svg role="img" ', 1)


def _saved(picture: Picture, kind: str) -> bytes:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    # Text as text: small, and found by a search on the page.
    with mpl.rc_context({"svg.fonttype": "none", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=picture.size, layout="constrained")
        picture.draw(figure)
        file = io.BytesIO()
        nothing = {"Date": None, "Creator": None, "Format": None, "Type": None} if kind == "svg" else {"Software": None}
        figure.savefig(file, format=kind, dpi=PNG_DPI, metadata=nothing)
    return file.getvalue()
