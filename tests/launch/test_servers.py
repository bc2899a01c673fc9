"""Flags and environment of the servers, without starting one."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from spectrumkv_sglang.launch import servers
from spectrumkv_sglang.launch.servers import CPU_SHIMS, Device, Fleet, Role, Router, ServerSpec, SGLangServer, free_port
from spectrumkv_sglang.launch.sglang_versions import SGLangVersionError, python_path, release_number

RETRACTION = "--disaggregation-decode-retraction-backup"


def spec(role: Role, **settings) -> ServerSpec:
    return ServerSpec(role=role, model=Path("model"), device=Device.CPU, sglang="0.5.20", **settings)


def value_of(flags: tuple[str, ...], flag: str) -> str:
    """Return the value that argparse would see: the last one."""
    return flags[len(flags) - 1 - flags[::-1].index(flag) + 1]


def test_a_plain_server_gets_no_disaggregation_flags() -> None:
    flags = spec(Role.PLAIN).flags(1, 2)
    assert not any(flag.startswith("--disaggregation") for flag in flags)


def test_a_prefill_server_gets_its_backend_and_bootstrap_port() -> None:
    flags = spec(Role.PREFILL, backend="spectrumkv_tcp").flags(18001, 18002)
    assert value_of(flags, "--disaggregation-mode") == "prefill"
    assert value_of(flags, "--disaggregation-transfer-backend") == "spectrumkv_tcp"
    assert value_of(flags, "--port") == "18001"
    assert value_of(flags, "--disaggregation-bootstrap-port") == "18002"


@pytest.mark.parametrize(("version", "told"), [("0.5.16", False), ("0.5.20", True), ("0.5.23", True)])
def test_only_releases_that_know_the_retraction_flag_get_it(version: str, told: bool) -> None:
    flags = ServerSpec(role=Role.DECODE, model=Path("model"), device=Device.CPU, sglang=version).flags(1, 2)
    assert (RETRACTION in flags) is told


def test_extra_flags_come_last_so_that_they_win() -> None:
    flags = spec(Role.PLAIN, extra_args=("--max-total-tokens", "99")).flags(1, 2)
    assert value_of(flags, "--max-total-tokens") == "99"


def test_a_gpu_server_gets_neither_cpu_flags_nor_shims(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    gpu = ServerSpec(role=Role.DECODE, model=Path("model"), device=Device.CUDA)
    assert "--device" not in gpu.flags(1, 2)
    assert gpu.environment()["PYTHONPATH"] == ""
    assert str(CPU_SHIMS.resolve()) in spec(Role.PLAIN).environment()["PYTHONPATH"]


def test_the_plugin_marker_of_a_parent_server_does_not_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECTRUMKV_ACTIVE", "1")
    assert "SPECTRUMKV_ACTIVE" not in spec(Role.PLAIN).environment()
    assert spec(Role.PLAIN, env={"SPECTRUMKV_BUDGET": "0.4"}).environment()["SPECTRUMKV_BUDGET"] == "0.4"


def test_free_ports_are_free_and_never_given_twice() -> None:
    ports = [free_port() for _ in range(200)]
    assert len(set(ports)) == 200
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", ports[0]))


def test_release_numbers_order_releases() -> None:
    assert release_number("0.5.9") < release_number("0.5.16") < release_number("0.5.20.post1") < (0, 5, 21)


def test_an_untested_release_is_refused() -> None:
    with pytest.raises(SGLangVersionError, match=r"0\.4\.0 is not one of the tested releases"):
        python_path("0.4.0")


def test_a_router_names_every_server_and_the_bootstrap_ports(tmp_path: Path) -> None:
    prefills = [SGLangServer(spec(Role.PREFILL), f"prefill-{index}", log_dir=tmp_path) for index in range(2)]
    decodes = [SGLangServer(spec(Role.DECODE), f"decode-{index}", log_dir=tmp_path) for index in range(2)]
    command = Router(prefills, decodes, log_dir=tmp_path, native=True, extra_args=("--policy", "random")).command
    for server in prefills:
        place = command.index(server.url)
        assert command[place - 1 : place + 2] == ("--prefill", server.url, str(server.bootstrap_port))
    assert [command[place + 1] for place, word in enumerate(command) if word == "--decode"] == [
        server.url for server in decodes
    ]
    assert command[-2:] == ("--policy", "random")
    assert "--mini-lb" not in command
    assert "--mini-lb" in Router(prefills[0], decodes[0], log_dir=tmp_path).command


def test_who_is_waited_for_is_said_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Starting:
        """Ready when it was asked so many times."""

        def __init__(self, name: str, asked: int) -> None:
            self.name, self._asked = name, asked

        def check_alive(self) -> None:
            return

        def ready(self) -> bool:
            self._asked -= 1
            return self._asked <= 0

    monkeypatch.setattr(servers, "PROGRESS_SECONDS", 0.0)
    told: list[list[str]] = []
    Fleet().wait_ready(
        [Starting("prefill", 1), Starting("decode", 3)],  # type: ignore[list-item]
        on_waiting=lambda waiting, seconds: told.append([server.name for server in waiting]),
    )
    assert told == [["decode"], ["decode"]]
