"""Other SGLang releases, for compatibility runs, without a second virtual environment.

The wheels of a release are unpacked under ``build/`` and put in front of the installed packages by ``PYTHONPATH``;
torch and everything that the release shares with the installed one comes from the environment.

``python -m spectrumkv_sglang.launch.sglang_versions 0.5.16 0.5.23`` unpacks them and prints the folders.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from spectrumkv_sglang.errors import SpectrumKVError

TESTED_VERSIONS = ("0.5.16", "0.5.20", "0.5.23")
# The first release whose decode server needs to be told where retracted requests go on a machine without CUDA.
DECODE_RETRACTION_BACKUP_SINCE = (0, 5, 20)
DEFAULT_BUILD_DIR = Path("build")

# What a release wants in other versions than the pinned environment has (requirements/cpu*.txt).
_OVERLAYS = {
    "0.5.16": (),
    "0.5.20": (),
    "0.5.23": ("transformers==5.19.0", "tokenizers==0.23.2", "openai==2.8.0", "xgrammar==0.2.7"),
}


class SGLangVersionError(SpectrumKVError):
    """A release is not known here, or could not be fetched."""


def installed_version() -> str:
    """Version of the SGLang in this environment.

    Raises:
        SGLangVersionError: none is installed.
    """
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError as error:
        raise SGLangVersionError("SGLang is not installed in this environment: run `make setup`") from error


def release_number(version: str) -> tuple[int, ...]:
    """Return ``(0, 5, 20)`` for "0.5.20" or "0.5.20.post1": the part that orders releases."""
    numbers = []
    for part in version.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def python_path(version: str | None, build_dir: Path = DEFAULT_BUILD_DIR) -> tuple[Path, ...]:
    """Return the folders to put on ``PYTHONPATH`` so that ``import sglang`` finds ``version``, fetching it if needed.

    None and the installed version need none.

    Raises:
        SGLangVersionError: a version that was never tried here, or pip fails.
    """
    if version is None or version == installed_version():
        return ()
    if version not in _OVERLAYS:
        raise SGLangVersionError(f"SGLang {version} is not one of the tested releases: {', '.join(TESTED_VERSIONS)}")
    return (fetch_release(version, build_dir),)


def fetch_release(version: str, build_dir: Path = DEFAULT_BUILD_DIR) -> Path:
    """Unpack the wheels of ``version`` into ``build_dir/sglang-<version>`` unless they are there; return the folder.

    Raises:
        SGLangVersionError: pip fails.
    """
    target = (build_dir / f"sglang-{version}").resolve()
    if target.is_dir():
        return target
    build_dir.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".sglang-{version}-", dir=build_dir))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--only-binary=:all:"]
    command += ["--target", str(scratch / "packages"), f"sglang=={version}", *_OVERLAYS.get(version, ())]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise SGLangVersionError(
                f"pip could not fetch SGLang {version} (exit status {result.returncode}):\n"
                f"{result.stderr.strip()[-2000:]}"
            )
        try:
            (scratch / "packages").rename(target)
        except OSError as error:  # another process finished first
            if not target.is_dir():
                raise SGLangVersionError(f"could not move SGLang {version} to {target}: {error}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def main(arguments: list[str] | None = None) -> int:
    """Command line: unpack releases and print their folders."""
    parser = argparse.ArgumentParser(
        prog="python -m spectrumkv_sglang.launch.sglang_versions", description="Fetch other SGLang releases."
    )
    parser.add_argument("versions", nargs="*", default=list(TESTED_VERSIONS), metavar="VERSION")
    parser.add_argument("--build-dir", type=Path, default=DEFAULT_BUILD_DIR, help="default: %(default)s")
    options = parser.parse_args(arguments)
    try:
        for version in options.versions:
            folders = python_path(version, options.build_dir)
            print(version, *(folders or ("(installed)",)))
    except SGLangVersionError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
