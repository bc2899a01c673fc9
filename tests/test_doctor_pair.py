"""`spectrumkv doctor --prefill-url --decode-url`: what it says of pairs, read from metrics that our own code wrote.

A real pair is examined in tests/pair/test_paths.py; here are the states that a healthy pair is not in.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from typer.testing import CliRunner

from spectrumkv_sglang.cli import app
from spectrumkv_sglang.doctor import Severity, examine_pair
from spectrumkv_sglang.doctor.findings import Finding, Report
from spectrumkv_sglang.observability.metrics import TransferMetrics
from spectrumkv_sglang.observability.reasons import FailureCause, Path, ProbeState, Reason, Rejection
from spectrumkv_sglang.observability.transfer_log import ChunkRecord, TokensByTier
from spectrumkv_sglang.transport_tuning import TCP_TUNING, in_effect

INFO = {"version": "0.5.20", "model_path": "/models/m", "dtype": "bfloat16", "kv_cache_dtype": "auto", "tp_size": 2,
        "page_size": 1}  # fmt: skip
TUNED = {variable.name: variable.value for variable in TCP_TUNING}


class Side:
    """One server of a pair: its metrics, and what /server_info would say."""

    def __init__(self, role: Any, **config: Any) -> None:
        self.registry = CollectorRegistry()
        self.metrics = TransferMetrics(role, 0, model_name="m", registry=self.registry)
        settings = {"version": "0.1.0", "profile": "balanced", "budget": 0.3, "allowed_tiers": ["high", "mid", "low"]}
        self.metrics.config(**{**settings, **config}, scorer="window")
        self.metrics.probe_state(ProbeState.VERIFIED)
        self.metrics.transport("tcp", in_effect(TUNED))
        self.info: dict[str, Any] = dict(INFO)

    def pages(self) -> dict[str, bytes]:
        return {"/metrics": generate_latest(self.registry), "/server_info": json.dumps(self.info).encode()}

    def chunk(self, reason: Reason, wire_share: float = 1.0) -> None:
        tiers = TokensByTier(4, 28, 68) if reason.path is Path.TIERED else TokensByTier()
        self.metrics.chunk(
            ChunkRecord(
                time=1.0, room=1, path=reason.path, reason=reason, profile="balanced", tokens=100, native_bytes=10**6,
                wire_bytes=int(10**6 * wire_share), achieved_b=wire_share, tokens_by_tier=tiers,
            )
        )  # fmt: skip


@pytest.fixture
def pair() -> tuple[Side, Side]:
    return Side("prefill"), Side("decode")


@pytest.fixture
def examined(serve: Callable[..., str]) -> Callable[[Side, Side], Report]:
    return lambda prefill, decode: examine_pair(serve(prefill.pages()), serve(decode.pages()))


def findings(report: Report, name: str) -> list[Finding]:
    return [finding for finding in report.findings if finding.name == name]


def test_a_healthy_pair_has_nothing_to_remedy(pair: tuple[Side, Side], examined: Callable[..., Report]) -> None:
    prefill, decode = pair
    prefill.chunk(Reason.TIERED, 0.3)
    prefill.metrics.pack(0.002)
    decode.metrics.landing_slots(free=16, in_use=0, quarantined=0)
    report = examined(prefill, decode)
    assert {finding.severity for finding in report.findings} == {Severity.OK}
    assert report.exit_code == 0
    assert "70.0% stayed off the wire" in findings(report, "bytes")[0].detail
    assert "MC_TCP_SLICE_SIZE=1048576" in findings(report, "transport")[0].detail
    assert "high 4.0%, low 68.0%, mid 28.0%" in findings(report, "tokens")[0].detail
    assert findings(report, "times")[0].detail == "pack 2.0 ms"


def test_native_chunks_are_explained(pair: tuple[Side, Side], examined: Callable[..., Report]) -> None:
    prefill, decode = pair
    prefill.chunk(Reason.OPEN_TIMEOUT)
    report = examined(prefill, decode)
    (native,) = findings(report, "native")
    assert native.severity is Severity.WARNING
    assert "open_timeout: decode did not answer OPEN" in native.detail
    assert findings(report, "bytes")[0].severity is Severity.WARNING


def test_sides_that_differ(pair: tuple[Side, Side], examined: Callable[..., Report]) -> None:
    prefill, _ = pair
    decode = Side("decode", version="0.2.0", allowed_tiers=["high", "mid"])
    decode.info["dtype"] = "float16"
    decode.metrics.probe_state(ProbeState.MISSING)
    report = examined(prefill, decode)
    assert "prefill 0.1.0, decode 0.2.0" in findings(report, "SpectrumKV")[0].detail
    assert "only what both allow is used" in findings(report, "tiers")[0].detail
    assert "dtype: prefill 'bfloat16', decode 'float16'" in findings(report, "SGLang")[0].detail
    assert "spectrumkv probe" in findings(report, "probe")[1].remedy
    assert report.warnings == 4


def test_it_says_on_which_side_there_is_a_control_secret(
    pair: tuple[Side, Side], examined: Callable[..., Report]
) -> None:
    assert [one.detail.split(":")[0] for one in findings(examined(*pair), "control secret")] == ["off", "off"]
    report = examined(Side("prefill", control_secret=True), pair[1])
    told = findings(report, "control secret")
    assert [one.detail.split(":")[0] for one in told] == ["on", "off", "prefill on, decode off"]
    assert told[2].severity is Severity.PROBLEM
    assert "secret_mismatch" in told[2].detail


def test_what_went_wrong_is_listed(pair: tuple[Side, Side], examined: Callable[..., Report]) -> None:
    prefill, decode = pair
    prefill.chunk(Reason.TIERED, 0.51)
    prefill.metrics.budget_unreachable()
    prefill.metrics.failure(FailureCause.WRITE_FAILED)
    decode.metrics.landing_slots(free=14, in_use=0, quarantined=2)
    decode.metrics.control_message_rejected(Rejection.GARBAGE)
    report = examined(prefill, decode)
    warned = {finding.name for finding in report.findings if finding.severity is Severity.WARNING}
    assert warned == {"budget", "failures", "landing slots", "control channel"}
    assert "the peer died or the network broke" in findings(report, "failures")[0].detail


def test_unset_transport_variables_are_named(pair: tuple[Side, Side], examined: Callable[..., Report]) -> None:
    prefill, _ = pair
    decode = Side("decode")
    decode.registry = CollectorRegistry()
    decode.metrics = TransferMetrics("decode", 0, registry=decode.registry)
    decode.metrics.config(version="0.1.0", profile="balanced", budget=0.3, allowed_tiers=["high"], scorer="window")
    decode.metrics.transport("tcp", in_effect({"MC_TCP_LANES_PER_PEER": "4"}))
    report = examined(prefill, decode)
    assert findings(report, "transport")[1].detail == "TCP: MC_TCP_LANES_PER_PEER=4"
    assert "export MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER=65535" in findings(report, "transport defaults")[0].remedy


def test_a_side_that_is_switched_off(pair: tuple[Side, Side], examined: Callable[..., Report]) -> None:
    _, decode = pair
    prefill = Side("prefill", enabled=False)
    prefill.metrics.probe_state(ProbeState.NOT_NEEDED)
    prefill.chunk(Reason.DISABLED)
    decode = Side("decode", allowed_tiers=["high", "mid"], control_secret=True)
    report = examined(prefill, decode)
    off, on = findings(report, "backend")
    assert (off.severity, on.severity) == (Severity.WARNING, Severity.OK)
    assert "switched off (SPECTRUMKV_ENABLED or enabled: false): all KV travels natively" in off.detail
    for name in ("tiers", "tokens", "times"):
        assert findings(report, name) == []
    assert [one.section.split()[0] for one in findings(report, "probe")] == ["decode"]
    assert [one.section.split()[0] for one in findings(report, "control secret")] == ["decode"]
    assert "1 chunks, disabled" in findings(report, "native")[0].detail


def test_no_traffic_yet(pair: tuple[Side, Side], examined: Callable[..., Report]) -> None:
    assert "none sent yet" in findings(examined(*pair), "chunks")[0].detail


def test_problems_end_with_1(pair: tuple[Side, Side], serve: Callable[..., str]) -> None:
    prefill, decode = pair
    urls = serve(prefill.pages()), serve(decode.pages())
    swapped = examine_pair(urls[1], urls[0])
    assert [finding.name for finding in swapped.findings] == ["role", "role"]
    assert swapped.exit_code == 1
    gone = examine_pair("http://127.0.0.1:9", urls[1])
    assert "is the server running" in findings(gone, "metrics")[0].detail
    plain = examine_pair(serve({"/metrics": b'sglang:num_running_reqs{engine_type="prefill"} 0.0\n'}), urls[1])
    assert "runs SGLang's own backend" in findings(plain, "backend")[0].detail
    silent = examine_pair(serve({}), urls[1])
    assert "--enable-metrics" in findings(silent, "metrics")[0].detail


def test_the_command(pair: tuple[Side, Side], serve: Callable[..., str]) -> None:
    prefill, decode = pair
    command = ["doctor", "--prefill-url", serve(prefill.pages()), "--decode-url", serve(decode.pages())]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0
    assert done.output.startswith(f"Looking at the pair of {command[2]} and {command[4]}\n")
    assert "what is tiered" in done.output
    assert CliRunner().invoke(app, command[:3]).exit_code == 2
