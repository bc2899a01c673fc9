"""What all tests share: hypothesis' settings, how workers share the tests, figures, programs, a small model.

Property tests try the same examples in every run, so that a change fails for what it changed; how long an example takes
depends on what else the machine does, and fails none.

``HYPOTHESIS_PROFILE=search`` tries new ones: what it finds belongs in an ``@example``.
"""

from __future__ import annotations

import os
import shutil
import string
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

_LETTERS = string.ascii_lowercase + " .\n"

settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("repeatable", settings.get_profile("untimed"), derandomize=True, database=None)
settings.register_profile("search", settings.get_profile("untimed"), print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

_FIGURE = "figure"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give pytest-xdist's workers whole files, and all tests of the real pair to the first worker, at once.

    A file's tests share what its fixtures made. Those of tests/pair share servers, and take longest.
    """
    from xdist.scheduler import LoadFileScheduling

    class FilesAndThePair(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "tests/pair" if nodeid.startswith("tests/pair/") else super()._split_scope(nodeid)

        def _assign_work_unit(self, node: Any) -> None:
            if "tests/pair" in self.workqueue:
                self.workqueue.move_to_end("tests/pair", last=False)
            super()._assign_work_unit(node)

    config.option.loadscopereorder = False  # a file with few tests may be the slowest
    return FilesAndThePair(config, log)


@pytest.fixture
def figures(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """Lines that the run prints at its end: what was measured, beside what was asserted."""
    lines: list[str] = []
    yield lines
    # A test may run in another process, from which its reports come back, and nothing else.
    request.node.user_properties.extend((_FIGURE, line) for line in lines)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the figures of the real pair."""
    reports = [report for kind in terminalreporter.stats.values() for report in kind]
    lines = [
        line
        for report in reports
        if getattr(report, "when", None) == "teardown"
        for name, line in report.user_properties
        if name == _FIGURE
    ]
    if lines:
        terminalreporter.section("figures of the real pair")
        for line in lines:
            terminalreporter.write_line(line)


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


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 3 layers with 2 KV heads of 16, random weights, whose tokens are letters."""
    import torch
    from tokenizers import Regex, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(5)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=len(_LETTERS),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        initializer_range=0.2,  # large enough that the model says something and errors show
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer = Tokenizer(WordLevel({letter: place for place, letter in enumerate(_LETTERS)}, unk_token="."))
    tokenizer.pre_tokenizer = Split(Regex("[\\s\\S]"), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=".").save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4,000 letters for that model."""
    import numpy as np

    drawn = np.random.default_rng(1).choice(list(_LETTERS[:-1]), size=4000)
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(drawn))
    return path
