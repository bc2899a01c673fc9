"""examples/monitoring: a dashboard and rules over metrics that exist, checked by Prometheus' own tool."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from spectrumkv_sglang.observability.metric_specs import METRICS, PROCESS_LABELS, STAGE_SECONDS, Kind
from spectrumkv_sglang.observability.metrics import TransferMetrics
from spectrumkv_sglang.observability.reasons import FailureCause, ProbeState, Reason

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "examples" / "monitoring"
ALERTS = MONITORING / "alerts.yaml"
# What a query may name of SGLang's.
SGLANG_METRICS = {"sglang:time_to_first_token_seconds_bucket"}
SERIES = {
    spec.full_name + suffix: {*PROCESS_LABELS, *spec.labels, *({"le"} if suffix == "_bucket" else ())}
    for spec in METRICS
    for suffix in (("_bucket", "_sum", "_count") if spec.kind is Kind.HISTOGRAM else ("",))
}


@pytest.fixture(scope="module")
def by_hand() -> Iterator[ModuleType]:
    """The example's program, which knows the dashboard's queries."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(MONITORING)
        yield importlib.import_module("against_a_pair")


@pytest.fixture(scope="module")
def queries(by_hand: ModuleType) -> list[str]:
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return [query for _, query in by_hand.dashboard_queries()] + [
        rule["expr"] for group in groups for rule in group["rules"]
    ]


@pytest.fixture
def promtool(program: Callable[[str], str]) -> Callable[..., str]:
    def run(*arguments: object) -> str:
        done = subprocess.run(
            [program("promtool"), *map(str, arguments)], capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run


def test_every_query_names_series_that_exist(queries: list[str]) -> None:
    assert len(queries) > 30
    for query in queries:
        names = set(re.findall(r"(?:spectrumkv|sglang):[a-z_]+", query))
        assert names, query
        assert names <= SERIES.keys() | SGLANG_METRICS, query


def test_every_query_names_labels_that_its_series_have(queries: list[str]) -> None:
    for query in queries:
        for name, selector in re.findall(r"(spectrumkv:[a-z_]+)\{([^}]*)\}", query):
            assert set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector)) <= SERIES[name], query
        grouped = {label.strip() for labels in re.findall(r"by \(([^)]*)\)", query) for label in labels.split(",")}
        used = re.findall(r"(spectrumkv:[a-z_]+)", query)
        if used:
            assert grouped <= set.union(*(SERIES[name] for name in used)), query


def test_every_value_in_a_query_is_one_that_occurs(queries: list[str]) -> None:
    known = {
        "reason": {reason.value for reason in Reason},
        "state": {state.value for state in ProbeState} | {"quarantined", "free", "in_use"},
        "cause": {cause.value for cause in FailureCause},
    }
    for query in queries:
        for label, values in re.findall(r'(reason|state|cause)\s*(?:=~|!~|!=|=)\s*"([^"]*)"', query):
            assert set(values.split("|")) <= known[label], query


def test_the_dashboard_is_whole(by_hand: ModuleType) -> None:
    dashboard = json.loads(by_hand.DASHBOARD.read_text())
    panels = dashboard["panels"]
    ids = [panel["id"] for panel in panels]
    assert len(ids) == len(set(ids)) > 10
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        assert panel["targets"], panel["title"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells)), "panels overlap"
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    assert {"datasource", "model"} == variables


def test_every_metric_is_on_the_dashboard_or_in_an_alert(queries: list[str]) -> None:
    """What an operator cannot see was not worth counting; these few are for a closer look."""
    for_a_closer_look = {"subchunks_total", "mooncake_writes_total", "transfer_log_errors_total",
                         "controller_switches_total", "controller_violations_total",
                         "controller_refused_samples_total"}  # fmt: skip
    shown = " ".join(queries)
    missing = {spec.name for spec in METRICS if not re.search(rf"{spec.full_name}(_\w+)?\b", shown)}
    assert missing == for_a_closer_look


def test_prometheus_takes_the_rules_and_the_configuration(promtool: Callable[..., str]) -> None:
    assert "SUCCESS" in promtool("check", "rules", ALERTS)
    assert "SUCCESS" in promtool("check", "config", MONITORING / "prometheus.yaml")


def test_the_alerts_fire_when_they_should(promtool: Callable[..., str]) -> None:
    assert "SUCCESS" in promtool("test", "rules", MONITORING / "alerts_test.yaml")


def test_prometheus_parses_every_query_of_the_dashboard(
    by_hand: ModuleType, promtool: Callable[..., str], tmp_path: Path
) -> None:
    rules = [{"record": f"query:{i}", "expr": query} for i, (_, query) in enumerate(by_hand.dashboard_queries())]
    rules = [{**rule, "record": f"dashboard:query_{i}"} for i, rule in enumerate(rules)]
    path = tmp_path / "queries.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    assert f"{len(rules)} rules found" in promtool("check", "rules", path)


