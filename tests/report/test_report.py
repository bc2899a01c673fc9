"""`spectrumkv report`: every kind of input on one page that a browser opens without any other resource."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import imread
from prometheus_client import CollectorRegistry, generate_latest
from typer.testing import CliRunner

from spectrumkv_sglang.cli import app
from spectrumkv_sglang.errors import SpectrumKVError
from spectrumkv_sglang.observability.live_metrics import LiveServerError, fetch_metrics
from spectrumkv_sglang.observability.metrics import TransferMetrics
from spectrumkv_sglang.observability.reasons import DecisionReason, ProbeState, Reason, Wait
from spectrumkv_sglang.observability.reasons import Path as TransferPath
from spectrumkv_sglang.observability.transfer_log import ChunkRecord, TokensByTier
from spectrumkv_sglang.probe.needle_runs import NeedleAnswer, NeedleResult
from spectrumkv_sglang.probe.result import Control, Memory, Needles, ProbeResult, Seconds, encode_result
from spectrumkv_sglang.report.content import Picture, Section
from spectrumkv_sglang.report.errors import ReportError
from spectrumkv_sglang.report.inputs import sections_of
from spectrumkv_sglang.report.page import render
from spectrumkv_sglang.report.sections.live import live_sections

RESULTS = Path(__file__).parents[2] / "docs" / "results"
INJECTED = "<script>alert(1)</script>"


def chunk(room: int, tokens: TokensByTier, *, last: bool = True, path: str = "tiered") -> ChunkRecord:
    count = tokens.high + tokens.mid + tokens.low or 100
    return ChunkRecord(
        time=1.0, room=room, path=TransferPath(path), reason=Reason.TIERED if path == "tiered" else Reason.OPEN_TIMEOUT,
        profile="balanced", tokens=count, native_bytes=1000 * count, wire_bytes=300 * count, achieved_b=0.3,
        tokens_by_tier=tokens, writes=1, subchunks=1, transfer_seconds=0.02, pack_seconds=0.005, write_seconds=0.01,
        wait_seconds=0.001, last_chunk=last, candidate="balanced@0.3", decision=DecisionReason.ENVELOPE,
    )  # fmt: skip


@pytest.fixture
def log(tmp_path: Path) -> Path:
    records = [
        chunk(1, TokensByTier(4, 28, 96), last=False),
        chunk(1, TokensByTier(0, 16, 48)),
        chunk(2, TokensByTier(), path="native"),
    ]
    path = tmp_path / "transfer.jsonl"
    path.write_bytes(b"\n".join(map(msgspec.json.encode, records)) + b"\n")
    return path


@pytest.fixture
def prefill_metrics() -> bytes:
    registry = CollectorRegistry()
    metrics = TransferMetrics("prefill", 0, model_name=INJECTED, registry=registry)
    metrics.config(version="0.1.0", profile=INJECTED, budget=0.3, allowed_tiers=["high", "mid"], scorer="window")
    metrics.probe_state(ProbeState.MISSING)
    metrics.chunk(chunk(1, TokensByTier(4, 28, 96)))
    metrics.pack(0.01)
    metrics.write(0.02)
    metrics.wait(Wait.OPEN, 0.001)
    metrics.decision("balanced@0.3", DecisionReason.ENVELOPE)
    return generate_latest(registry)


class Shown(HTMLParser):
    """Counts what is on a page, and collects what it would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: dict[str, int] = {}
        self.fetched: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "data", "srcset") and not (value or "").startswith("#"):
                self.fetched.append(f"{tag} {name}={value}")


def shorter_results(folder: Path) -> list[Path]:
    """The results of docs/results with one run of a kind."""
    written = []
    for name, kinds in (("quality.json", ["evaluations"]), ("gpu.json", ["transfer", "serving"])):
        document = json.loads((RESULTS / name).read_text())
        for kind in kinds:
            document[kind] = document[kind][-1:]
        path = folder / name
        path.write_text(json.dumps(document))
        written.append(path)
    return written


