"""What the plugin does to SGLang's start-up: in a real SGLang, one process a scenario."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from spectrumkv_sglang.launch.model import fetch_model
from spectrumkv_sglang.launch.servers import CPU_SHIMS

HERE = Path(__file__).parent
ARGUMENT_HOOKS = [
    "sglang.srt.arg_groups.pd_disaggregation_hook.handle_pd_disaggregation",
    "sglang.srt.server_args.ServerArgs.add_cli_args",
]


@pytest.fixture(scope="module")
def model() -> Path:
    return fetch_model(HERE.parent / "build" / "models")


def run(scenario: str, model: Path, *arguments: str, **variables: str) -> dict[str, object]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SPECTRUMKV_", "MC_"))}
    environment |= {"PYTHONPATH": str(CPU_SHIMS), "SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", **variables}
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
    assert len(result["patched"]) == len(ARGUMENT_HOOKS) + 5


@pytest.mark.parametrize(("backend", "force_tcp"), [("spectrumkv", None), ("spectrumkv_tcp", "1")])
def test_the_backend_is_accepted_and_becomes_mooncake(model: Path, backend: str, force_tcp: str | None) -> None:
    result = run(backend, model)
    assert result["backend"] == "mooncake"
    assert result["active"] == backend
    assert result["force_tcp"] == force_tcp
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
