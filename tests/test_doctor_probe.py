"""`spectrumkv doctor` tells what the configuration's probe record is worth, as a server will see it."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
import yaml

from spectrumkv_sglang.config import SpectrumKVConfig
from spectrumkv_sglang.doctor.findings import Finding, Severity
from spectrumkv_sglang.doctor.settings import check_settings
from spectrumkv_sglang.verification.fingerprint import fingerprint_model
from spectrumkv_sglang.verification.record import ProbeRecord


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}" + bytes(5000))
    (directory / "config.json").write_text("{}")
    return directory


def launch_config(model: Path, record: dict[str, Any] | None = None, **settings: Any) -> Path:
    """A launch config with a passed probe of ``model`` loaded with --quantization fp8; ``record`` is changed after."""
    sealed = ProbeRecord.sealed(
        verdict="low_allowed",
        allowed_tiers=["high", "mid", "low"],
        rule="",
        date="2026-01-02T03:04:05Z",
        tool_version="1",
        sglang_version="0.5.20",
        policy=SpectrumKVConfig().probed_policy(),
        scores={"niah_passed": 3, "niah_trials": 3, "control_passed": 3, "gate": {}},
        fingerprint=fingerprint_model(model, quantization="fp8", dtype="float32"),
    )
    section = {**settings, "probe": {**sealed.model_dump(mode="json"), **(record or {})}}
    path = model.parent / "launch.yaml"
    path.write_text(yaml.safe_dump({"format": 1, "sglang": {}, "spectrumkv": section}))
    return path


def probe_finding(path: Path | None, model: Path | None, **environ: str) -> Finding:
    section, _ = check_settings(path, environ, model)
    [found] = [finding for finding in section.findings if finding.name == "probe"]
    return found


def test_the_probed_model_is_verified(model: Path) -> None:
    found = probe_finding(launch_config(model), model)
    assert found.severity is Severity.OK
    assert found.detail == "verified: probe of 2026-01-02T03:04:05Z judged this model and policy; tiers high, mid, low"


def test_without_a_model_the_record_is_held_against_the_configuration(model: Path) -> None:
    found = probe_finding(launch_config(model), None)
    assert found.severity is Severity.INFO
    assert "--model-path" in found.remedy
    found = probe_finding(launch_config(model, budget=0.28), None)
    assert found.severity is Severity.WARNING
    assert "changed" in found.detail
    assert "budget: probed down to 0.3, served 0.28" in found.detail


def test_another_model_is_named_by_what_differs(model: Path) -> None:
    path = launch_config(model)
    (model / "config.json").write_text('{"hidden_size": 1}')
    found = probe_finding(path, model)
    assert found.severity is Severity.WARNING
    for part in ("changed: ", "config: probed sha256:", "tiers high, mid only"):
        assert part in found.detail
    assert f"spectrumkv probe --model-path {model}" in found.remedy


@pytest.mark.parametrize(
    ("environ", "severity", "words"),
    [
        ({}, Severity.WARNING, "missing: "),
        ({"SPECTRUMKV_STRICT": "1"}, Severity.PROBLEM, "a server does not start: strict is set"),
        ({"SPECTRUMKV_REQUIRE_PROBE": "0"}, Severity.WARNING, "waived: "),
        ({"SPECTRUMKV_PROFILE": "int8"}, Severity.OK, "not needed: "),
        ({"SPECTRUMKV_ALLOWED_TIERS": "high,mid"}, Severity.OK, "not needed: "),
    ],
)
def test_a_configuration_without_a_record(model: Path, environ: dict[str, str], severity: Severity, words: str) -> None:
    found = probe_finding(None, model, **environ)
    assert found.severity is severity
    assert words in found.detail


def test_an_edited_record_is_named(model: Path) -> None:
    found = probe_finding(launch_config(model, {"date": "2027-01-01T00:00:00Z"}), model)
    assert found.severity is Severity.WARNING
    assert found.detail.startswith("edited: ")


def test_an_unprobed_profile_with_int4_in_high_is_a_problem(model: Path, tmp_path: Path) -> None:
    profile = tmp_path / "narrow.yaml"
    profile.write_text("name: narrow\ntiers:\n  high: {keys: int8, values: int4}\n")
    found = probe_finding(None, model, SPECTRUMKV_PROFILE=str(profile))
    assert found.severity is Severity.PROBLEM
    assert "holds INT4 in its high tier" in found.detail


def test_a_switched_off_backend_needs_no_probe(model: Path) -> None:
    section, _ = check_settings(None, {"SPECTRUMKV_ENABLED": "false"}, model)
    assert "probe" not in {finding.name for finding in section.findings}
