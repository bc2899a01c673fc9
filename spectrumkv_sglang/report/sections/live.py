"""Running servers, from their /metrics: bytes, reasons, the time split, tiers, decisions."""

from __future__ import annotations

from collections.abc import Sequence

from spectrumkv_sglang.observability import metric_specs as specs
from spectrumkv_sglang.observability.live_metrics import LiveMetrics, fetch_metrics
from spectrumkv_sglang.report.content import Picture, Section, Table, megabytes, milliseconds, number
from spectrumkv_sglang.report.drawing import bars

_SGLANG_STAGES = "sglang:per_stage_req_latency_seconds"


def live_sections(urls: Sequence[str]) -> list[Section]:
    """One section a server, and one for where a request's time goes on all of them together.

    Raises:
        LiveServerError: one does not answer or shows no metrics.
    """
    servers = [fetch_metrics(url) for url in urls]
    return [*(_server(server) for server in servers), _time_split(servers)]


def _server(server: LiveMetrics) -> Section:
    title = f"Live: {server.role or 'server'} at {server.url}"
    if not server.has_spectrumkv:
        return Section(title, ["This server runs no SpectrumKV backend: nothing of it is tiered."], [])
    native, wire = (
        {path: server.total(spec, path=path) for path in ("tiered", "native")}
        for spec in (specs.NATIVE_BYTES, specs.WIRE_BYTES)
    )
    text = [_settings(server)]
    shown: list[Table | Picture] = []
    if sum(native.values()):
        text.append(
            f"{1 - sum(wire.values()) / sum(native.values()):.1%} of the KV stayed off the wire since the start."
        )
        rows = [
            [path, megabytes(native[path]), megabytes(wire[path]), number(wire[path] / native[path])]
            for path in native
            if native[path]
        ]
        shown.append(Table("Bytes by path", ["path", "native, MB", "wire, MB", "b"], rows))
        shown.append(_counts("Chunks", server, specs.CHUNKS, "path", "reason"))
        tokens = {tier: count for (tier,), count in server.by_label(specs.TOKENS, "tier").items()}
        shown.append(
            Picture(
                f"tokens by tier {server.role}",
                "Tokens sent, by tier.",
                lambda figure: bars(figure.add_subplot(), list(tokens), list(tokens.values()), "tokens"),
                (8.0, 0.8 + 0.35 * len(tokens)),
            )
        )
    for name, spec, *labels in (
        ("Controller decisions", specs.DECISIONS, "candidate", "reason"),
        ("Failures", specs.FAILURES, "cause"),
        ("Landing slots", specs.LANDING_SLOTS, "state"),
        ("Staging slots", specs.STAGING_SLOTS, "state"),
    ):
        table = _counts(name, server, spec, *labels)
        if table.rows:
            shown.append(table)
    return Section(title, text, shown)


def _settings(server: LiveMetrics) -> str:
    labels = server.of(specs.CONFIG_INFO.full_name)[0].labels
    states = [state for (state,) in server.by_label(specs.PROBE_STATE, "state")]
    return (
        f"SpectrumKV {labels.get('version')}: profile {labels.get('profile')}, budget {labels.get('budget')}, tiers "
        f"{labels.get('allowed_tiers')}, scorer {labels.get('scorer')}; probe: {', '.join(states) or 'unknown'}."
    )


def _counts(title: str, server: LiveMetrics, spec: specs.MetricSpec, *labels: str) -> Table:
    rows = [[", ".join(key), f"{count:,.0f}"] for key, count in server.by_label(spec, *labels).items()]
    return Table(title, [", ".join(labels), "number"], rows)


def _time_split(servers: Sequence[LiveMetrics]) -> Section:
    parts: dict[str, float] = {}
    rows = []
    for server in servers:
        for stage in sorted({one.labels.get("stage", "") for one in server.of(_SGLANG_STAGES + "_count")}):
            count, total = (
                sum(one.value for one in server.of(_SGLANG_STAGES + suffix, stage=stage))
                for suffix in ("_count", "_sum")
            )
            if count:
                rows.append([f"{server.role}: {stage}", "request", f"{count:,.0f}", milliseconds(total / count)])
        for name, spec, what, labels in (
            ("pack", specs.PACK_SECONDS, "payload", {}),
            ("write", specs.WRITE_SECONDS, "payload", {}),
            ("unpack", specs.UNPACK_SECONDS, "payload", {}),
            ("wait for a slot", specs.WAIT_SECONDS, "payload", {"wait": "slot"}),
            ("wait for OPEN", specs.WAIT_SECONDS, "chunk", {"wait": "open"}),
            ("wait for DONE", specs.WAIT_SECONDS, "payload", {"wait": "done"}),
            ("transfer, tiered", specs.TRANSFER_SECONDS, "chunk", {"path": "tiered"}),
            ("transfer, native", specs.TRANSFER_SECONDS, "chunk", {"path": "native"}),
        ):
            mean, count = server.mean(spec, **labels), server.total(spec, "_count", **labels)
            if mean is None:
                continue
            rows.append([f"{server.role}: {name}", what, f"{count:,.0f}", milliseconds(mean)])
            part = "wait" if name.startswith("wait") else name
            if not name.startswith("transfer"):
                parts[part] = parts.get(part, 0.0) + server.total(spec, "_sum", **labels)
    text = [
        "Means since the servers started. Parts of a transfer overlap: together they take longer than the transfer. "
        "SGLang's stages come first."
    ]
    shown: list[Table | Picture] = [Table("Where the time goes", ["part", "of each", "number", "mean, ms"], rows)]
    if parts:
        shown.append(
            Picture(
                "time split",
                "Seconds spent altogether, by part of the transfer.",
                lambda figure: bars(figure.add_subplot(), list(parts), list(parts.values()), "seconds"),
                (8.0, 0.8 + 0.35 * len(parts)),
            )
        )
    return Section("Live: where the time goes", text, shown)
