"""Which path a chunk takes, how many writes it costs, and what a mixed fleet does."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest
from pair_cluster import METRICS, PairCluster
from sglang_plugins import REMOVE_EXTENSION_POINT, SHUFFLE_POOL, plugin_path

from spectrumkv_sglang.doctor.findings import Severity
from spectrumkv_sglang.doctor.pair import sections_of_servers
from spectrumkv_sglang.doctor.running_server import RunningServer
from spectrumkv_sglang.launch.client import get
from spectrumkv_sglang.launch.processes import ProcessError
from spectrumkv_sglang.launch.prompts import LONG_PROMPTS
from spectrumkv_sglang.launch.servers import SGLangServer
from spectrumkv_sglang.launch.transfer_log_reader import request_transfer
from spectrumkv_sglang.observability.live_metrics import parse_metrics

PROMPT = LONG_PROMPTS[0].text
LAYERS = 30
GO_ON = {"ignore_eos": True}


def test_spectrum_prefill_with_a_plain_decode(cluster: PairCluster) -> None:
    plain_decode = cluster.decode(backend="mooncake_tcp")
    prefill = cluster.prefill(profile="spectrum", budget=0.55, extra_args=METRICS)
    expected = cluster.generate_alone(cluster.plain(), PROMPT, sampling=GO_ON)
    cluster.wait_ready(prefill, plain_decode)
    cluster.transfers(prefill).skip()
    answer = cluster.generate(prefill, plain_decode, PROMPT, sampling=GO_ON)
    assert answer.output_ids == expected.output_ids
    records = cluster.transfers(prefill).next_request()
    assert {(record.path.value, record.reason.value) for record in records} == {("native", "peer_without_spectrumkv")}
    assert "peer_without_spectrumkv" in prefill.log_path.read_text()
    assert "SpectrumKV" not in plain_decode.log_path.read_text()
    cluster.stop(plain_decode)


def test_metrics_on_both_servers(cluster: PairCluster) -> None:
    prefill = cluster.prefill(profile="spectrum", budget=0.55, extra_args=METRICS)
    decode = cluster.decode(extra_args=METRICS)
    cluster.wait_ready(prefill, decode)
    cluster.transfers(prefill).skip()
    before = get(f"{prefill.url}/metrics", namespace=cluster.namespace).decode()  # other tests used it
    cluster.generate(prefill, decode, PROMPT, max_new_tokens=4)
    sent = request_transfer(cluster.transfers(prefill).next_request())
    on_prefill = get(f"{prefill.url}/metrics", namespace=cluster.namespace).decode()
    on_decode = get(f"{decode.url}/metrics", namespace=cluster.namespace).decode()

    def added(name: str, label: str = "") -> float:
        return _sum(on_prefill, name, label) - sum(_samples(before, name, label))

    assert added("spectrumkv:wire_bytes_total", 'path="tiered"') == sent.wire_bytes
    assert added("spectrumkv:native_bytes_total", 'path="tiered"') == sent.native_bytes
    for tier, tokens in sent.tokens_by_tier.items():
        assert added("spectrumkv:tokens_total", f'tier="{tier}"') == tokens
    assert added("spectrumkv:mooncake_writes_total") == sent.writes
    assert _sum(on_decode, "spectrumkv:unpack_seconds_count") == sent.writes
    assert _sum(on_decode, "spectrumkv:landing_slots", 'state="free"') == 16
    assert _sum(on_prefill, "spectrumkv:failures_total") == 0
    # SGLang's own metrics, of its HTTP process too, are still there.
    assert _sum(on_prefill, "sglang:e2e_request_latency_seconds_count") > 0
    assert _sum(on_decode, "sglang:time_to_first_token_seconds_count") > 0
    assert _sum(on_decode, "spectrumkv:failures_total") == 0
    _check_what_doctor_says(
        RunningServer(role, parse_metrics(server.url, text), _server_info(server, cluster))
        for role, server, text in (("prefill", prefill, on_prefill), ("decode", decode, on_decode))
    )
    cluster.stop(prefill)
    cluster.stop(decode)


def _server_info(server: SGLangServer, cluster: PairCluster) -> dict[str, Any]:
    return dict(json.loads(get(f"{server.url}/get_server_info", namespace=cluster.namespace)))


def _check_what_doctor_says(servers: Iterable[RunningServer]) -> None:
    """`spectrumkv doctor --prefill-url --decode-url` on a healthy pair that sent a tiered chunk over TCP."""
    findings = [finding for section in sections_of_servers(list(servers)) for finding in section.findings]
    details = {finding.name: finding.detail for finding in findings}
    assert not [finding for finding in findings if finding.severity is Severity.PROBLEM]
    assert details["SGLang"] == "model, dtype, page size, TP and version are equal"
    assert "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER=65535" in details["transport"]
    assert "stayed off the wire" in details["bytes"]
    assert details["landing slots"] == "16 free"


def test_writes_do_not_depend_on_pages_or_layers(
    cluster: PairCluster, tmp_path_factory: pytest.TempPathFactory, figures: list[str]
) -> None:
    """Page size 1 and a pool that hands out pages at random; SGLang's own path stands beside ours."""
    path = plugin_path(tmp_path_factory.mktemp("plugins"), "shuffle_pool", SHUFFLE_POOL)
    decode = cluster.decode(env={"PYTHONPATH": path})
    ours = cluster.prefill(profile="native-packed")
    # At its defaults Mooncake refuses so many blocks and fails the request; see docs/results/walking_product.md.
    native = cluster.prefill(env={"SPECTRUMKV_ENABLED": "false", "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535"})
    expected = cluster.generate_alone(cluster.plain(), PROMPT, sampling=GO_ON)
    counts = {}
    for name, prefill in (("ours", ours), ("native", native)):
        cluster.wait_ready(prefill, decode)
        cluster.transfers(prefill).skip()
        answer = cluster.generate(prefill, decode, PROMPT, sampling=GO_ON)
        assert answer.output_ids == expected.output_ids, name
        counts[name] = cluster.transfers(prefill).next_request()
    pages = expected.prompt_tokens
    for name, records in counts.items():
        writes, subchunks = (sum(getattr(r, field) for r in records) for field in ("writes", "subchunks"))
        figures.append(f"{pages} pages of 1 token, shuffled: {name}: {writes} Mooncake blocks, {subchunks} sub-chunks")
    assert all(record.writes == record.subchunks for record in counts["ours"])
    assert sum(record.writes for record in counts["ours"]) <= 5
    assert [record.reason.value for record in counts["native"]] == ["disabled"] * len(counts["native"])
    # Nearly every page is a run of its own, in each of 30 layers and for K and V.
    assert sum(record.writes for record in counts["native"]) > 0.9 * pages * LAYERS * 2
    cluster.stop(native)
    cluster.stop(ours)
    cluster.stop(decode)


