"""What CPU servers find on their path: enough for SGLang's imports, and nothing that pretends to compute."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from spectrumkv_sglang.launch.servers import CPU_SHIMS


def run_with_shims(code: str, *folders: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (CPU_SHIMS, *folders)))}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)


def test_kernel_names_import_and_raise_when_called() -> None:
    result = run_with_shims(
        "from sgl_kernel import some_kernel_cpu\n"
        "from sgl_kernel.mamba import another_cpu\n"
        "import sgl_kernel\n"
        "print(hasattr(sgl_kernel, 'flash_attention'))\n"
        "some_kernel_cpu(1)"
    )
    assert result.stdout == "False\n"
    assert "sgl_kernel.some_kernel_cpu was called" in result.stderr


def test_torchvision_imports_beside_a_cpu_build_of_torch() -> None:
    result = run_with_shims("import torchvision; print(torchvision.__name__)")
    assert (result.stdout, result.returncode) == ("torchvision\n", 0), result.stderr


def test_page_ids_stay_on_the_host_in_releases_that_would_pin_them(tmp_path: Path) -> None:
    package = tmp_path / "sglang/srt/disaggregation/mooncake"
    package.mkdir(parents=True)
    for folder in (package, *list(package.parents)[:3]):
        (folder / "__init__.py").touch()
    (package / "conn.py").write_text("class MooncakeKVSender:\n    supports_host_tensor_indices = True\n")
    result = run_with_shims(
        "from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender as sender\n"
        "print(sender.supports_host_tensor_indices, type('Sub', (sender,), {}).supports_host_tensor_indices)",
        tmp_path,
    )
    assert result.stdout == "False False\n", result.stderr


def test_another_sitecustomize_still_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('the other one ran')\n")
    assert run_with_shims("", tmp_path).stdout == "the other one ran\n"


def test_nothing_heavy_is_imported_at_start() -> None:
    result = run_with_shims("import sys; print('torch' in sys.modules, 'sgl_kernel' in sys.modules)")
    assert result.stdout == "False False\n"
