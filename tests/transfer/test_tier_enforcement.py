"""What a rank makes of its configuration when it starts, over real model files."""

from __future__ import annotations

import logging
import shlex
import struct
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from spectrumkv_sglang.config import SpectrumKVConfig
from spectrumkv_sglang.observability.metrics import TransferMetrics
from spectrumkv_sglang.observability.reasons import ProbeState
from spectrumkv_sglang.payload.geometry import KVGeometry
from spectrumkv_sglang.profiles.tier import Tier
from spectrumkv_sglang.sglang_compat import ServedModel
from spectrumkv_sglang.transfer.tier_enforcement import enforce_tiers
from spectrumkv_sglang.verification.enforcement import UnprovenTiersError
from spectrumkv_sglang.verification.fingerprint import fingerprint_model
from spectrumkv_sglang.verification.record import ProbeRecord

HIGH, MID, LOW = Tier


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}" + bytes(5000))
    (directory / "config.json").write_text("{}")
    return directory


def probed(model: Path, **settings: Any) -> SpectrumKVConfig:
    record = ProbeRecord.sealed(
        verdict="low_allowed",
        allowed_tiers=list(Tier),
        rule="",
        date="2026-01-02T03:04:05Z",
        tool_version="1",
        sglang_version="0.5.20",
        policy=SpectrumKVConfig(**settings).probed_policy(),
        scores={"niah_passed": 3, "niah_trials": 3, "control_passed": 3, "gate": {}},
        fingerprint=fingerprint_model(model, quantization=None, dtype="float32"),
    )
    return SpectrumKVConfig(**settings, probe=record)


class Rank:
    """One rank's start and what it said."""

    def __init__(
        self,
        config: SpectrumKVConfig,
        path: object,
        caplog: pytest.LogCaptureFixture,
        *,
        speaks: bool = True,
        **served: Any,
    ) -> None:
        caplog.clear()
        registry = CollectorRegistry()
        metrics = TransferMetrics("decode", 0, registry=registry)
        fields = {"quantization": None, "revision": None, "download_dir": None, "dtype": "float32", **served}
        dtype = fields.pop("dtype")
        with caplog.at_level(logging.DEBUG):
            geometry = KVGeometry(layers=2, kv_heads=2, head_dim=128, v_head_dim=128, page_size=1, dtype=dtype)
            self.config = enforce_tiers(config, ServedModel(str(path), **fields), geometry, metrics, speaks=speaks)
        [line] = caplog.records
        self.level, self.said = line.levelno, line.getMessage()
        self.states = {
            sample.labels["state"]
            for family in registry.collect()
            for sample in family.samples
            if sample.name == "spectrumkv:probe_state" and sample.value
        }


def test_the_probed_model_is_served_as_configured(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = probed(model, strict=True)
    rank = Rank(config, model, caplog)
    assert rank.config == config
    assert (rank.states, rank.level) == ({"verified"}, logging.INFO)


def test_another_model_is_served_with_high_and_mid_and_said_loudly(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = probed(model, budget=0.35)
    (model / "config.json").write_text('{"hidden_size": 1}')
    rank = Rank(config, model, caplog, dtype="bfloat16")
    assert rank.config.allowed_tiers == (HIGH, MID)
    assert rank.config.budget == 0.35
    assert (rank.states, rank.level) == ({"changed"}, logging.WARNING)
    for part in (
        "only tiers high, mid are used",
        "config: probed sha256:",
        f"`spectrumkv probe --model-path {model} --profile balanced --budget 0.35 --out launch.yaml`",
        "Budget 0.35 is below what these tiers reach on this bfloat16 pool: expect b 0.512 or more",
    ):
        assert part in rank.said


def test_a_float32_pool_keeps_budgets_that_eight_bits_reach_there(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = SpectrumKVConfig(budget=0.3)
    on_float32, on_bfloat16 = (Rank(config, model, caplog, dtype=dtype) for dtype in ("float32", "bfloat16"))
    assert on_float32.config == on_bfloat16.config
    assert on_float32.config.allowed_tiers == (HIGH, MID)
    assert "only tiers high, mid are used" in on_float32.said
    assert "expect b" not in on_float32.said
    assert "expect b 0.512 or more" in on_bfloat16.said


def test_the_command_judges_a_profile_of_ones_own(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = tmp_path / "my own.yaml"
    mine.write_text(
        "name: mine\ntiers:\n  high: {keys: native, values: native}\n  mid: {keys: int8, values: int8}\n"
        "  low: {keys: int4, values: int4}\n"
    )
    monkeypatch.chdir(tmp_path)
    said = Rank(SpectrumKVConfig(profile="./my own.yaml", budget=0.4), model, caplog).said
    command = shlex.split(said.split("`")[1])
    assert command[:2] == ["spectrumkv", "probe"]
    assert command[2:] == [
        "--model-path", str(model), "--profile", str(mine), "--budget", "0.4", "--out", "launch.yaml",
    ]  # fmt: skip
    said = Rank(SpectrumKVConfig(sink_tokens=8), model, caplog).said
    assert "--config FILE_WITH_YOUR_SETTINGS --out" in said


@pytest.mark.parametrize(
    ("served", "difference"),
    [
        ({"dtype": "bfloat16"}, "dtype: probed float32, served bfloat16"),
        ({"quantization": "fp8"}, "quantization: probed none, served fp8"),
    ],
)
def test_how_the_model_is_loaded_counts(
    model: Path, caplog: pytest.LogCaptureFixture, served: dict[str, str], difference: str
) -> None:
    rank = Rank(probed(model), model, caplog, **served)
    assert rank.states == {"changed"}
    assert difference in rank.said


def test_one_rank_of_a_server_speaks(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    for config, state in ((SpectrumKVConfig(), "missing"), (SpectrumKVConfig(require_probe=False), "waived")):
        loud, quiet = Rank(config, model, caplog), Rank(config, model, caplog, speaks=False)
        assert (loud.level, quiet.level) == (logging.WARNING, logging.DEBUG)
        assert loud.states == quiet.states == {state}
        assert loud.config == quiet.config


def test_a_waiver_keeps_every_tier(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    rank = Rank(SpectrumKVConfig(require_probe=False), model, caplog)
    assert rank.config.allowed_tiers == (HIGH, MID, LOW)
    assert "unproven" in rank.said


def test_strict_refuses(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    for config in (SpectrumKVConfig(strict=True), probed(model, strict=True)):
        with pytest.raises(UnprovenTiersError, match="strict is set"):
            Rank(config, model, caplog, dtype="bfloat16")


def test_a_hub_id_is_found_in_the_hubs_cache_and_never_downloaded(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config, commit = probed(model), "0" * 40
    repository = tmp_path / "cache" / "models--org--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "snapshots").mkdir()
    (repository / "refs" / "main").write_text(commit)
    (repository / "snapshots" / commit).symlink_to(model)
    served = {"download_dir": str(tmp_path / "cache")}
    assert Rank(config, "org/name", caplog, **served).states == {"verified"}
    rank = Rank(config, "org/other", caplog, **served)
    assert rank.states == {ProbeState.CHANGED.value}
    assert "org/other is not on this machine" in rank.said
