"""A pair is one thing: it is ready when all of it is, ends when any of it does, and leaves nothing behind.

The programs are small stand-ins: what is seen here is how they are kept, not SGLang.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from spectrumkv_sglang.launch.pair import PairCommands, run_pair
from spectrumkv_sglang.launch.processes import ProcessError
from spectrumkv_sglang.launch.server_commands import LaunchError, ServerCommand
from spectrumkv_sglang.launch.servers import free_port

# A server with a child, as SGLang has schedulers, that is healthy after some seconds and may end after some more.
SERVER = """
import http.server, subprocess, sys, threading, time, os
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if time.monotonic() > healthy_from else 503)
        self.end_headers()
if options.get("--child"):
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)  # ends with this server
healthy_from = time.monotonic() + float(options.get("--healthy-after", 0))
if "--ends-after" in options:
    threading.Timer(float(options["--ends-after"]), lambda: (print("the reason", flush=True), os._exit(7))).start()
http.server.ThreadingHTTPServer(("127.0.0.1", int(options["--port"])), Handler).serve_forever()
"""
# A shell in the background starts programs that ignore SIGINT; an operator's does not.
PROGRAM = """
import signal, sys
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, sys.argv[2])
from test_launcher_pair import pair
from spectrumkv_sglang.launch.pair import run_pair
run_pair(pair(), log_dir=Path(sys.argv[1]), say=lambda text: print(text, flush=True))
"""


def server(name: str, **options: object) -> ServerCommand:
    flags = [text for key, value in options.items() for text in (f"--{key.replace('_', '-')}", str(value))]
    ports = ["--port", str(free_port()), "--disaggregation-bootstrap-port", str(free_port())]
    return ServerCommand(name, (sys.executable, "-c", SERVER, *ports, *flags), {})


def pair(prefill: dict[str, object] | None = None, decode: dict[str, object] | None = None) -> PairCommands:
    return PairCommands(
        server("prefill", child=1, **(prefill or {})), server("decode", child=1, **(decode or {})), server("router")
    )


def descendants() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_all_of_it_in_order(number: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), str(Path(__file__).parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        said = []
        for line in program.stdout:
            said.append(line)
            if "the pair is ready" in line:
                break
        family = psutil.Process(program.pid).children(recursive=True)
        assert len(family) >= 5  # three programs, two of them with a child
        program.send_signal(number)
        _, errors = program.communicate(timeout=60)
    assert program.returncode == 128 + number, errors
    assert "Traceback" not in errors
    assert psutil.wait_procs(family, timeout=10)[1] == []
    assert [line.split(" is healthy")[0] for line in said if " is healthy" in line][-1] == "router"
    assert "send requests to http://127.0.0.1:" in said[-1]


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("ends_after", [0.5, 4.0])
def test_when_one_dies_all_end_and_its_log_is_shown(role: str, ends_after: float, tmp_path: Path) -> None:
    # 0.5 s: while the other one still starts; 4 s: while all serve.
    other = "decode" if role == "prefill" else "prefill"
    commands = pair(**{role: {"ends_after": ends_after}, other: {"healthy_after": 1.5}})
    started = time.monotonic()
    with pytest.raises(ProcessError, match=rf"(?s){role} ended with exit status 7; its log, .*{role}.log.*the reason"):
        run_pair(commands, log_dir=tmp_path / "logs", say=lambda text: None)
    assert time.monotonic() - started < 30
    assert descendants() == []
    assert sorted(log.name for log in (tmp_path / "logs").iterdir())[:1] == ["decode.log"]


def test_servers_that_never_become_healthy_are_given_up(tmp_path: Path) -> None:
    commands = pair(decode={"healthy_after": 600})
    with pytest.raises(LaunchError, match=r"decode not healthy after 2 s \(--ready-timeout\); the log of decode, "):
        run_pair(commands, log_dir=tmp_path, ready_timeout_seconds=2.0, say=lambda text: None)
    assert descendants() == []


def test_the_router_starts_when_the_servers_behind_it_are_healthy(tmp_path: Path) -> None:
    said: list[str] = []
    with pytest.raises(ProcessError, match="prefill ended"):
        run_pair(pair(prefill={"ends_after": 4}, decode={"healthy_after": 1}), log_dir=tmp_path, say=said.append)
    healthy = [line.split()[0] for line in said if "is healthy" in line]
    assert healthy == ["prefill", "decode", "router"]


def test_a_port_in_use_is_found_before_anything_starts(tmp_path: Path) -> None:
    commands = pair()
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", commands.router.port))
        taken.listen()
        with pytest.raises(LaunchError, match=f"port {commands.router.port} of router cannot be used .*--router-port"):
            run_pair(commands, log_dir=tmp_path / "logs", say=lambda text: None)
    assert not (tmp_path / "logs").exists()


def test_a_log_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LaunchError, match=r"cannot make the log folder .*file/logs: Not a directory; name another"):
        run_pair(pair(), log_dir=tmp_path / "file" / "logs", say=lambda text: None)


def test_load_statistics_in_shared_memory_go_with_a_server_that_died(tmp_path: Path) -> None:
    shared = Path(f"/dev/shm/sglang_loads_{os.getpid()}_test")
    mapper = (
        "import mmap, sys; file = open(sys.argv.pop(1), 'w+b'); file.truncate(4096);"
        "mapped = mmap.mmap(file.fileno(), 4096);" + SERVER
    )
    commands = pair(prefill={"ends_after": 4})
    decode = commands.decode.arguments
    mapping = ServerCommand("decode", (decode[0], "-c", mapper, str(shared), *decode[3:]), {})
    with pytest.raises(ProcessError, match="prefill ended"):
        run_pair(PairCommands(commands.prefill, mapping, commands.router), log_dir=tmp_path, say=lambda text: None)
    assert not shared.exists()