def test_plain_prefill_with_a_spectrum_decode(cluster: PairCluster) -> None:
    plain_prefill = cluster.prefill(backend="mooncake_tcp")
    expected = cluster.generate_alone(cluster.plain(), PROMPT, sampling=GO_ON)
    answer = cluster.generate(plain_prefill, cluster.decode(), PROMPT, sampling=GO_ON)
    assert answer.output_ids == expected.output_ids
    assert "SpectrumKV" not in plain_prefill.log_path.read_text()
    cluster.stop(plain_prefill)


def test_a_missing_extension_point_stops_the_server_before_it_serves(
    cluster: PairCluster, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = plugin_path(tmp_path_factory.mktemp("plugins"), "a_remove_extension_point", REMOVE_EXTENSION_POINT)
    prefill = cluster.prefill(env={"PYTHONPATH": path})
    with pytest.raises(ProcessError):
        cluster.wait_ready(prefill)
    log = prefill.log_path.read_text()
    assert "MooncakeKVManager.send_kvcache_slice: not found" in log
    assert "ready to roll" not in log
    cluster.stop(prefill)


def _sum(metrics: str, name: str, label: str = "") -> float:
    """Sum of the samples called ``name`` that carry ``label``."""
    samples = _samples(metrics, name, label)
    assert samples, f"{name} {label} is not on /metrics"
    return sum(samples)


def _samples(metrics: str, name: str, label: str) -> list[float]:
    lines = [line for line in metrics.splitlines() if line.startswith(name + "{") and label in line]
    return [float(line.rsplit(" ", 1)[1]) for line in lines]
