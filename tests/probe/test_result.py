"""The result file, its comparison and its picture."""

import math
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from spectrumkv_sglang.probe.errors import ProbeError
from spectrumkv_sglang.probe.needle_runs import NeedleAnswer, NeedleResult
from spectrumkv_sglang.probe.plot import check_plot_format, draw
from spectrumkv_sglang.probe.report import print_comparison, print_result
from spectrumkv_sglang.probe.result import (
    Control,
    Memory,
    Needles,
    ProbeResult,
    Seconds,
    encode_result,
    read_result,
)


def _result(**changed: object) -> ProbeResult:
    answers = {
        "native": NeedleAnswer(True, " 12345.", [1], 1.0, None),
        "low": NeedleAnswer(False, " I [do] not know", [2], 0.27, (0, 0, 900)),
    }
    scores = {"native": 0.0, "low": 0.2}
    fields: dict[str, object] = {
        "format": 1,
        "model": "/models/a",
        "allowed_tiers": ["high", "mid"],
        "verdict": "low_not_allowed",
        "niah": Needles(0, 1, {"native": 1, "low": 0}, [NeedleResult(1024, 0.5, 7, "12345", 1000, answers)]),
        "control": Control(1, 1),
        "ppl": {"native": 20.0, "low": 26.0},
        "dppl_pct": {"native": 0.0, "low": 30.0},
        "kl": scores,
        "top1": {"native": 1.0, "low": 0.7},
        "thresholds": {"max_kl": 0.03, "max_dppl_pct": 5.0, "min_top1": 0.9},
        "rule": "r",
        "reasons": ["low: KL 0.200 above 0.03"],
        "advice": ["probe again with --profile k8v4"],
        "fingerprint": {"weights": "sha256:a", "dtype": "bfloat16"},
        "profile": "spectrum",
        "budget": 0.39,
        "seconds": Seconds(1, 2, 3, 6),
        "memory": Memory(10**9, 2 * 10**9),
        "date": "2026-01-01T00:00:00+00:00",
        "versions": {},
        "sglang_command": [],
        "launch": {},
    }
    return ProbeResult(**{**fields, **changed})  # type: ignore[arg-type]


def _printed(show: object, *arguments: object) -> str:
    console = Console(record=True, width=160, file=open("/dev/null", "w"))  # noqa: SIM115
    show(*arguments, console)  # type: ignore[operator]
    return console.export_text()


def test_a_result_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(encode_result(_result()))
    assert read_result(path) == _result()
    document = msgspec.json.decode(path.read_bytes())
    wanted = {"allowed_tiers", "verdict", "niah", "control", "ppl", "kl", "top1", "rule", "fingerprint", "seconds"}
    assert wanted | {"launch"} <= set(document)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no probe result"),
        (b"[1]", "no probe result"),
        (b"{", "no probe result"),
        (b"{}", "format None, expected 1"),
        (b'{"format": 2}', "format 2, expected 1"),
        (b'{"format": 1}', "no probe result"),
    ],
)
def test_another_file_is_refused_by_name(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(ProbeError, match=message) as caught:
        read_result(path)
    assert "a.json" in str(caught.value)
    with pytest.raises(ProbeError, match="cannot read"):
        read_result(tmp_path / "none.json")


def test_people_see_what_was_lost_why_and_what_to_do() -> None:
    text = _printed(print_result, _result())
    assert "low tier not allowed; tiers: high, mid" in text
    assert "because low: KL 0.200 above 0.03" in text
    assert "to do: probe again with --profile k8v4" in text
    assert "I [do] not know" in text


@pytest.mark.parametrize(
    ("section", "served"),
    [
        ({"profile": "balanced"}, "0.3"),  # its own
        ({"profile": "balanced", "budget": 0.4}, "0.4"),
        ({"profile": "spectrum-safe"}, "0.55"),  # it states none
        ({"profile": "balanced", "allowed_tiers": ["high", "mid"]}, "0.512"),  # the least of both
    ],
)
def test_people_see_the_budget_that_servers_run_at(section: dict[str, object], served: str) -> None:
    section = {"allowed_tiers": ["high", "mid", "low"], **section, "probe": {"policy": {"budget": 0.264}}}
    text = _printed(print_result, _result(launch={"spectrumkv": section}))
    assert (
        f"servers run at budget {served}; the probe covers every budget from 0.264 up "
        "(judged: tiers mixed at b 0.390, and each lower tier alone)"
    ) in text
    uniform = _result(launch={"spectrumkv": section}, kl={"native": 0.0}, ppl={}, dppl_pct={}, top1={})
    assert "from 0.264 up\n" in _printed(print_result, uniform)


def test_a_comparison_names_what_differs() -> None:
    other = _result(model="/models/b", verdict="low_allowed", fingerprint={"weights": "sha256:b", "dtype": "bfloat16"})
    text = _printed(print_comparison, _result(), other, ("a.json", "b.json"))
    assert "low_not_allowed" in text
    assert "low_allowed" in text
    assert "differs: weights" in text
    assert "same model" in _printed(print_comparison, _result(), _result(), ("a", "b"))


@pytest.mark.parametrize(("name", "begins"), [("p.png", b"\x89PNG"), ("p.svg", b"<?xml"), ("p.PDF", b"%PDF")])
def test_the_picture_has_the_format_of_its_name(name: str, begins: bytes) -> None:
    assert draw(_result(), Path(name)).startswith(begins)


def test_a_picture_of_another_format_is_refused_before_any_work() -> None:
    with pytest.raises(ProbeError, match=r"\.png"):
        check_plot_format(Path("p.gif"))


def test_scores_that_are_no_numbers_are_null_and_read_back(tmp_path: Path) -> None:
    """A broken model, or an overflow in a tier, gives nan; the result is still a result."""
    path = tmp_path / "a.json"
    scores = {"native": 0.0, "low": math.nan}
    result = _result(kl=scores, ppl={"native": 20.0, "low": math.inf}, dppl_pct={"native": 0.0, "low": math.inf})
    path.write_bytes(encode_result(result))
    assert msgspec.json.decode(path.read_bytes())["kl"] == {"native": 0.0, "low": None}
    assert math.isnan(read_result(path).kl["low"])
    assert "nan" in _printed(print_result, read_result(path))
    assert "nan" in _printed(print_comparison, result, read_result(path), ("a", "b"))
    assert draw(result, Path("p.svg")).startswith(b"<?xml")
