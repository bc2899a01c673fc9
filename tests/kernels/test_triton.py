"""The Triton kernels equal the torch reference; run in other processes, because the interpreter is chosen at import."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CASES = {"triton_against_reference.py": 70, "triton_planes_against_reference.py": 74}
"""How many of each file must pass at least."""
TIMEOUT_SECONDS = 1500


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[subprocess.Popen[bytes], Path]]]:
    """Both files, side by side: each takes some minutes of one core."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    logs = tmp_path_factory.mktemp("interpreted")
    runs = {}
    for cases in CASES:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / cases)]
        with (logs / cases).open("wb") as log:
            runs[cases] = (
                subprocess.Popen(command, env=environment, cwd=HERE.parents[1], stdout=log, stderr=subprocess.STDOUT),
                logs / cases,
            )
    yield runs
    for process, _ in runs.values():
        process.kill()
        process.wait()


@pytest.mark.timeout(TIMEOUT_SECONDS + 60)
@pytest.mark.parametrize("cases", CASES)
def test_interpreted_kernels_equal_the_reference(
    interpreted: dict[str, tuple[subprocess.Popen[bytes], Path]], cases: str
) -> None:
    process, log = interpreted[cases]
    code = process.wait(TIMEOUT_SECONDS)
    said = log.read_text()
    assert code == 0, said
    passed = re.search(r"(\d+) passed", said)
    assert passed is not None, said
    assert int(passed.group(1)) >= CASES[cases], said
