"""What stands in examples/ works as it stands: units and manifests are valid, and every command in them parses."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate.utils as kubernetes_validate
import pytest
import yaml
from typer.testing import CliRunner

from spectrumkv_sglang.cli import app
from spectrumkv_sglang.config import load_config
from spectrumkv_sglang.launch.probe_then_launch import argument_parser
from spectrumkv_sglang.launch_config import read_launch_config
from spectrumkv_sglang.launch_flags import flags_from_arguments

EXAMPLES = Path(__file__).parents[1] / "examples"
LAUNCH_CONFIG = EXAMPLES / "launch.yaml"
UNITS = sorted((EXAMPLES / "systemd").glob("*.service"))
MANIFESTS = sorted((EXAMPLES / "kubernetes").glob("*.yaml"))
KUBERNETES_VERSIONS = ("1.30", "1.36")
PYTHON_M = ["python", "python3", "/opt/spectrumkv/bin/python"]
# Reads command lines as JSON, and has SGLang and its router parse them.
PARSE = """
import argparse, json, sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import ServerArgs
from sglang_router.launch_router import parse_router_args
found = []
for module, flags in json.load(sys.stdin):
    if module == "sglang.launch_server":
        parser = argparse.ArgumentParser()
        ServerArgs.add_cli_args(parser)
        args = parser.parse_args(flags)
        found.append([args.disaggregation_mode, args.port])
    else:
        args = parse_router_args(flags)
        found.append(["router", args.port, len(args.prefill_urls), len(args.decode_urls)])
print(json.dumps(found))
"""


# ---- the commands in them ----------------------------------------------------------------------------------------


def unit_sections(path: Path) -> dict[str, list[tuple[str, str]]]:
    """Sections of a unit file with their (key, value) lines, for files without continuation lines."""
    sections: dict[str, list[tuple[str, str]]] = {}
    for line in path.read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        heading = re.fullmatch(r"\[(\w+)\]", line)
        if heading:
            assert heading[1] not in sections, line
            sections[heading[1]] = []
        else:
            key, separator, value = line.partition("=")
            assert sections, f"{line} stands in no section"
            assert separator, line
            assert value, line
            assert not line.endswith("\\"), line
            list(sections.values())[-1].append((key, value))
    return sections


def environment_file() -> dict[str, str]:
    lines = (EXAMPLES / "systemd" / "spectrumkv.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def expanded(command: str, variables: dict[str, str]) -> list[str]:
    """Words of a unit's command, as systemd expands them: $NAME alone is split at spaces, ${NAME} is not."""
    words: list[str] = []
    for word in shlex.split(command):
        if re.fullmatch(r"\$\w+", word):
            words += variables[word[1:]].split()
        else:
            words.append(re.sub(r"\$\{(\w+)\}", lambda name: variables[name[1]], word))
    return words


def unit_commands() -> list[list[str]]:
    return [
        expanded(value, environment_file())
        for path in UNITS
        for key, value in unit_sections(path)["Service"]
        if key.startswith("Exec")
    ]


def documents() -> list[dict[str, Any]]:
    return [document for path in MANIFESTS for document in yaml.safe_load_all(path.read_text())]


def containers() -> list[dict[str, Any]]:
    specs = [document["spec"]["template"]["spec"] for document in documents() if "template" in document["spec"]]
    return [
        container for spec in specs for kind in ("initContainers", "containers") for container in spec.get(kind, ())
    ]


def manifest_commands() -> list[list[str]]:
    found = []
    for container in containers():
        words = [*container["command"], *container.get("args", ())]
        if words[:2] == ["/bin/sh", "-c"]:
            (inner,) = re.findall(r"spectrumkv [^;]*", words[2])
            words = shlex.split(inner)
        found.append([word.replace("$(POD_IP)", "10.0.0.1") for word in words])
    return found


