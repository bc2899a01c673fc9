"""What the plugin does to SGLang's start-up: in a real SGLang, one process a scenario."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from spectrumkv_sglang.config import SpectrumKVConfig
from spectrumkv_sglang.launch.model import fetch_model
from spectrumkv_sglang.launch.servers import CPU_SHIMS
from spectrumkv_sglang.loopback.plan import LoopbackPlan, write_plan
from spectrumkv_sglang.verification.fingerprint import fingerprint_model
from spectrumkv_sglang.verification.record import ProbeRecord

HERE = Path(__file__).parent
ARGUMENT_HOOKS = [
    "sglang.srt.arg_groups.pd_disaggregation_hook.handle_pd_disaggregation",
    "sglang.srt.server_args.ServerArgs.add_cli_args",
]


@pytest.fixture(scope="module")
def model() -> Path:
    return fetch_model(HERE.parent / "build" / "models")


def environment_of(**variables: str) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SPECTRUMKV_", "MC_"))}
    return environment | {
        "PYTHONPATH": str(CPU_SHIMS),
        "SGLANG_USE_CPU_ENGINE": "1",
        "HF_HUB_OFFLINE": "1",
        **variables,
    }


def run(scenario: str, model: Path, *arguments: str, **variables: str) -> dict[str, object]:
    environment = environment_of(**variables)
    command = [sys.executable, str(HERE / "plugin_scenarios.py"), scenario, str(model), *arguments]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    lines = [line for line in finished.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, finished.stdout[-2000:] + finished.stderr[-4000:]
    return json.loads(lines[-1].removeprefix("RESULT "))


def test_another_backend_leaves_the_data_path_alone(model: Path) -> None:
    result = run("not-chosen", model, SPECTRUMKV_ACTIVE="left over from the shell")
    assert [name for name in result["patched"] if name not in ARGUMENT_HOOKS] == []
    assert result["active"] is None


def test_a_scheduler_process_installs_every_hook(model: Path) -> None:
    result = run("scheduler", model)
    assert result["active"] == "spectrumkv"
    assert len(result["patched"]) == len(ARGUMENT_HOOKS) + 8


@pytest.mark.parametrize(("backend", "force_tcp"), [("spectrumkv", None), ("spectrumkv_tcp", "1")])
def test_the_backend_is_accepted_and_becomes_mooncake(model: Path, backend: str, force_tcp: str | None) -> None:
    result = run(backend, model)
    assert result["backend"] == "mooncake"
    assert result["active"] == backend
    assert result["force_tcp"] == force_tcp
    assert result["tcp_slice"] == ("1048576" if force_tcp else None)
    # SGLang names its multi-process metrics folder later; an earlier import would lose the server's own metrics.
    assert not result["prometheus_imported"]


def test_the_config_flag_reaches_child_processes(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("budget: 0.4\n")
    assert run("config-flag", model, str(path))["config"] == str(path)


def test_a_bad_config_stops_the_server_before_it_serves(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("budget: 7\nscorer: best\n")
    result = run("config-flag", model, str(path))
    assert result["error"] == "ConfigError"
    for part in (str(path), "budget", "7", "at most 1", "scorer", "best", "choose from"):
        assert part in str(result["message"])


def probed_config(path: Path, model: Path) -> Path:
    """A configuration with the record of a passed probe of ``model``."""
    record = ProbeRecord.sealed(
        verdict="low_allowed",
        allowed_tiers=["high", "mid", "low"],
        rule="",
        date="2026-01-02T03:04:05Z",
        tool_version="1",
        sglang_version="0.5.20",
        policy=SpectrumKVConfig().probed_policy(),
        scores={"niah_passed": 3, "niah_trials": 3, "control_passed": 3, "gate": {}},
        fingerprint=fingerprint_model(model, quantization=None, dtype="bfloat16"),
    )
    path.write_text(yaml.safe_dump({"probe": record.model_dump(mode="json")}))
    return path


def test_a_strict_server_starts_with_the_model_that_was_probed(model: Path, tmp_path: Path) -> None:
    """The launching process does not know the KV pool's dtype and leaves that to the schedulers."""
    result = run("strict", model, str(probed_config(tmp_path / "launch.yaml", model)))
    assert (result["active"], result["strict"]) == ("spectrumkv_tcp", "true")
    assert not result["prometheus_imported"]
    assert not result["mooncake_conn_imported"]


def test_a_strict_server_refuses_another_model_than_was_probed(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "model"
    copy.mkdir()
    for path in model.iterdir():
        (copy / path.name).symlink_to(path)
    config = probed_config(tmp_path / "launch.yaml", copy)
    (copy / "config.json").unlink()
    (copy / "config.json").write_text((model / "config.json").read_text().replace("}", ', "rope_scaling_x": 1}', 1))
    result = run("strict", copy, str(config))
    assert result["error"] == "UnprovenTiersError"
    for part in ("strict is set", "config: probed sha256:", f"spectrumkv probe --model-path {copy}"):
        assert part in str(result["message"])
    assert "weights" not in str(result["message"])


def test_an_unprobed_profile_with_int4_in_high_stops_any_server(model: Path, tmp_path: Path) -> None:
    narrow = tmp_path / "narrow.yaml"
    narrow.write_text("name: narrow\ntiers:\n  high: {keys: int8, values: int4}\n")
    path = tmp_path / "config.yaml"
    path.write_text("profile: ./narrow.yaml\n")
    result = run("config-flag", model, str(path))
    assert result["error"] == "UnprovenTiersError"
    assert "holds INT4 in its high tier" in str(result["message"])


def test_a_real_strict_server_ends_before_it_loads_the_model(model: Path) -> None:
    command = [
        *(sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--device", "cpu"),
        *("--attention-backend", "torch_native", "--dtype", "float32", "--disaggregation-mode", "decode"),
        *("--disaggregation-transfer-backend", "spectrumkv_tcp", "--spectrumkv-strict", "--port", "39871"),
    ]
    finished = subprocess.run(command, env=environment_of(), capture_output=True, text=True, timeout=240, check=False)
    output = finished.stdout + finished.stderr
    assert finished.returncode != 0
    assert "strict is set, so this server does not start: probe missing" in output
    assert f"spectrumkv probe --model-path {model}" in output
    assert "Load weight" not in output
    assert "TP0" not in output  # no scheduler process was started


@pytest.mark.parametrize(
    ("scenario", "error", "missing"),
    [
        ("missing-in-scheduler", "SystemExit", "MooncakeKVManager.transfer_worker"),
        ("missing-argument-hook", "SystemExit", "handle_pd_disaggregation"),
    ],
)
def test_a_missing_extension_point_stops_the_server(model: Path, scenario: str, error: str, missing: str) -> None:
    result = run(scenario, model)
    assert result["error"] == error
    for part in (missing, "0.5.16 to 0.5.23", "--disaggregation-transfer-backend mooncake"):
        assert part in str(result["message"])


def test_a_loopback_variable_left_in_the_environment_stops_a_serving_server(model: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    write_plan(LoopbackPlan(base="b", policies="p", results="r", probe_pid=1), plan)
    for path, message in ((plan, "not started by the probe"), (tmp_path / "gone.json", "cannot be read")):
        result = run("not-chosen", model, SPECTRUMKV_LOOPBACK=str(path))
        assert result["error"] == "SystemExit"
        assert message in str(result["message"])