def test_names_are_the_documented_ones_however_prometheus_asks() -> None:
    """prometheus-client writes underscores for colons in OpenMetrics: the relabelling takes that back."""
    registry = CollectorRegistry()
    metrics = TransferMetrics("prefill", 0, registry=registry)
    metrics.pack(0.1)
    metrics.probe_state(ProbeState.VERIFIED)
    (job,) = yaml.safe_load((MONITORING / "prometheus.yaml").read_text())["scrape_configs"]
    (relabel,) = job["metric_relabel_configs"]
    for asked in ("text/plain", "application/openmetrics-text;version=1.0.0"):
        encode, _ = choose_encoder(asked)
        lines = encode(registry).decode().splitlines()
        names = {re.split(r"[ {]", line)[0] for line in lines if line and not line.startswith("#")}
        names = {name for name in names if not name.endswith("_created")}
        replacement = re.sub(r"\$(\d)", r"\\\1", relabel["replacement"])
        renamed = {re.sub(rf"^(?:{relabel['regex']})$", replacement, name) for name in names}
        assert "spectrumkv:probe_state" in renamed
        assert renamed <= SERIES.keys()


def test_the_compose_file_mounts_what_is_there() -> None:
    services = yaml.safe_load((MONITORING / "docker-compose.yaml").read_text())["services"]
    mounts = [volume.split(":")[0] for service in services.values() for volume in service["volumes"]]
    local = [MONITORING / mount for mount in mounts if mount.startswith("./")]
    assert len(local) == 4
    assert all(path.exists() for path in local)
    provider = yaml.safe_load((MONITORING / "grafana/provisioning/dashboards/spectrumkv.yaml").read_text())
    assert f"./grafana/dashboards:{provider['providers'][0]['options']['path']}:ro" in services["grafana"]["volumes"]


def test_buckets_hold_what_was_measured() -> None:
    """Seconds of the pairs in docs/results: every median lies between two bounds, neither in the first nor the last."""
    document = json.loads((ROOT / "docs" / "results" / "gpu.json").read_text())
    seconds = [
        sample[field] / (sample["writes"] if field != "transfer_seconds" else 1)
        for run in document["transfer"]
        for sample in run["samples"]
        for field in ("transfer_seconds", "pack_seconds", "write_seconds")
        if sample.get(field) and sample.get("writes")
    ]
    assert len(seconds) > 100
    assert STAGE_SECONDS[0] < min(seconds)
    assert max(seconds) < STAGE_SECONDS[-1]


# ---- its picture -------------------------------------------------------------------------------------------------


def answers(path: str, **parameters: str) -> dict[str, Any]:
    """As Prometheus' HTTP API: one series that rises, with every label that a panel's legend may name."""
    labels = {"engine_type": "prefill", "state": "verified", "path": "tiered", "reason": "tiered", "tier": "mid",
              "cause": "none", "candidate": "balanced", "stat": "min"}  # fmt: skip
    if path == "query":
        return {"result": [{"metric": labels, "value": [float(parameters["time"]), "0.7"]}]}
    start, end, step = (float(parameters[name]) for name in ("start", "end", "step"))
    times = [start + index * step for index in range(round((end - start) / step) + 1)]
    return {"result": [{"metric": labels, "values": [[moment, str(moment - start)] for moment in times]}]}


def test_every_panel_of_the_dashboard_is_drawn(by_hand: ModuleType, tmp_path: Path) -> None:
    dashboard = json.loads(by_hand.DASHBOARD.read_text())
    asked: list[str] = []

    def ask(path: str, **parameters: str) -> dict[str, Any]:
        asked.append(parameters["query"])
        return answers(path, **parameters)

    out = tmp_path / "dashboard.png"
    filled = by_hand.Drawing(ask, now=1e9, seconds=600, window="2m").draw(dashboard, out)
    assert filled == len(dashboard["panels"])
    assert sorted(asked) == sorted(query for _, query in by_hand.dashboard_queries())
    assert out.read_bytes().startswith(b"\x89PNG")


def test_panels_without_data_say_so_and_unknown_ones_are_refused(by_hand: ModuleType, tmp_path: Path) -> None:
    dashboard = json.loads(by_hand.DASHBOARD.read_text())
    drawing = by_hand.Drawing(lambda path, **parameters: {"result": []}, now=1e9, seconds=600, window="2m")
    assert drawing.draw(dashboard, tmp_path / "empty.png") == 0
    dashboard["panels"][0]["type"] = "gauge"
    with pytest.raises(ValueError, match="is a 'gauge'"):
        drawing.draw(dashboard, tmp_path / "unknown.png")
