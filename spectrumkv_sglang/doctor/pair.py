"""Both sides of a running pair: do they fit each other, what is tiered, what is not, and why."""

from __future__ import annotations

from collections.abc import Sequence

from spectrumkv_sglang.doctor.findings import Report, Section, make_report
from spectrumkv_sglang.doctor.running_server import RunningServer, check_server, read_server
from spectrumkv_sglang.observability import metric_specs as specs
from spectrumkv_sglang.observability.reasons import Reason
from spectrumkv_sglang.version import __version__

LITTLE_SAVED = 0.05
_MUST_AGREE = ("model_path", "dtype", "kv_cache_dtype", "page_size", "tp_size", "version")


def examine_pair(prefill_url: str, decode_url: str) -> Report:
    """Reads both servers and says what they do. Starts nothing and sends no request."""
    unread, servers = [], []
    for role, url in (("prefill", prefill_url), ("decode", decode_url)):
        section = Section(f"{role} at {url}")
        server = read_server(section, role, url)
        if server is None:
            unread.append(section)
        else:
            servers.append(server)
    return make_report(__version__, [*unread, *sections_of_servers(servers)])


def sections_of_servers(servers: Sequence[RunningServer]) -> list[Section]:
    """What is found on each server that could be read and, if both were, on them together."""
    sections = []
    for server in servers:
        section = Section(f"{server.role} at {server.metrics.url}")
        check_server(section, server)
        sections.append(section)
    if len(servers) == 2:
        prefill, decode = servers
        together, traffic = Section("together"), Section("what is tiered")
        _check_agreement(together, prefill, decode)
        _check_traffic(traffic, prefill)
        sections += [together, traffic]
    return sections


def _check_agreement(section: Section, prefill: RunningServer, decode: RunningServer) -> None:
    tiered = not (prefill.switched_off or decode.switched_off)
    for label in ("version", "allowed_tiers") if tiered else ("version",):
        ours, theirs = prefill.setting(label), decode.setting(label)
        if not (ours and theirs) or ours == theirs:
            continue
        if label == "version":
            section.warning("SpectrumKV", f"prefill {ours}, decode {theirs}", "finish the upgrade")
        else:
            section.warning(
                "tiers",
                f"prefill allows {ours}, decode {theirs}: only what both allow is used",
                "give both servers the same launch config",
            )
    secrets = [server.setting("control_secret") for server in (prefill, decode)]
    if tiered and all(secrets) and secrets[0] != secrets[1]:
        section.problem(
            "control secret",
            f"prefill {secrets[0]}, decode {secrets[1]}: all KV travels natively (secret_mismatch)",
            "the same control_secret_file for all prefill and decode servers",
        )
    differing = [
        f"{name}: prefill {prefill.info[name]!r}, decode {decode.info[name]!r}"
        for name in _MUST_AGREE
        if name in prefill.info and name in decode.info and prefill.info[name] != decode.info[name]
    ]
    if differing:
        section.warning(
            "SGLang",
            "; ".join(differing),
            "TP, dtype, page size and model must be equal, or KV travels natively or fails",
        )
    elif prefill.info and decode.info:
        section.ok("SGLang", "model, dtype, page size, TP and version are equal")


def _check_traffic(section: Section, prefill: RunningServer) -> None:
    metrics = prefill.metrics
    chunks = metrics.by_label(specs.CHUNKS, "path", "reason")
    if not prefill.metrics.has_spectrumkv:
        return
    if not chunks:
        section.info("chunks", "none sent yet", "send a request through the router and ask again")
        return
    native, wire = metrics.total(specs.NATIVE_BYTES), metrics.total(specs.WIRE_BYTES)
    saved = 1 - wire / native if native else 0.0
    told = f"{native / 1e6:,.1f} MB of KV, {wire / 1e6:,.1f} MB sent: {saved:.1%} stayed off the wire since the start"
    if saved < LITTLE_SAVED:
        section.warning("bytes", told, "the reasons below say why")
    else:
        section.ok("bytes", told)
    known = {reason.value: reason for reason in Reason}
    for (path, reason), count in sorted(chunks.items(), key=lambda item: -item[1]):
        meaning = known[reason].meaning if reason in known else "unknown to this version"
        line = f"{count:,.0f} chunks, {reason}: {meaning}"
        if path == "tiered":
            section.ok("tiered", line)
        else:
            section.warning("native", line, f"docs/metrics.md, reason {reason}")
    if any(path == "tiered" for path, _ in chunks):
        tokens = {tier: count for (tier,), count in metrics.by_label(specs.TOKENS, "tier").items()}
        total = sum(tokens.values()) or 1
        section.ok("tokens", ", ".join(f"{tier} {count / total:.1%}" for tier, count in tokens.items()))
    missed = metrics.total(specs.BUDGET_UNREACHABLE)
    if missed:
        section.warning(
            "budget",
            f"{missed:,.0f} rooms were sent above it: no allowed tier is small enough",
            "raise the budget, probe the model so that the low tier counts, or choose another profile",
        )
    decisions = metrics.by_label(specs.DECISIONS, "candidate", "reason")
    if decisions:
        section.info(
            "controller",
            "; ".join(f"{candidate} {count:,.0f} ({why})" for (candidate, why), count in decisions.items()),
        )
    times = [
        (name, metrics.mean(spec))
        for name, spec in (("pack", specs.PACK_SECONDS), ("write", specs.WRITE_SECONDS), ("wait", specs.WAIT_SECONDS))
    ]
    if taken := [f"{name} {mean * 1e3:,.1f} ms" for name, mean in times if mean is not None]:
        section.ok("times", ", ".join(taken))
