"""Pages opened in a real browser."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
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
