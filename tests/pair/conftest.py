"""Fixtures of the end-to-end tests: a session-wide cluster of real SGLang servers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from spectrumkv_sglang.launch.model import fetch_model

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # tests say `from pair_cluster import PairCluster`

from pair_cluster import PairCluster  # noqa: E402

BUILD_DIR = HERE.parents[1] / "build"
# The first test that uses a server also waits for it; on two busy cores that takes minutes.
TIMEOUT_SECONDS = 900


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker of the tests that `make test-versions` runs."""
    config.addinivalue_line("markers", "versions: the real pair on every supported SGLang release")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is in this folder as `pair`, and give it time to start servers."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.pair)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(TIMEOUT_SECONDS))


@pytest.fixture(scope="session")
def model() -> Path:
    """Directory of the small real model."""
    return fetch_model(BUILD_DIR / "models")


@pytest.fixture(scope="session")
def cluster(model: Path) -> Iterator[PairCluster]:
    """Real servers, started on first use, stopped at the end."""
    cluster = PairCluster(
        model=model,
        log_dir=BUILD_DIR / "logs" / "tests",
        build_dir=BUILD_DIR,
    )
    try:
        yield cluster
    finally:
        cluster.close()
