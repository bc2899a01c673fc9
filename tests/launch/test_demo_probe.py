"""The demo's probe runs in another folder than the demo."""

from __future__ import annotations

from pathlib import Path

import pytest

from spectrumkv_sglang.launch.demo_probe import DemoProbe, probe_arguments
from spectrumkv_sglang.launch.servers import Device


def test_relative_paths_mean_the_same_in_every_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    files = DemoProbe(Path("build/launch.yaml"), Path("build/probe.json"), Path("build/probe.png"))
    arguments = probe_arguments(files, Path("build/models/m"), Device.CPU, "spectrumkv_tcp")
    given = {option: arguments[i + 1] for i, option in enumerate(arguments[:-1])}
    for option, name in (("--model-path", "models/m"), ("--out", "launch.yaml"), ("--json", "probe.json")):
        assert given[option] == str(tmp_path / "build" / name)
    assert given["--backend"] == "spectrumkv_tcp"
    assert given["--device"] == "cpu"
