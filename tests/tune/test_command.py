"""``spectrumkv tune`` from options to files that servers take."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from spectrumkv_sglang.config import load_config
from spectrumkv_sglang.errors import SpectrumKVError
from spectrumkv_sglang.profiles.profile import load_profile
from spectrumkv_sglang.search.codec_speeds import read_speeds
from spectrumkv_sglang.search.command import tune

Run = Callable[..., str]
MANY = ("--upgrade", ",".join(str(step / 40) for step in range(41)))


@pytest.fixture
def run(model_folder: Path, text_file: Path, speeds_file: Path, tmp_path: Path) -> Run:
    app = typer.Typer()
    app.command()(tune)

    def call(*more: str, speeds: bool = True, text: Path = text_file) -> str:
        arguments = ["--model-path", str(model_folder), "--text", str(text), "--out", str(tmp_path / "out")]
        arguments += ["--prefix-tokens", "128", "--continuation-tokens", "16", "--chunk-tokens", "512"]
        arguments += [
            "--texts",
            "2",
            "--threads",
            "1",
            "--edges",
            "0,1",
            "--upgrade",
            "0,0.5",
            "--key-scales",
            "channel",
        ]
        arguments += ["--speeds", str(speeds_file)] if speeds else []
        return CliRunner().invoke(app, [*arguments, *more], catch_exceptions=False).output

    return call


def test_a_frontier_that_the_controller_takes_and_a_run_that_goes_on(run: Run, tmp_path: Path) -> None:
    output = run("--evaluations", "9", "--candidates", "4")
    assert "Frontier of" in output
    assert "9 of" in output
    found = json.loads((tmp_path / "out" / "frontier.json").read_text())
    assert found["judged"] == 9
    assert 3 <= len(found["frontier"]) <= 9
    for point in found["frontier"]:
        profile = load_profile(tmp_path / "out" / "profiles" / f"{point['profile']}.yaml")
        assert profile.name == point["profile"]
        assert profile.budget == point["budget"] >= point["wire_ratio"]
        assert point["compression_ratio"] == pytest.approx(1 / point["wire_ratio"])
        assert point["kl"] == pytest.approx(sum(point["kl_by_text"]) / 2)
    assert (tmp_path / "out" / "frontier.png").read_bytes().startswith(b"\x89PNG")

    config = load_config(tmp_path / "out" / "controller.yaml", {})
    chosen = [point for point in found["frontier"] if point["candidate"]]
    assert [candidate.label for candidate in config.controller.candidates] == [
        f"{point['profile']}@{point['budget']:g}" for point in chosen
    ]
    assert 1 < len(chosen) <= 4
    for candidate, point in zip(config.controller.candidates, chosen, strict=True):
        assert point["kl"] <= candidate.kl <= point["kl"] * 1.11
        assert candidate.speed == pytest.approx(point["speed"], rel=0.01)
        served = config.with_policy(candidate.profile, candidate.budget)
        assert served.loaded_profile.name == point["profile"]

    again = run("--evaluations", "11")
    assert "goes on after 9 points" in again
    more = json.loads((tmp_path / "out" / "frontier.json").read_text())
    assert more["judged"] == 11


def test_a_study_of_other_lengths_or_another_text_is_refused(run: Run, tmp_path: Path) -> None:
    run("--evaluations", "3")
    with pytest.raises(SpectrumKVError, match="--prefix-tokens was 128, is 96"):
        run("--prefix-tokens", "96")
    other = tmp_path / "other.txt"
    other.write_text("abc def. " * 400)
    with pytest.raises(SpectrumKVError, match="text was"):
        run(text=other)
    with pytest.raises(SpectrumKVError, match="--edges was 0,1, is 0"):
        run("--edges", "0")


def test_speeds_are_measured_once_and_kept(run: Run, tmp_path: Path) -> None:
    saved = tmp_path / "speeds.json"
    few = ("--key-bits", "4,8", "--value-bits", "4", "--key-transform", "identity,derope", "--evaluations", "4")
    output = run(*few, "--save-speeds", str(saved), speeds=False)
    assert "measuring how fast" in output
    speeds = read_speeds(saved)
    assert speeds.device == "CPU, one thread"
    assert "measuring" not in run(*few, speeds=False)  # the study kept them
    with pytest.raises(SpectrumKVError, match="no point goes without: measure anew"):
        run("--key-bits", "3", "--speeds", str(saved), "--study", str(tmp_path / "b.log"), speeds=False)
    with pytest.raises(SpectrumKVError, match="speeds was"):
        run(*few)  # of another file
    output = run("--speeds", str(saved), "--study", str(tmp_path / "c.log"), "--evaluations", "2", speeds=False)
    assert "points left out" in output


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--texts", "99"), "windows"),
        (("--edges", "0,2"), "this model has 3 layers"),
        (("--least-kl", "0"), "--least-kl 0"),
        (("--max-kl", "0.000001"), "expected more than --least-kl"),
        (("--device", "cuda:77"), "--device cuda:77"),
        (("--key-bits", "2,9"), "9 is none of"),
        (("--speeds", "nowhere.json"), "--speeds nowhere.json: No such file"),
        ((*MANY, "--key-scales", "row,channel"), "fewer choices"),
        (("--save-speeds", "x.json"), "give one of them"),
    ],
)
def test_what_cannot_be_is_refused_before_any_work(
    run: Run, tmp_path: Path, more: tuple[str, ...], message: str
) -> None:
    with pytest.raises(SpectrumKVError, match=message):
        run(*more)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "No such file"), (b"too short", "expected at least 2,000"), (b"\xff" * 3000, "not UTF-8 text")],
)
def test_a_text_that_is_none_is_refused_without_offering_to_leave_it_out(
    run: Run, tmp_path: Path, content: bytes | None, message: str
) -> None:
    text = tmp_path / "mine.txt"
    if content is not None:
        text.write_bytes(content)
    with pytest.raises(SpectrumKVError, match=f"--text .*{message}") as caught:
        run(text=text)
    assert "leave --text out" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_an_output_folder_that_is_a_file(run: Run, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(SpectrumKVError, match="a file, expected a folder"):
        run()


@pytest.mark.parametrize("content", ["", "{}", '{"format": 9, "device": "d", "geometry": 3}'])
def test_a_file_of_speeds_that_is_none(run: Run, tmp_path: Path, content: str) -> None:
    (tmp_path / "s.json").write_text(content)
    with pytest.raises(SpectrumKVError, match="no file of spectrumkv tune"):
        run("--speeds", str(tmp_path / "s.json"), speeds=False)
