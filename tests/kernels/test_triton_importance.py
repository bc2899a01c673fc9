"""The importance kernels equal the torch reference; in another process, as the interpreter is chosen at import."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("triton_importance_against_reference.py")
TIMEOUT_SECONDS = 600


@pytest.mark.timeout(TIMEOUT_SECONDS + 60)
def test_interpreted_kernels_agree_with_the_reference() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    finished = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CASES)],
        env=environment,
        cwd=CASES.parents[2],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    passed = re.search(r"(\d+) passed", finished.stdout)
    assert passed is not None, finished.stdout
    assert int(passed.group(1)) >= 33, finished.stdout
