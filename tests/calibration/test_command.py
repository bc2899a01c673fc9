"""``spectrumkv calibrate`` from options to files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from spectrumkv_sglang.calibration.command import calibrate
from spectrumkv_sglang.calibration.errors import CalibrationError
from spectrumkv_sglang.calibration.sensitivity import load_sensitivity
from spectrumkv_sglang.errors import SpectrumKVError
from spectrumkv_sglang.evaluation.methods import make_methods
from spectrumkv_sglang.profiles.profile import load_profile
from spectrumkv_sglang.profiles.tier import Tier

Run = Callable[..., str]


@pytest.fixture
def run(model_folder: Path, text_file: Path, tmp_path: Path) -> Run:
    app = typer.Typer()
    app.command()(calibrate)

    def call(*more: str, budget: str = "0.17") -> str:
        arguments = ["--model-path", str(model_folder), "--text", str(text_file), "--budget", budget]
        arguments += ["--out", str(tmp_path / "made.yaml"), "--prefix-tokens", "128", "--continuation-tokens", "16"]
        arguments += ["--chunk-tokens", "512", "--threads", "1", "--held-out-texts", "3", *more]
        return CliRunner().invoke(app, arguments, catch_exceptions=False).output

    return call


def test_a_profile_that_evaluates_and_a_measurement_to_reuse(run: Run, tmp_path: Path) -> None:
    saved, result = tmp_path / "s.json", tmp_path / "r.json"
    options = ("--heads", "measured", "--sensitivity", str(saved), "--json", str(result))
    output = run(*options)
    assert "Map by heads" in output
    assert "written:" in output
    profile = load_profile(tmp_path / "made.yaml")
    assert profile.budget == 0.17
    assert Tier.LOW in profile.tiers_defined
    assert "without tensor parallelism" in (tmp_path / "made.yaml").read_text()
    assert str(tmp_path / "made.yaml") in make_methods(
        [str(tmp_path / "made.yaml")], [], budget=None, scorer="window", seed=0, folder=tmp_path
    )

    found = json.loads(result.read_text())
    assert found["wire_ratio"] <= 0.17
    assert found["expected_kl"]["high"] == 0
    assert found["expected_kl"]["mid"] < found["expected_kl"]["low"]
    check = found["held_out"]
    measured = load_sensitivity(saved).measured_on
    assert not set(check["windows"]) & set(measured.windows)
    assert len(check["windows"]) == 3
    maps = check["maps"]
    assert list(maps) == [
        *("keys and values", "layers, same bytes", "heads, same bytes"),
        *("keys and values, tokens", "heads, tokens"),
    ]
    for label in ("layers, same bytes", "heads, same bytes"):
        ours, simple = maps[label]["row"]["wire_ratio"], maps["keys and values"]["row"]["wire_ratio"]
        assert ours == pytest.approx(simple, abs=0.01)
    for found_map in maps.values():
        assert 0.2 < found_map["row"]["kl"] / found_map["expected_kl"] < 5

    before = saved.read_bytes()
    again = run(*options, budget="0.24")
    assert "measurement saved" not in again
    assert saved.read_bytes() == before
    assert json.loads(result.read_text())["held_out"]["windows"] == check["windows"]
    assert json.loads(result.read_text())["expected_kl"]["low"] < found["expected_kl"]["low"]


def test_without_a_check(run: Run, tmp_path: Path) -> None:
    output = run("--held-out-texts", "0", "--texts", "1", "--keys", "int4_channel,int8_channel")
    assert "Map by layers" in output
    assert "beside" not in output
    assert load_profile(tmp_path / "made.yaml").tiers[Tier.LOW].keys.name == "INT4_CHANNEL"


@pytest.mark.parametrize(
    ("more", "budget", "message"),
    [
        ((), "0.1", "give at least 0."),
        (("--out", "made"), "0.2", "ends in .yaml"),
        (("--device", "cuda:77"), "0.2", "--device cuda:77"),
        (("--kv-dtype", "int8"), "0.2", "--kv-dtype int8"),
        (("--texts", "99"), "0.2", "windows"),
        (("--value-transform", "derope"), "0.2", "values carry no rotary"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_written(
    run: Run, tmp_path: Path, more: tuple[str, ...], budget: str, message: str
) -> None:
    with pytest.raises(SpectrumKVError, match=message):
        run(*more, budget=budget)
    assert not list(tmp_path.iterdir())


def test_one_file_for_two_things(run: Run, tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="is also the file of"):
        run("--json", str(tmp_path / "made.yaml"))


def test_a_measurement_of_other_lengths_on_the_same_text(run: Run, tmp_path: Path) -> None:
    saved = str(tmp_path / "s.json")
    run("--sensitivity", saved, "--held-out-texts", "0")
    with pytest.raises(CalibrationError, match="--prefix-tokens 128 --continuation-tokens 16"):
        run("--sensitivity", saved, "--prefix-tokens", "96")