def test_everything_on_one_page_in_a_real_browser(
    log: Path, prefill_metrics: bytes, serve: Callable[..., str], chromium: Callable[..., str], tmp_path: Path
) -> None:
    page, picture = tmp_path / "report.html", tmp_path / "shot.png"
    simulated = tmp_path / "simulated.json"
    runner = CliRunner()
    assert runner.invoke(app, ["simulate", "--count", "20", "--json", str(simulated)]).exit_code == 0
    inputs = [*map(str, (*shorter_results(tmp_path), log, simulated))]
    command = [
        "report",
        *inputs,
        "--url",
        serve({"/metrics": prefill_metrics}),
        "--out",
        str(page),
        "--title",
        INJECTED,
    ]
    done = runner.invoke(app, command)
    assert done.exit_code == 0, done.output

    written = Shown(page.read_text())
    assert written.fetched == []
    assert not written.tags.keys() & {"script", "img", "link", "iframe", "object"}
    assert "@import" not in page.read_text()
    seen = Shown(chromium(page, "--dump-dom"))
    for tag in ("section", "table", "svg", "tr"):
        assert seen.tags[tag] == written.tags[tag] > 3, tag
    assert "script" not in seen.tags
    chromium(page, f"--screenshot={picture}", "--window-size=1000,1200")
    pixels = imread(picture)
    assert pixels.shape[:2] == (1200, 1000)
    assert 0.01 < (pixels[..., :3].mean(axis=2) < 0.5).mean() < 0.5  # dark text on a light page


def test_a_legend_of_many_methods_is_inside_its_picture_and_no_two_look_alike() -> None:
    """The largest evaluation of docs/results, as drawn."""
    sections = sections_of(RESULTS / "quality.json")
    picture = max((one for section in sections for one in section.shown if isinstance(one, Picture)), key=legend_size)
    figure = drawn(picture)
    [axes] = figure.axes
    box = axes.get_legend().get_window_extent()
    assert len(axes.get_legend().get_texts()) > 25
    assert 0 <= box.y0 < box.y1 <= figure.bbox.height
    assert box.x1 <= figure.bbox.width
    looks = [
        (one.get_paths()[0].vertices.tobytes(), one.get_facecolor().tobytes())
        for one in axes.collections
        if len(one.get_offsets()) == 1
    ]
    assert len(set(looks)) == len(looks) > 25


def drawn(picture: Picture) -> Figure:
    figure = Figure(figsize=picture.size, layout="constrained")
    picture.draw(figure)
    FigureCanvasAgg(figure).draw()
    return figure


def legend_size(picture: Picture) -> float:
    return picture.size[1]


def test_links_to_sections_of_one_kind_differ() -> None:
    page = render("title", "today", [Section("Loads", [], []), Section("Kernels", [], []), Section("Loads", [], [])])
    assert re.findall(r'<a href="#s\d+">(.*?)</a>', page) == ["Loads, 1 of 2", "Kernels", "Loads, 2 of 2"]


@pytest.mark.parametrize("name", ["tune.json", "controller.json", "soak_gpu.json"])
def test_results_that_have_no_sections_are_named_as_such(name: str) -> None:
    with pytest.raises(ReportError, match=r"unknown kind of file \(its keys: .*expected the JSON of spectrumkv probe"):
        sections_of(RESULTS / name)