def shell_script_commands(folder: Path) -> list[list[str]]:
    """Run several_nodes.sh with stand-ins for ssh and scp, and return the SpectrumKV commands that it sends."""
    calls = folder / "calls"
    for name in ("ssh", "scp"):
        (folder / name).write_text(f'#!/bin/sh\nprintf "%s\\n" "{name} $*" >>{calls}\n')
        (folder / name).chmod(0o755)
    hosts = {"MODEL_PATH": "/models/m", "PREFILL_HOSTS": "p0 p1", "DECODE_HOSTS": "d0 d1 d2", "ROUTER_HOST": "r0"}
    result = subprocess.run(
        [EXAMPLES / "several_nodes.sh"],
        env={**os.environ, **hosts, "PATH": f"{folder}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    lines = calls.read_text().splitlines()
    found = [re.findall(r"/opt/spectrumkv/bin/[^&]*", line) for line in lines]
    routers = [re.findall(r"ROUTER_SERVERS=(--[^|]*)", line) for line in lines]
    return [
        *(shlex.split(command) for commands in found for command in commands),
        *(
            ["python", "-m", "sglang_router.launch_router", "--pd-disaggregation", *servers.split()]
            for line in routers
            for servers in line
        ),
    ]


def module_of(words: list[str]) -> tuple[str, list[str]]:
    """Return the Python module that a command runs, and its arguments; "spectrumkv" for the command of that name."""
    if words[0] in PYTHON_M:
        assert words[1] == "-m", words
        return words[2], words[3:]
    assert Path(words[0]).name == "spectrumkv", words
    return "spectrumkv", words[1:]


def python_module(line: str) -> tuple[str, list[str]]:
    """Return the same of a line that `spectrumkv launch --dry-run` prints."""
    words = shlex.split(line)
    start = words.index("-m") + 1
    return words[start], words[start + 1 :]


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """Return every command in the examples, with variables filled in."""
    return [*unit_commands(), *manifest_commands(), *shell_script_commands(tmp_path_factory.mktemp("bin"))]


def test_commands_are_found_in_all_kinds_of_examples(commands: list[list[str]]) -> None:
    modules = [module_of(words)[0] for words in commands]
    assert {module: modules.count(module) for module in modules} == {
        "spectrumkv_sglang.launch.probe_then_launch": 4,
        "spectrumkv": 2 + 4 + 5,
        "sglang_router.launch_router": 3,
    }


def test_every_probe_is_one_that_the_program_understands(commands: list[list[str]]) -> None:
    for words in commands:
        module, arguments = module_of(words)
        if module == "spectrumkv_sglang.launch.probe_then_launch":
            options = argument_parser().parse_args(arguments)
            assert options.probe_only
            assert flags_from_arguments(options.engine) == {"tp": 1, "dtype": "bfloat16"}
            assert (options.model_path, options.out.name) == ("/models/m", "launch.yaml")


def server_lines(commands: list[list[str]]) -> list[tuple[str, list[str]]]:
    """Return the commands of servers and routers that the examples lead to, by `spectrumkv launch --dry-run`."""
    found = []
    for words in commands:
        module, arguments = module_of(words)
        if module == "sglang_router.launch_router":
            found.append((module, arguments))
        elif module == "spectrumkv":
            paths = {word for word in arguments if word.endswith("/launch.yaml")}
            local = [str(LAUNCH_CONFIG) if word in paths else word for word in arguments]
            result = CliRunner().invoke(app, [*local, *([] if "--dry-run" in local else ["--dry-run"])])
            assert result.exit_code == 0, result.output
            found.append(python_module(result.stdout))
    return found


def test_sglang_and_its_router_accept_every_server_that_is_started(commands: list[list[str]]) -> None:
    lines = server_lines(commands)
    for line in (
        CliRunner().invoke(app, ["launch", "pair", "--config", str(LAUNCH_CONFIG), "--dry-run"]).stdout.splitlines()
    ):
        lines.append(python_module(line))
    result = subprocess.run(
        [sys.executable, "-c", PARSE],
        input=json.dumps(lines),
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent,
        env={**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr[-2000:]
    parsed = json.loads(result.stdout.splitlines()[-1])
    assert len(parsed) == len(lines)
    assert {tuple(server) for server in parsed if server[0] != "router"} == {("prefill", 30000), ("decode", 31000)}
    assert sorted(router[1:] for router in parsed if router[0] == "router") == sorted(
        [[8000, 1, 1], [8000, 1, 2], [30000, 2, 3], [8000, 1, 1]]
    )


# ---- launch config -----------------------------------------------------------------------------------------------


def test_the_launch_config_is_one(commands: list[list[str]]) -> None:
    config = read_launch_config(LAUNCH_CONFIG)
    assert load_config(LAUNCH_CONFIG, {}).profile == "spectrum-safe"
    assert "--enable-metrics" in config.arguments("decode")


# ---- systemd -----------------------------------------------------------------------------------------------------

KNOWN_KEYS = {
    "Unit": {"Description", "Wants", "After", "StartLimitIntervalSec", "StartLimitBurst"},
    "Service": {
        *("Type", "User", "DynamicUser", "EnvironmentFile", "StateDirectory", "WorkingDirectory", "KillMode"),
        *("ExecStartPre", "ExecStart", "TimeoutStartSec", "TimeoutStopSec", "Restart", "RestartSec"),
        *("LimitMEMLOCK", "LimitNOFILE"),
    },
    "Install": {"WantedBy"},
}


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_a_unit_holds_known_keys_and_known_variables(path: Path) -> None:
    sections = unit_sections(path)
    assert list(sections) == list(KNOWN_KEYS)
    for section, lines in sections.items():
        assert {key for key, _ in lines} <= KNOWN_KEYS[section]
    service = dict(sections["Service"])
    assert service["Type"] == "exec"
    assert service["ExecStart"].startswith("/opt/spectrumkv/bin/")
    if "router" not in path.stem:
        assert service["LimitMEMLOCK"] == "infinity"
        assert "--probe-only" in service["ExecStartPre"]


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_systemd_accepts_a_unit(path: Path, tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        return  # the test above reads the unit without systemd
    unit = tmp_path / path.name
    unit.write_text(path.read_text().replace("/opt/spectrumkv/bin/", f"{Path(sys.executable).parent}/"))
    result = subprocess.run(
        [analyze, "verify", "--man=no", "--recursive-errors=no", unit], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")


# ---- Kubernetes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_kubernetes_accepts_a_manifest(path: Path, version: str) -> None:
    for document in yaml.safe_load_all(path.read_text()):
        assert kubernetes_validate.validate(document, version, strict=True) == version


def test_the_schema_check_notices_an_unknown_field() -> None:
    document = next(document for document in documents() if document["kind"] == "Job")
    document["spec"]["backofLimit"] = 0
    with pytest.raises(kubernetes_validate.ValidationError, match="backofLimit"):
        kubernetes_validate.validate(document, KUBERNETES_VERSIONS[0], strict=True)


def test_every_name_in_a_manifest_is_there() -> None:
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for document in documents():
        by_kind.setdefault(document["kind"], []).append(document)
    names = {kind: {document["metadata"]["name"] for document in found} for kind, found in by_kind.items()}
    workloads = [document for kind in ("Job", "StatefulSet", "Deployment") for document in by_kind[kind]]
    pods = [document["spec"]["template"] for document in workloads]
    for workload, pod in zip(workloads, pods, strict=True):
        selector = workload["spec"].get("selector", {"matchLabels": {}})["matchLabels"]
        assert selector.items() <= pod["metadata"]["labels"].items()
        volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes", ())}
        claims = [
            volume["persistentVolumeClaim"]["claimName"]
            for volume in volumes.values()
            if len(volume) > 1 and "persistentVolumeClaim" in volume
        ]
        assert set(claims) <= names["PersistentVolumeClaim"]
        for container in (*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]):
            assert {mount["name"] for mount in container.get("volumeMounts", ())} <= set(volumes)
    for service in by_kind["Service"]:
        matching = [pod for pod in pods if service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()]
        assert len(matching) == 1
        open_ports = {port["containerPort"] for port in matching[0]["spec"]["containers"][0]["ports"]}
        assert {port["port"] for port in service["spec"]["ports"]} == open_ports
    assert all(stateful["spec"]["serviceName"] in names["Service"] for stateful in by_kind["StatefulSet"])


def test_the_router_names_every_pod_of_the_stateful_sets() -> None:
    stateful = {
        document["metadata"]["name"]: document["spec"] for document in documents() if document["kind"] == "StatefulSet"
    }
    expected = {f"{name}-{index}.{name}" for name, spec in stateful.items() for index in range(spec["replicas"])}
    (router,) = [container for container in containers() if container["name"] == "router"]
    assert {re.sub(r"http://|:\d+", "", word) for word in router["args"] if word.startswith("http")} == expected
