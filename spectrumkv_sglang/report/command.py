"""The ``spectrumkv report`` command."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated

import typer


def report(
    inputs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[FILE]...", help="Results (--json of a command, or of a benchmark) and transfer logs."),
    ] = None,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Page to write.")] = Path("report.html"),
    png: Annotated[Path | None, typer.Option("--png", metavar="DIR", help="Write its pictures as PNG as well.")] = None,
    url: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="A running server with --enable-metrics; once for each side of a pair."),
    ] = None,
    title: Annotated[str, typer.Option(help="Of the page.")] = "SpectrumKV",
) -> None:
    """Write one self-contained HTML page from results and running servers: bytes, times, tiers, quality, decisions."""
    from spectrumkv_sglang.report.inputs import KNOWN, sections_of
    from spectrumkv_sglang.report.page import render, write_page, write_pictures
    from spectrumkv_sglang.report.sections.live import live_sections

    files, urls = inputs or [], url or []
    if not files and not urls:
        raise typer.BadParameter(f"nothing to show: give {KNOWN}, or --url", param_hint="FILE")
    sections = [section for path in files for section in sections_of(path)]
    if urls:
        sections += live_sections(urls)
    made = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    sources = ", ".join([*(path.name for path in files), *urls])
    write_page(out, render(title, f"{made}, from {sources}", sections))
    typer.echo(f"{out}: {len(sections)} sections, {out.stat().st_size / 1e3:,.0f} kB")
    if png is not None:
        for path in write_pictures(png, sections):
            typer.echo(str(path))