def test_ids_of_pictures_do_not_collide(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    quality, _ = shorter_results(tmp_path)
    assert CliRunner().invoke(app, ["report", str(quality), str(quality), "--out", str(page)]).exit_code == 0
    ids = re.findall(r'\bid="([^"]+)"', page.read_text())
    assert len(ids) == len(set(ids)) > 30


def test_pictures_as_png(log: Path, tmp_path: Path) -> None:
    folder = tmp_path / "pictures"
    command = ["report", str(log), "--out", str(tmp_path / "r.html"), "--png", str(folder)]
    assert CliRunner().invoke(app, command).exit_code == 0
    assert [path.name for path in sorted(folder.iterdir())] == [
        "01-tiers-over-position.png",
        "02-controller-decisions.png",
    ]
    assert all(imread(path).std() > 0.05 for path in folder.iterdir())


def test_a_log_says_what_stayed_off_the_wire_and_why_not(log: Path) -> None:
    (section,) = sections_of(log)
    assert section.text == ["3 chunks of 2 rooms: 0.292 MB of KV, 0.0876 MB sent: 70.0% stayed off the wire."]
    reasons = {row[0] for row in section.shown[0].rows}  # type: ignore[union-attr]
    assert reasons == {"tiered, tiered", "native, open_timeout"}


def test_a_torn_last_line_of_a_log_is_left_out(log: Path) -> None:
    log.write_text(log.read_text() + '{"time": 1')
    assert sections_of(log)[0].text[0].startswith("3 chunks")
    log.write_text("\n".join(reversed(log.read_text().splitlines()[-2:])) + "\n")
    with pytest.raises(ReportError, match=r"transfer\.jsonl"):
        sections_of(log)


def test_a_live_server(prefill_metrics: bytes, serve: Callable[..., str]) -> None:
    server, split = live_sections([serve({"/metrics": prefill_metrics})])
    assert server.title.startswith("Live: prefill at http://127.0.0.1")
    assert "70.0% of the KV stayed off the wire" in server.text[1]
    parts = {row[0]: row[3] for row in split.shown[0].rows}  # type: ignore[union-attr]
    assert parts == {"prefill: pack": "10", "prefill: write": "20", "prefill: wait for OPEN": "1",
                     "prefill: transfer, tiered": "20"}  # fmt: skip


def test_servers_without_metrics_or_without_our_backend(serve: Callable[..., str]) -> None:
    with pytest.raises(LiveServerError, match="is the server running"):
        fetch_metrics("http://127.0.0.1:9")
    with pytest.raises(LiveServerError, match="expected an address"):
        fetch_metrics("prefill:30000")
    with pytest.raises(LiveServerError, match="no Prometheus text"):
        fetch_metrics(serve({"/metrics": b"<html>"}))
    plain, _ = live_sections([serve({"/metrics": b'sglang:num_running_reqs{engine_type="decode"} 1.0\n'})])
    assert plain.text == ["This server runs no SpectrumKV backend: nothing of it is tiered."]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"a": 1}', "unknown kind of file (its keys: a)"),
        ("[1, 2]", "no JSON object and no transfer log"),
        ("text", "no JSON object and no transfer log"),
        ('{"evaluations": [{"model": 1}]}', "not as expected"),
        ('{"kernels": {}}', "not there or not as expected"),
    ],
)
def test_other_input_is_refused(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "input.json"
    path.write_text(content)
    with pytest.raises(ReportError, match=re.escape(said)) as refused:
        sections_of(path)
    assert str(path) in str(refused.value)


def test_wrong_usage(tmp_path: Path, log: Path) -> None:
    assert CliRunner().invoke(app, ["report"]).exit_code == 2
    done = CliRunner().invoke(app, ["report", str(log), "--out", str(tmp_path)])
    assert isinstance(done.exception, SpectrumKVError)
    assert "--out" in str(done.exception)


def test_a_probe(tmp_path: Path) -> None:
    answers = {
        "native": NeedleAnswer(True, " 12345.", [1], 1.0, None),
        "low": NeedleAnswer(False, " no", [2], 0.27, (0, 0, 1000)),
    }
    result = ProbeResult(
        format=1, model="/models/a", allowed_tiers=["high", "mid"], verdict="low_not_allowed",
        niah=Needles(0, 1, {"native": 1, "low": 0}, [NeedleResult(1024, 0.5, 7, "12345", 1000, answers)]),
        control=Control(1, 1), ppl={"native": 20.0, "low": 26.0}, dppl_pct={"native": 0.0, "low": 30.0},
        kl={"native": 0.0, "low": 0.2}, top1={"native": 1.0, "low": 0.7},
        thresholds={"max_kl": 0.03, "max_dppl_pct": 5.0, "min_top1": 0.9}, rule="r",
        reasons=["low: KL 0.200 above 0.03"], advice=["try k8v4"], fingerprint={}, profile="balanced", budget=0.3,
        seconds=Seconds(1, 2, 3, 6), memory=Memory(1, 2), date="2026-01-01", versions={}, sglang_command=[], launch={},
    )  # fmt: skip
    path, page = tmp_path / "probe.json", tmp_path / "r.html"
    path.write_bytes(encode_result(result))
    assert CliRunner().invoke(app, ["report", str(path), "--out", str(page)]).exit_code == 0
    text = page.read_text()
    assert "Verdict: low not allowed. Tiers allowed: high, mid." in text
    assert "<td>low</td><td>0 of 1</td>" in text
    assert text.count("<svg ") == 1


def test_a_frontier(tmp_path: Path) -> None:
    point = {"profile": "p1", "wire_ratio": 0.25, "kl": 0.01, "speed": 4e10, "tier_shares": [0.01, 0.1, 0.89],
             "candidate": True}  # fmt: skip
    document = {"format": 1, "model": "m", "points_of_space": 90, "judged": 2, "speeds_of": "H200",
                "stopped_by": "budget", "frontier": [point], "others": [{**point, "kl": 0.2}]}  # fmt: skip
    path, page = tmp_path / "frontier.json", tmp_path / "r.html"
    path.write_text(json.dumps(document))
    assert CliRunner().invoke(app, ["report", str(path), "--out", str(page)]).exit_code == 0
    assert "<td>p1</td><td>0.250</td><td>0.01</td><td>40</td><td>1% / 10% / 89%</td><td>yes</td>" in page.read_text()


def test_a_calibration(tmp_path: Path) -> None:
    calibration = {"format": 1, "model": "m", "profile": "p.yaml", "budget": 0.24, "chunk_tokens": 2048,
                   "wire_ratio": 0.24, "expected_kl": {"low": 0.01}, "granularity": "by layer",
                   "additivity": {"keys": {"int4": 0.9}}, "held_out": None}  # fmt: skip
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps(calibration))
    assert [section.title for section in sections_of(path)] == ["Calibration: m"]
