"""A server's /metrics by our own metrics, and pages opened in a real browser."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

CHROMIUM_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND",
)  # fmt: skip


@pytest.fixture
def chromium(program: Callable[[str], str], tmp_path: Path) -> Callable[..., str]:
    """Open a page and return what the browser printed; further flags say what."""

    def opened(page: Path, *flags: str) -> str:
        profile = f"--user-data-dir={tmp_path / 'browser'}"
        command = [program("chromium"), *CHROMIUM_FLAGS, profile, *flags, page.as_uri()]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=200).stdout

    return opened


@pytest.fixture
def serve() -> Iterator[Callable[[bytes], str]]:
    """Serve bytes as /metrics and return the base address."""
    servers: list[ThreadingHTTPServer] = []

    def start(content: bytes) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                known = self.path == "/metrics"
                self.send_response(200 if known else 404)
                self.end_headers()
                self.wfile.write(content if known else b"")

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()
