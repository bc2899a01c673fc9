"""The replay's arithmetic, its traces, and the controller beside every fixed choice."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_link import AGGRESSIVE, BALANCED, CANDIDATES, GBPS, NEAR, SPEEDS
from typer.testing import CliRunner

from spectrumkv_sglang.cli import app
from spectrumkv_sglang.simulation.replay import Cluster, CodecSpeed, Outcome, ReplayResult, outcomes_of
from spectrumkv_sglang.simulation.replay import replay as play_requests
from spectrumkv_sglang.simulation.traces import (
    BandwidthTrace,
    Request,
    TraceError,
    poisson_requests,
    read_bandwidth,
    read_requests,
)
from spectrumkv_sglang.tuning.frontier import NATIVE, Candidate
from spectrumkv_sglang.tuning.link_model import Codec, FixedCost, Transfer, pipelined_seconds
from spectrumkv_sglang.tuning.settings import ControllerSettings

CLUSTER = Cluster(
    prefill_ranks=1,
    prefill_tokens_per_second=10_000.0,
    decode_seconds_per_token=0.01,
    kv_bytes_per_token=100_000.0,
    codecs={name: CodecSpeed.even(speed) for name, speed in SPEEDS.items()},
    payload_bytes=math.inf,
)
CHANGING = BandwidthTrace([(0.0, GBPS), (300.0, 0.1 * GBPS), (900.0, 80 * GBPS), (1200.0, GBPS)])


def play(
    link: BandwidthTrace,
    fixed: Candidate | None = None,
    cluster: Cluster = CLUSTER,
    count: int = 600,
    **settings: object,
) -> ReplayResult:
    requests = poisson_requests(count, per_second=0.4, prompt_tokens=500, output_tokens=20, spread=0.3, seed=5)
    return play_requests(requests, link, cluster, CANDIDATES, NEAR, ControllerSettings(**settings), fixed=fixed)  # type: ignore[arg-type]


def test_one_request_by_hand() -> None:
    result = play_requests(
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


def one(cluster: Cluster, fixed: Candidate, tokens: int = 1000, rate: float = GBPS) -> Outcome:
    request, link = Request(0.0, tokens, 1), BandwidthTrace([(0.0, rate)])
    (outcome,) = outcomes_of([request], link, cluster, CANDIDATES, NEAR, ControllerSettings(), fixed=fixed)
    return outcome


def test_payloads_of_a_chunk_overlap_as_the_link_model_says() -> None:
    cluster = replace(CLUSTER, payload_bytes=5e6, fixed=FixedCost(0.003, 0.001))
    speed = SPEEDS[BALANCED.name]
    expected = pipelined_seconds(Transfer(1e8, 1, 6), GBPS, Codec(0.3, 2 * speed, 2 * speed), FixedCost(0.003, 0.001))
    assert one(cluster, BALANCED).sending_s == pytest.approx(expected)
    assert one(replace(CLUSTER, native_chunk_seconds=0.25), NATIVE).sending_s == pytest.approx(1e8 / GBPS + 0.25)


def test_a_chunk_is_sent_while_the_next_one_is_computed() -> None:
    """Ten chunks, each of .01 s of prefill and .08 s of link: all but the first wait for the link alone."""
    chunked = replace(CLUSTER, chunk_tokens=100)
    assert one(chunked, NATIVE).ttft_s == pytest.approx(0.01 + 10 * 1e7 / GBPS)
    assert one(chunked, NATIVE, rate=100 * GBPS).ttft_s == pytest.approx(0.1 + 1e7 / GBPS / 100)
    assert one(CLUSTER, NATIVE).ttft_s == pytest.approx(0.1 + 1e8 / GBPS)
    # .09 s of transfer at half speed before the end of prefill, the rest after it.
    halved = replace(chunked, overlap=0.5)
    assert one(halved, NATIVE).ttft_s == pytest.approx(0.1 + 10 * 1e7 / GBPS - 0.045)


def test_a_last_chunk_may_be_shorter() -> None:
    chunked = replace(CLUSTER, chunk_tokens=400)
    outcome = one(chunked, NATIVE, tokens=1000)
    assert outcome.sending_s == pytest.approx(1e8 / GBPS)
    assert outcome.wire_bytes == pytest.approx(1e8)


def test_requests_wait_for_the_rank_and_its_link() -> None:
    together = [Request(0.0, 1000, 1)] * 3
    link, settings = BandwidthTrace([(0.0, 1e8)]), ControllerSettings()
    one = play_requests(together, link, CLUSTER, CANDIDATES, NEAR, settings, fixed=NATIVE)
    assert one.ttft_s["p99"] == pytest.approx(3.1, rel=0.01)
    many = play_requests(
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
    best = min(play(link, fixed, count=1200).transfer_s["mean"] for fixed in (NATIVE, *CANDIDATES))
    assert play(link, count=1200).transfer_s["mean"] <= 1.05 * best  # two transfers of it to know a codec


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


RATE = st.floats(1e4, 1e11)
FRONTIER = st.lists(st.tuples(st.floats(0.05, 1.0), st.floats(0, 1), st.floats(1e6, 1e12)), min_size=1, max_size=6)


@settings(max_examples=100, deadline=None)
@given(
    frontier=FRONTIER,
    steps=st.lists(st.tuples(st.floats(0.01, 50), RATE), min_size=1, max_size=8),
    waits=st.lists(st.tuples(st.floats(0, 20), st.integers(1, 20_000)), min_size=1, max_size=30),
    max_kl=st.floats(0, 1),
    target=st.none() | st.floats(1e-3, 20),
    explore=st.floats(0, 0.5),
)
def test_over_random_frontiers_and_traces_no_request_loses_more_than_is_allowed(
    frontier: list[tuple[float, float, float]],
    steps: list[tuple[float, float]],
    waits: list[tuple[float, int]],
    max_kl: float,
    target: float | None,
    explore: float,
) -> None:
    candidates = [Candidate(f"c{i}", b, kl) for i, (b, kl, _) in enumerate(frontier)]
    cluster = replace(
        CLUSTER,
        codecs={f"c{i}": CodecSpeed.even(speed) for i, (_, _, speed) in enumerate(frontier)},
        chunk_tokens=4000,
        payload_bytes=16e6,
    )
    moments = list(itertools.accumulate(after for after, _ in steps))
    link = BandwidthTrace([(at, rate) for at, (_, rate) in zip(moments, steps, strict=True)])
    arrivals = itertools.accumulate(wait for wait, _ in waits)
    requests = [Request(at, tokens, 1) for at, (_, tokens) in zip(arrivals, waits, strict=True)]
    asked = ControllerSettings(max_kl=max_kl, ttft_target_s=target, explore=explore)
    outcomes = outcomes_of(requests, link, cluster, candidates, candidates[0], asked)
    assert all(outcome.candidate.kl <= max_kl for outcome in outcomes)
    assert len(outcomes) == len(requests)


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
