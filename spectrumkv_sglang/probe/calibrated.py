"""The step before a probe that makes the profile to judge: `spectrumkv calibrate` for this model.

It runs in a process of its own, so that the weights that it loads are gone before the probe's server loads them.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from spectrumkv_sglang.probe.errors import ProbeError
from spectrumkv_sglang.profiles.profile import load_profile

DEFAULT_PROFILE_BUDGET = "balanced"
"""Whose budget a calibration aims at when none is given."""


def calibrated_profile_path(out: Path) -> Path:
    """Where the profile of a probe that writes ``out`` goes: ``launch.yaml`` has ``launch-profile.yaml`` beside it."""
    return out.with_name(f"{out.stem}-profile.yaml")


def calibrate_first(model_path: str, text: Path, budget: float | None, seed: int, profile: Path) -> None:
    """Measure the model's layers on ``text`` and write the best map for ``budget`` to ``profile``.

    Args:
        model_path: a local model directory.
        text: to measure on; of at least six windows, two that are measured and four that the map is checked on.
        budget: wire / native bytes; None: that of the profile `balanced`.
        seed: of the windows.
        profile: file to write.

    Raises:
        ProbeError: the model is no local directory, or the calibration ended without a profile (it has said why).
    """
    if not Path(model_path).is_dir():
        raise ProbeError(f"--calibrate needs a local model directory, --model-path {model_path} is none: download it")
    wanted = budget if budget is not None else load_profile(DEFAULT_PROFILE_BUDGET).budget
    command = [
        *(sys.executable, "-m", "spectrumkv_sglang.cli", "calibrate", "--model-path", model_path),
        *("--text", str(text), "--budget", str(wanted), "--seed", str(seed), "--out", str(profile)),
        *("--device", "cuda" if torch.cuda.is_available() else "cpu"),
    ]
    ended = subprocess.run(command, check=False)
    if ended.returncode:
        raise ProbeError(
            f"--calibrate {text}: the calibration above ended with exit code {ended.returncode}; nothing was probed"
        )
