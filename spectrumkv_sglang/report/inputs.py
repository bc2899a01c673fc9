"""Which kind of result a file holds, and its sections."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from spectrumkv_sglang.report.content import Section
from spectrumkv_sglang.report.errors import ReportError
from spectrumkv_sglang.report.sections.calibration import calibration_sections
from spectrumkv_sglang.report.sections.kernels import kernel_sections
from spectrumkv_sglang.report.sections.probe import probe_sections
from spectrumkv_sglang.report.sections.quality import quality_sections
from spectrumkv_sglang.report.sections.serving import serving_sections
from spectrumkv_sglang.report.sections.simulation import simulation_sections
from spectrumkv_sglang.report.sections.sizing import sizing_sections
from spectrumkv_sglang.report.sections.transfer import transfer_sections
from spectrumkv_sglang.report.sections.transfer_log import log_sections
from spectrumkv_sglang.report.sections.tuning import tuning_sections

Document = dict[str, Any]
KNOWN = (
    "the JSON of spectrumkv probe, eval, calibrate, tune, simulate or size; docs/results/quality.json or gpu.json; "
    "kernels.json, transfer.json or serving.json of the benchmarks; or a transfer log"
)


def sections_of(path: Path) -> list[Section]:
    """What a file has to show.

    Raises:
        ReportError: it cannot be read, is of no known kind, or lacks what its kind has.
    """
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ReportError(f"{path}: {error}") from error
    try:
        document = json.loads(content)
    except ValueError:
        document = None
    try:
        if _is_log(content, document):
            return log_sections(content, path.name)
        if not isinstance(document, dict):
            raise ReportError(f"{path}: no JSON object and no transfer log; expected {KNOWN}")
        found = [section for holds, make in _KINDS if holds(document) for section in make(document, path)]
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, msgspec.MsgspecError) as error:
        raise ReportError(
            f"{path}: something that this kind of file has is not there or not as expected: {error!r}"
        ) from (error)
    if not found:
        keys = ", ".join(sorted(document)[:8]) or "none"
        raise ReportError(f"{path}: unknown kind of file (its keys: {keys}); expected {KNOWN}")
    return found


def _is_log(content: str, document: object) -> bool:
    """Whether the first line is a chunk's record."""
    line = content.lstrip().partition("\n")[0]
    try:
        first = json.loads(line)
    except ValueError:
        return False
    return isinstance(first, dict) and {"room", "path", "wire_bytes", "tokens_by_tier"} <= set(first)


def _in_list(value: object) -> bool:
    return isinstance(value, list) and bool(value)


def _runs(document: Document, key: str) -> list[Document]:
    """A benchmark's own document, or those that gpu.json keeps under ``key``."""
    return list(document[key]) if _in_list(document.get(key)) else [document]


def _is_transfer(document: Document) -> bool:
    first = _runs(document, "transfer")[0]
    return _in_list(first.get("samples")) and {"prompt_tokens", "rate_gbps"} <= set(first["samples"][0])


def _is_serving(document: Document) -> bool:
    first = _runs(document, "serving")[0]
    return _in_list(first.get("samples")) and "client" in first["samples"][0]


_KINDS: Sequence[tuple[Callable[[Document], bool], Callable[[Document, Path], list[Section]]]] = (
    (lambda one: "niah" in one and "verdict" in one, lambda one, path: probe_sections(path)),
    (
        lambda one: _in_list(one.get("evaluations")) or {"results", "prefix_tokens"} <= set(one),
        lambda one, path: quality_sections(one),
    ),
    (lambda one: {"expected_kl", "granularity"} <= set(one), lambda one, path: calibration_sections(one)),
    (lambda one: {"frontier", "others"} <= set(one), lambda one, path: tuning_sections(one)),
    (lambda one: {"link", "seed", "results"} <= set(one), lambda one, path: simulation_sections(one)),
    (lambda one: {"estimates", "advice"} <= set(one), lambda one, path: sizing_sections(one)),
    (_is_transfer, lambda one, path: transfer_sections(_runs(one, "transfer"))),
    (_is_serving, lambda one, path: serving_sections(_runs(one, "serving"))),
    (lambda one: "kernels" in one, lambda one, path: kernel_sections(one)),
)
