"""The Triton kernels equal the torch reference; run in another process, because the interpreter is chosen at import."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    ("cases", "at_least"), [("triton_against_reference.py", 113), ("triton_planes_against_reference.py", 130)]
)
def test_interpreted_kernels_equal_the_reference(cases: str, at_least: int) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    finished = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / cases)],
        env=environment,
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    passed = re.search(r"(\d+) passed", finished.stdout)
    assert passed is not None, finished.stdout
    assert int(passed.group(1)) >= at_least, finished.stdout
