"""A transfer log: bytes, where a chunk's time goes, tiers over token position, the controller's decisions."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from spectrumkv_sglang.observability.reasons import Path
from spectrumkv_sglang.observability.transfer_log import ChunkRecord
from spectrumkv_sglang.report.content import Picture, Section, Table, megabytes, milliseconds, number
from spectrumkv_sglang.report.drawing import COLOURS, bars

POSITION_BINS = 64
_TIMES = ("transfer_seconds", "pack_seconds", "write_seconds", "wait_seconds")


def log_sections(content: str, name: str) -> list[Section]:
    """Of the text of a log; a last line that is torn is left out."""
    lines = content.splitlines()
    decoder = msgspec.json.Decoder(ChunkRecord)
    records = []
    for i, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            records.append(decoder.decode(line))
        except msgspec.DecodeError:
            if i + 1 < len(lines):
                raise
    native = sum(record.native_bytes for record in records)
    wire = sum(record.wire_bytes for record in records)
    rooms = len({record.room for record in records})
    saved = f"{1 - wire / native:.1%} stayed off the wire" if native else "no bytes"
    shown: list[Table | Picture] = [_by_reason(records), _times(records), _tiers(records)]
    decisions = Counter((record.candidate, record.decision.value) for record in records if record.decision is not None)
    if decisions:
        shown += _decisions(decisions)
    text = [
        f"{len(records)} chunks of {rooms} rooms: {megabytes(native)} MB of KV, {megabytes(wire)} MB sent: {saved}."
    ]
    return [Section(f"Transfer log: {name}", text, shown)]


def _by_reason(records: Sequence[ChunkRecord]) -> Table:
    groups: dict[tuple[str, str, str], list[ChunkRecord]] = {}
    for record in records:
        groups.setdefault((record.path.value, record.reason.value, record.profile), []).append(record)
    rows = []
    for (path, reason, profile), own in sorted(groups.items()):
        native, wire = sum(one.native_bytes for one in own), sum(one.wire_bytes for one in own)
        rows.append(
            [f"{path}, {reason}", profile, str(len(own)), megabytes(native), megabytes(wire), number(wire / native)]
        )
    return Table("Bytes by path and reason", ["path, reason", "profile", "chunks", "native, MB", "wire, MB", "b"], rows)


def _times(records: Sequence[ChunkRecord]) -> Table:
    rows = []
    for path in Path:
        own = [record for record in records if record.path is path]
        for field in _TIMES:
            values = [getattr(record, field) for record in own]
            if any(values):
                middle, most = statistics.median(values), max(values)
                rows.append(
                    [f"{path.value}, {field.removesuffix('_seconds')}", milliseconds(middle), milliseconds(most)]
                )
    title = "Time of a chunk (pack, write and wait are sums over payloads that overlap)"
    return Table(title, ["path, part", "median, ms", "most, ms"], rows)


def _tiers(records: Sequence[ChunkRecord]) -> Picture:
    return Picture(
        "tiers over position",
        "Tokens by tier over their position in the prompt, all rooms together. The log counts them by chunk: "
        "a chunk's are spread evenly over it.",
        lambda figure: _draw_tiers(figure, records),
    )


def _draw_tiers(figure: Any, records: Sequence[ChunkRecord]) -> None:
    starts: Counter[int] = Counter()
    placed = []
    for record in records:
        placed.append((starts[record.room], record))
        starts[record.room] = 0 if record.last_chunk else starts[record.room] + record.tokens
    longest = max(start + record.tokens for start, record in placed)
    edges = np.linspace(0, longest, POSITION_BINS + 1)
    counts = {tier: np.zeros(POSITION_BINS) for tier in ("high", "mid", "low", "native")}
    for start, record in placed:
        overlap = np.clip(np.minimum(edges[1:], start + record.tokens) - np.maximum(edges[:-1], start), 0, None)
        by_tier = {tier: getattr(record.tokens_by_tier, tier) for tier in ("high", "mid", "low")}
        by_tier["native"] = record.tokens if record.path is Path.NATIVE else 0
        for tier, tokens in by_tier.items():
            counts[tier] += tokens * overlap / max(record.tokens, 1)
    axes = figure.add_subplot()
    axes.stackplot(
        (edges[:-1] + edges[1:]) / 2, *counts.values(), labels=list(counts), colors=[COLOURS[tier] for tier in counts]
    )
    axes.set_xlabel("position in the prompt, tokens")
    axes.set_ylabel(f"tokens in {longest / POSITION_BINS:,.0f} positions")
    axes.legend(fontsize=8, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)


def _decisions(decisions: Counter[tuple[str, str]]) -> list[Table | Picture]:
    rows = [[f"{candidate or 'native'}", reason, str(count)] for (candidate, reason), count in decisions.most_common()]
    by_candidate: Counter[str] = Counter()
    for (candidate, _), count in decisions.items():
        by_candidate[candidate or "native"] += count
    return [
        Table("Controller decisions, by chunk", ["candidate", "reason", "chunks"], rows),
        Picture(
            "controller decisions",
            "Chunks by the candidate that the controller chose.",
            lambda figure: bars(figure.add_subplot(), list(by_candidate), list(by_candidate.values()), "chunks"),
            (8.0, 0.8 + 0.35 * len(by_candidate)),
        ),
    ]
