"""One running server of a pair, as its /metrics and /server_info show it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from spectrumkv_sglang.doctor.findings import Section
from spectrumkv_sglang.observability import metric_specs as specs
from spectrumkv_sglang.observability.live_metrics import LiveMetrics, LiveServerError, fetch_metrics, fetch_text
from spectrumkv_sglang.observability.reasons import FailureCause, ProbeState
from spectrumkv_sglang.transport_tuning import DEFAULT, TCP_TUNING

GOOD_STATES = (ProbeState.VERIFIED.value, ProbeState.NOT_NEEDED.value)


@dataclass(frozen=True)
class RunningServer:
    """What was read of one server; ``info`` is empty where /server_info told nothing."""

    role: str
    metrics: LiveMetrics
    info: dict[str, Any]

    def setting(self, label: str) -> str:
        """A label of config_info, "" where there is none."""
        found = self.metrics.of(specs.CONFIG_INFO.full_name)
        return found[0].labels.get(label, "") if found else ""

    @property
    def switched_off(self) -> bool:
        """Whether the server says that its SpectrumKV is off; one too old to say so counts as on."""
        return self.setting("enabled") == "off"


def read_server(section: Section, role: str, url: str) -> RunningServer | None:
    """Reads the server at ``url``, which should be the pair's ``role``; None after a problem that ends the check."""
    try:
        metrics = fetch_metrics(url)
    except LiveServerError as error:
        section.problem("metrics", str(error), "correct the address, or start the server with --enable-metrics")
        return None
    info: dict[str, Any] = {}
    for path in ("server_info", "get_server_info"):  # the latter up to 0.5.17
        try:
            answer = json.loads(fetch_text(f"{metrics.url}/{path}", hint="another SGLang?"))
        except (LiveServerError, ValueError):
            continue
        if isinstance(answer, dict):
            info = answer
            break
    if metrics.role and metrics.role != role:
        section.problem("role", f"{url} is the {metrics.role} server", "swap --prefill-url and --decode-url")
        return None
    return RunningServer(role, metrics, info)


def check_server(section: Section, server: RunningServer) -> None:
    """Backend, settings, probe, slots, failures and transport of one server."""
    if server.info:
        section.ok(
            "sglang",
            f"{server.info.get('version', '?')}: {server.info.get('model_path', '?')}, "
            f"dtype {server.info.get('dtype')}, KV {server.info.get('kv_cache_dtype')}, "
            f"TP {server.info.get('tp_size')}, pages of {server.info.get('page_size')}",
        )
    else:
        section.info("sglang", "no /server_info: model, dtype and TP of the two sides are not compared")
    if not server.metrics.has_spectrumkv:
        section.problem(
            "backend",
            "no spectrumkv: metrics: this server runs SGLang's own backend, or was asked before it had started",
            "start it with --disaggregation-transfer-backend spectrumkv (or spectrumkv_tcp)",
        )
        return
    if server.switched_off:
        section.warning(
            "backend",
            f"SpectrumKV {server.setting('version')}, switched off (SPECTRUMKV_ENABLED or enabled: false): "
            "all KV travels natively",
            "set enabled: true, or SPECTRUMKV_ENABLED=true, and restart it to use tiers",
        )
    else:
        _check_settings(section, server)
    _check_slots(section, server.metrics)
    _check_failures(section, server.metrics)
    _check_transport(section, server.metrics)


def _check_settings(section: Section, server: RunningServer) -> None:
    section.ok(
        "backend",
        f"SpectrumKV {server.setting('version')}: profile {server.setting('profile')}, "
        f"budget {server.setting('budget')}, tiers {server.setting('allowed_tiers')}, "
        f"scorer {server.setting('scorer')}",
    )
    secret = server.setting("control_secret")
    if secret == "on":
        section.ok("control secret", "on: the control channel takes connections of those who hold it")
    elif secret:
        section.ok("control secret", "off: the firewall says who may connect (docs/threat_model.md)")
    _check_probe(section, server.metrics)


def _check_probe(section: Section, metrics: LiveMetrics) -> None:
    for (state,) in metrics.by_label(specs.PROBE_STATE, "state"):
        meaning = ProbeState(state).meaning if state in {one.value for one in ProbeState} else "an unknown state"
        if state in GOOD_STATES:
            section.ok("probe", f"{state}: {meaning}")
        elif state == ProbeState.WAIVED.value:
            section.warning("probe", f"{state}: {meaning}", "for production remove require_probe: false and probe")
        else:
            section.warning(
                "probe",
                f"{state}: {meaning}; only tiers of 8 bits and more are in use",
                "run `spectrumkv probe` for the served model, profile and budget; start both sides with its file",
            )


def _check_slots(section: Section, metrics: LiveMetrics) -> None:
    for name, spec in (("landing slots", specs.LANDING_SLOTS), ("staging slots", specs.STAGING_SLOTS)):
        states = {state: int(count) for (state,), count in metrics.by_label(spec, "state").items()}
        if not states:
            continue
        told = ", ".join(f"{count} {state.replace('_', ' ')}" for state, count in states.items())
        if states.get("quarantined"):
            section.warning(
                name, told, "writes failed within quarantine_s: see the failures; the slots come back by themselves"
            )
        else:
            section.ok(name, told)


def _check_failures(section: Section, metrics: LiveMetrics) -> None:
    known = {cause.value: cause.meaning for cause in FailureCause}
    for (cause,), count in metrics.by_label(specs.FAILURES, "cause").items():
        section.warning("failures", f"{count:,.0f} x {cause}: {known.get(cause, 'unknown')}", "docs/troubleshooting.md")
    garbage = metrics.total(specs.CONTROL_REJECTED, kind="garbage")
    if garbage:
        section.warning(
            "control channel",
            f"{garbage:,.0f} messages that could not be read",
            "open the control port to the prefill and decode hosts only",
        )


def _check_transport(section: Section, metrics: LiveMetrics) -> None:
    found = {one.labels["variable"]: one.labels for one in metrics.of(specs.TRANSPORT_INFO.full_name)}
    if not found:
        section.info("transport", "not shown: this server runs a SpectrumKV older than this doctor")
        return
    kind = next(iter(found.values()))["transport"]
    values = {name: labels["value"] for name, labels in found.items()}
    if kind != "tcp":
        section.ok("transport", "RDMA, unless Mooncake found no device (its log says so)")
        return
    section.ok(
        "transport", "TCP: " + ", ".join(f"{name}={value}" for name, value in values.items() if value != DEFAULT)
    )
    unset = [one for one in TCP_TUNING if values.get(one.name, DEFAULT) == DEFAULT]
    if unset:
        section.info(
            "transport defaults",
            "not set: " + "; ".join(f"{one.name}: {one.without_it}" for one in unset),
            "export " + " ".join(f"{one.name}={one.value}" for one in unset),
        )
