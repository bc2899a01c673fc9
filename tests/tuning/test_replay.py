"""The replay's arithmetic, its traces, and the controller beside every fixed choice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from simulated_link import AGGRESSIVE, BALANCED, CANDIDATES, GBPS, NEAR, SPEEDS
from typer.testing import CliRunner

from spectrumkv_sglang.cli import app
from spectrumkv_sglang.simulation.replay import Cluster, ReplayResult, replay
from spectrumkv_sglang.simulation.traces import (
    BandwidthTrace,
    Request,
    TraceError,
    poisson_requests,
    read_bandwidth,
    read_requests,
)
from spectrumkv_sglang.tuning.frontier import NATIVE, Candidate
from spectrumkv_sglang.tuning.settings import ControllerSettings

CLUSTER = Cluster(
    prefill_ranks=1,
    prefill_tokens_per_second=10_000.0,
    decode_seconds_per_token=0.01,
    kv_bytes_per_token=100_000.0,
    codec_speeds=SPEEDS,
)
CHANGING = BandwidthTrace([(0.0, GBPS), (300.0, 0.1 * GBPS), (900.0, 80 * GBPS), (1200.0, GBPS)])


def play(
    link: BandwidthTrace, fixed: Candidate | None = None, cluster: Cluster = CLUSTER, **settings: object
) -> ReplayResult:
    requests = poisson_requests(600, per_second=0.4, prompt_tokens=500, output_tokens=20, spread=0.3, seed=5)
    return replay(requests, link, cluster, CANDIDATES, NEAR, ControllerSettings(**settings), fixed=fixed)  # type: ignore[arg-type]


def test_one_request_by_hand() -> None:
    result = replay(
        [Request(3.0, 1000, 50)],
        BandwidthTrace([(0.0, GBPS)]),
        CLUSTER,
        CANDIDATES,
        NEAR,
        ControllerSettings(ttft_target_s=0.5),
        fixed=BALANCED,
    )
    transfer = 1e8 / SPEEDS[BALANCED.name] + 0.3 * 1e8 / GBPS
    assert result.transfer_s["p50"] == pytest.approx(transfer)
    assert result.ttft_s["p50"] == pytest.approx(0.1 + transfer)
    assert result.jct_s["p50"] == pytest.approx(0.1 + transfer + 0.5)
    assert (result.wire_bytes, result.wire_share, result.mean_kl) == (pytest.approx(3e7), pytest.approx(0.3), 0.005)
    assert result.late == (0.1 + transfer > 0.5)


def test_requests_wait_for_the_rank_and_its_link() -> None:
    together = [Request(0.0, 1000, 1)] * 3
    link, settings = BandwidthTrace([(0.0, 1e8)]), ControllerSettings()
    one = replay(together, link, CLUSTER, CANDIDATES, NEAR, settings, fixed=NATIVE)
    assert one.ttft_s["p99"] == pytest.approx(3.1, rel=0.01)
    many = replay(
        together, link, Cluster(**{**vars(CLUSTER), "prefill_ranks": 3}), CANDIDATES, NEAR, settings, fixed=NATIVE
    )
    assert many.ttft_s["p99"] == pytest.approx(1.1)


def test_a_transfer_over_a_change_of_rate() -> None:
    link = BandwidthTrace([(0.0, 100.0), (10.0, 10.0), (20.0, 1000.0)])
    assert link.seconds(100.0, 0.0) == pytest.approx(1.0)
    assert link.seconds(250.0, 8.0) == pytest.approx(2.0 + 5.0)
    assert link.seconds(1300.0, 8.0) == pytest.approx(2.0 + 10.0 + 1.0)
    assert link.seconds(1000.0, 50.0) == pytest.approx(1.0)
    assert link.seconds(100.0, -5.0) == pytest.approx(1.0)


@pytest.mark.parametrize("rate", [0.2, 1.0, 3.0, 80.0])
def test_on_a_constant_link_it_is_as_good_as_the_best_fixed_choice(rate: float) -> None:
    link = BandwidthTrace([(0.0, rate * GBPS)])
    best = min(play(link, fixed).transfer_s["mean"] for fixed in (NATIVE, *CANDIDATES))
    assert play(link).transfer_s["mean"] <= 1.05 * best


def test_on_a_changing_link_it_beats_every_fixed_choice() -> None:
    controlled = play(CHANGING)
    for fixed in (NATIVE, *CANDIDATES):
        assert controlled.transfer_s["mean"] < play(CHANGING, fixed).transfer_s["mean"], fixed.name
    assert controlled.switches <= 20
    assert {NATIVE.name, AGGRESSIVE.name} <= set(controlled.chosen)


def test_no_request_loses_more_than_is_allowed() -> None:
    limited = play(CHANGING, max_kl=0.001)
    assert set(limited.chosen) <= {NATIVE.name, NEAR.name, "native-packed@1"}
    assert limited.mean_kl <= 0.001


def test_the_same_seed_gives_the_same_replay() -> None:
    assert play(CHANGING, seed=3) == play(CHANGING, seed=3)


# ---- files -------------------------------------------------------------------------------------------------------


def test_traces_from_files(tmp_path: Path) -> None:
    (tmp_path / "r.csv").write_text("arrival_s,prompt_tokens,output_tokens\n2.5,100,3\n1,200,4\n")
    assert read_requests(tmp_path / "r.csv") == [Request(1.0, 200, 4), Request(2.5, 100, 3)]
    (tmp_path / "b.csv").write_text("from_s,gbps\n0,1\n10,0.1\n")
    assert read_bandwidth(tmp_path / "b.csv").seconds(2 * GBPS, 9.0) == pytest.approx(11.0)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "no lines"),
        ("from_s,gbps\n", "no lines"),
        ("from_s,rate\n0,1\n", "no column 'gbps'"),
        ("from_s,gbps\n0,1\n1,fast\n", "line 3"),
        ("from_s,gbps\n0,0\n", "line 2"),
        ("from_s,gbps\n0,-1\n", "line 2"),
        ("from_s,gbps\n0\n", "line 2"),
        ("from_s,gbps\n5,1\n5,2\n", "grow"),
        ("from_s,gbps\nnan,1\n", "grow"),
    ],
)
def test_a_bandwidth_file_is_refused_by_line(tmp_path: Path, text: str, part: str) -> None:
    path = tmp_path / "b.csv"
    path.write_text(text)
    with pytest.raises(TraceError, match=part) as caught:
        read_bandwidth(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("row", ["-1,10,1", "0,0,1", "0,10,0", "inf,1,1", "0,1.5,1", "x,1,1"])
def test_a_request_file_is_refused_by_line(tmp_path: Path, row: str) -> None:
    path = tmp_path / "r.csv"
    path.write_text(f"arrival_s,prompt_tokens,output_tokens\n{row}\n")
    with pytest.raises(TraceError, match="line 2"):
        read_requests(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot read"):
        read_requests(tmp_path / "absent.csv")


# ---- the command -------------------------------------------------------------------------------------------------


def test_the_command_prints_a_table_and_writes_json(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    arguments = ["simulate", "--gbps", "1", "--count", "50", "--prompt-tokens", "500", "--json", str(out)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    report = json.loads(out.read_text())
    assert [item["policy"] for item in report["results"][:2]] == ["controller", "native"]
    assert (report["link"], report["seed"], report["results"][0]["requests"]) == ("1 Gb/s", 0, 50)
    for policy in ("controller", "native", "balanced@0.3"):
        assert policy in result.output
