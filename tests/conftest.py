"""What all tests share: hypothesis' settings, and programs that are not Python's.

Property tests try the same examples in every run, so that a change fails for what it changed.

``HYPOTHESIS_PROFILE=search`` tries new ones: what it finds belongs in an ``@example``.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, database=None)
settings.register_profile("search", print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


@pytest.fixture(scope="session")
def program() -> Callable[[str], str]:
    """Path of a program that `make test` installs from Debian's packages (Makefile, TEST_PROGRAMS).

    Where it could have been installed and is not, the test fails; only without the right to install does it skip.
    """

    def path_of(name: str) -> str:
        found = shutil.which(name)
        if found is None and os.geteuid() == 0 and shutil.which("apt-get"):
            pytest.fail(f"{name} is not installed: run `make test-programs`, as `make test` does")
        if found is None:
            pytest.skip(f"NOT TESTED: {name} is not installed and only root may install it (make test-programs)")
        return found

    return path_of


@pytest.fixture
def serve() -> Iterator[Callable[[Mapping[str, bytes]], str]]:
    """Serve pages by path over HTTP, and return the base address; other paths are not found."""
    servers: list[ThreadingHTTPServer] = []

    def start(pages: Mapping[str, bytes]) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                page = pages.get(self.path)
                self.send_response(404 if page is None else 200)
                self.end_headers()
                self.wfile.write(page or b"")

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
