"""`spectrumkv launch` starts exactly what the launch config says, and says exactly what it would start."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from spectrumkv_sglang.cli import app
from spectrumkv_sglang.config import ConfigError
from spectrumkv_sglang.launch.launcher import launch
from spectrumkv_sglang.launch.server_commands import LaunchError, ServerCommand, python_command, server_command
from spectrumkv_sglang.launch_config import LaunchConfigError, read_launch_config

SPECTRUMKV = Path(sys.executable).with_name("spectrumkv")
CONFIG = {
    "format": 1,
    "backend": "spectrumkv_tcp",
    "sglang": {
        "common": {"model-path": "/models/my model", "tp": 2, "enable-metrics": True},
        "prefill": {"host": "10.0.0.1", "disaggregation-bootstrap-port": 9001},
        "decode": {"tp": 4},
    },
    "spectrumkv": {"profile": "int8", "budget": 0.6},
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "launch.yaml"
    return rewritten(path)


def rewritten(path: Path, **roles: dict[str, object]) -> Path:
    sections = {**CONFIG, "sglang": {**CONFIG["sglang"], **roles}}
    path.write_text(yaml.safe_dump(sections, sort_keys=False))
    return path


def spectrumkv(*arguments: str | Path, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SPECTRUMKV, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=cwd,
        env={**os.environ, **variables, "COLUMNS": "200"},
    )


def dry_run(role: str, config: Path, *further: str) -> list[list[str]]:
    """Return the command lines that the command prints, as a shell would split them."""
    result = CliRunner().invoke(app, ["launch", role, "--config", str(config), "--dry-run", *further])
    assert result.exit_code == 0, result.output
    return [shlex.split(line) for line in result.stdout.splitlines()]


SERVER = [*python_command("sglang.launch_server")]
PARSE = """
import argparse, sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
args = parser.parse_args(sys.argv[1:])
print(args.tp_size, args.host, args.disaggregation_bootstrap_port, args.disaggregation_mode, args.chunked_prefill_size,
      args.disaggregation_transfer_backend, args.enable_metrics, args.model_path, args.cuda_graph_bs_decode)
"""


@pytest.mark.parametrize(
    ("role", "flags"),
    [
        ("prefill", ["--tp", "2", "--enable-metrics", "--host", "10.0.0.1", "--disaggregation-bootstrap-port", "9001"]),
        ("decode", ["--enable-metrics", "--tp", "4"]),
    ],
)
def test_a_server_gets_the_files_flags_then_its_role_then_what_is_passed_through(
    role: str, flags: list[str], config: Path
) -> None:
    further = ["--chunked-prefill-size", "-1", "--json-model-override-args", '{"a": [1, 2]}', "--tp=8", "--no-value"]
    own = ["--disaggregation-mode", role, "--disaggregation-transfer-backend", "spectrumkv_tcp"]
    assert dry_run(role, config, *further) == [
        [*SERVER, "--model-path", "/models/my model", *flags, *own, "--spectrumkv-config", str(config), *further]
    ]


def test_a_flag_that_shares_its_name_is_passed_on_behind_two_dashes(config: Path) -> None:
    (line,) = dry_run("decode", config, "--", "--strict", "--config", "sglang.yaml")
    assert line[-3:] == ["--strict", "--config", "sglang.yaml"]


def test_a_relative_config_reaches_the_server_with_its_absolute_path(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(config.parent)
    (line,) = dry_run("decode", Path(config.name))
    assert line[line.index("--spectrumkv-config") + 1] == str(config)


def test_strict_reaches_the_servers_by_their_environment(config: Path) -> None:
    lines = dry_run("pair", config, "--strict")
    assert [line[0] == "SPECTRUMKV_STRICT=true" for line in lines] == [True, True, False]


def test_a_server_on_a_cpu_is_told_so_unless_its_environment_says_it(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    (line,) = dry_run("decode", config, "--device", "cpu")
    assert line[0] == "SGLANG_USE_CPU_ENGINE=1"
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    (line,) = dry_run("decode", config, "--device", "cpu")
    assert line[: len(SERVER)] == SERVER


def test_a_pair_has_a_router_in_front_and_ports_that_do_not_collide(config: Path) -> None:
    prefill, decode, router = dry_run("pair", config, "--router-port", "9000", "--enable-cache-report")
    assert (prefill[-1], decode[-1]) == ("--enable-cache-report", "--enable-cache-report")
    assert "--port" not in prefill  # SGLang's default, 30000
    assert decode[decode.index("--port") + 1] == "31000"
    module = router.index("sglang_router.launch_router")
    assert router[module:] == [
        *("sglang_router.launch_router", "--pd-disaggregation", *(["--mini-lb"] if "--mini-lb" in router else [])),
        *("--prefill", "http://10.0.0.1:30000", "9001", "--decode", "http://127.0.0.1:31000"),
        *("--host", "127.0.0.1", "--port", "9000", "--shutdown-grace-period-secs", "10"),
    ]


def test_ports_of_the_file_are_kept(config: Path) -> None:
    rewritten(config, prefill={"port": 4000, "host": "0.0.0.0"}, decode={"port": 4001, "host": "::"})
    prefill, decode, router = dry_run("pair", config)
    assert prefill[prefill.index("--port") + 1] == "4000"
    assert decode[len(decode) - 1 - decode[::-1].index("--port") + 1] == "4001"
    assert [word for word in router if word.startswith("http")] == ["http://127.0.0.1:4000", "http://127.0.0.1:4001"]


@pytest.mark.parametrize(
    ("roles", "further", "expected"),
    [
        ({"common": {"port": 30000}}, [], "prefill and decode would both listen on port 30000: give them ports"),
        ({"prefill": {"port": 8998}}, [], "prefill and prefill's bootstrap service would both listen on port 8998"),
        ({"decode": {"port": 8000}}, [], "decode and router would both listen on port 8000.*--router-port"),
        ({"decode": {"port": "http"}}, [], "decode: --port http: expected a port from 1 to 65535"),
        ({}, ["--port", "1"], "--port would hold for both servers of the pair: put port under sglang: prefill: or dec"),
        ({}, ["--disaggregation-bootstrap-port=1"], "put disaggregation-bootstrap-port under sglang"),
        ({"common": {"ssl-certfile": "c.pem"}}, [], "prefill has --ssl-certfile, but the pair's router.*plain HTTP"),
    ],
)
def test_a_pair_that_cannot_work_is_refused(
    roles: dict[str, dict[str, object]], further: list[str], expected: str, config: Path
) -> None:
    with pytest.raises(LaunchError, match=expected):
        launch("pair", rewritten(config, **roles), further, dry_run=True)


def test_a_wrong_request_ends_with_an_error_and_not_with_a_server(config: Path) -> None:
    with pytest.raises(LaunchError, match="unknown role 'both': expected prefill, decode or pair"):
        launch("both", config)
    with pytest.raises(LaunchConfigError, match="there is no launch config"):
        launch("pair", config.with_name("no.yaml"))


def test_the_spectrumkv_section_is_checked_before_anything_starts(config: Path) -> None:
    config.write_text(config.read_text().replace("budget", "budgt"))
    result = spectrumkv("launch", "decode", "--config", config)
    assert result.returncode == 1
    assert "unknown field 'budgt' (did you mean budget?)" in result.stderr
    assert "Traceback" not in result.stderr


def test_the_environment_is_checked_before_anything_starts(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECTRUMKV_BUDGET", "7")
    with pytest.raises(ConfigError, match="SPECTRUMKV_BUDGET = '7'"):
        launch("decode", config)


# A package sglang that comes first on the path: what is seen here is how the server is started, not SGLang.
STAND_IN = """
import os, sys, time
print("parent", os.getppid(), "strict", os.environ.get("SPECTRUMKV_STRICT"), *sys.argv[1:], flush=True)
print("path", [entry for entry in sys.path if entry in ("", os.getcwd())], flush=True)
sys.exit(42)
"""


def test_a_server_takes_the_place_of_the_command(config: Path, tmp_path: Path) -> None:
    package = tmp_path / "packages" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(STAND_IN)
    (tmp_path / "kernels").mkdir()  # in the working directory: must hide no package of that name
    result = spectrumkv(
        *("launch", "decode", "--config", config, "--strict"), cwd=tmp_path, PYTHONPATH=str(package.parent)
    )
    assert result.returncode == 42
    first, second = result.stdout.splitlines()
    assert first.startswith(f"parent {os.getpid()} strict true --model-path")
    assert second == "path []"
    assert "--disaggregation-mode decode" in result.stderr  # what is started is said


def test_arguments_reach_sglangs_own_parser_as_the_file_means_them(config: Path) -> None:
    further = ["--cuda-graph-bs-decode", "1", "2", "--chunked-prefill-size", "-1"]
    command = server_command(read_launch_config(config), config, "prefill", further)
    flags = command.arguments[len(SERVER) :]
    result = subprocess.run(
        [sys.executable, "-c", PARSE, *flags],
        capture_output=True,
        text=True,
        check=False,
        cwd=config.parent,
        env={**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"},
    )
    expected = "2 10.0.0.1 9001 prefill -1 spectrumkv_tcp True /models/my model [1, 2]"
    assert result.stdout.splitlines()[-1:] == [expected], result.stderr[-2000:]


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("10.0.0.1", "http://10.0.0.1:30000"),
        ("0.0.0.0", "http://127.0.0.1:30000"),
        ("fd00::1", "http://[fd00::1]:30000"),
        ("[fd00::1]", "http://[fd00::1]:30000"),
        ("::", "http://127.0.0.1:30000"),
    ],
)
def test_a_servers_address_can_be_reached_from_this_machine(host: str, url: str) -> None:
    assert ServerCommand("decode", ("--host", host), {}).url == url


@pytest.mark.parametrize("flag", ["--disaggregation-mode", "--spectrumkv-config=other.yaml", "--disaggregation-tr"])
def test_a_further_flag_that_contradicts_the_role_or_the_file_is_refused(flag: str, config: Path) -> None:
    result = CliRunner().invoke(app, ["launch", "decode", "--config", str(config), "--dry-run", flag, "prefill"])
    assert result.exit_code == 1
    assert "not given here" in str(result.exception)
