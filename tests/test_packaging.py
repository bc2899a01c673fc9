"""What `pip install` gets: every module, the shipped profiles, the plugin entry point, and no heavy dependency."""

from __future__ import annotations

import configparser
import email.parser
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from pathlib import Path

import pytest

from spectrumkv_sglang.version import __version__

ROOT = Path(__file__).parents[1]
# Folder of the repository -> where it is installed.
INSTALLED_AS = {
    "spectrumkv_sglang": "spectrumkv_sglang",
    "kernels": "spectrumkv_sglang/kernels",
    "launch": "spectrumkv_sglang/launch",
}
HEAVY = {"torch", "triton", "sglang", "transformers", "mooncake-transfer-engine"}


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Source archive built from a copy of the tree: setuptools leaves build folders in the tree that it builds."""
    tree = tmp_path_factory.mktemp("tree")
    for folder in INSTALLED_AS:
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, tree)
    code = "import sys; from setuptools import build_meta; print(build_meta.build_sdist(sys.argv[1]))"
    subprocess.run(
        [sys.executable, "-c", code, str(tree / "dist")], cwd=tree, check=True, capture_output=True, timeout=120
    )
    (archive,) = (tree / "dist").glob("*.tar.gz")
    return archive


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Wheel built by pip from the source archive, without network."""
    folder = tmp_path_factory.mktemp("wheel")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", str(folder / "out"), str(source)],
        check=True,
        capture_output=True,
        timeout=180,
    )
    (built,) = (folder / "out").glob("*.whl")
    assert built.name.endswith("-py3-none-any.whl")
    return zipfile.ZipFile(built)


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    return email.parser.Parser().parsestr(wheel.read(name).decode())


def test_the_wheel_holds_every_module_and_data_file(wheel: zipfile.ZipFile) -> None:
    expected = {
        f"{target}/{file.relative_to(ROOT / folder).as_posix()}"
        for folder, target in INSTALLED_AS.items()
        for pattern in ("**/*.py", "**/*.yaml", "**/*.txt", "**/*.html", "**/py.typed")
        for file in (ROOT / folder).glob(pattern)
    }
    installed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert expected - installed == set(), "add the package or file to [tool.setuptools] in pyproject.toml"
    assert installed - expected == set()


def test_the_wheel_holds_what_the_product_cannot_miss(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    assert "spectrumkv_sglang/kernels/precision.py" in names
    assert "spectrumkv_sglang/launch/__init__.py" in names
    assert "spectrumkv_sglang/profiles/shipped/balanced.yaml" in names
    assert "spectrumkv_sglang/py.typed" in names
    assert not any(name.split("/")[0] in {"kernels", "launch", "tests"} for name in names)


def test_the_entry_points_are_declared_and_exist(wheel: zipfile.ZipFile) -> None:
    (name,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    declared = configparser.ConfigParser(delimiters="=")
    declared.read_string(wheel.read(name).decode())
    assert dict(declared["sglang.srt.plugins"]) == {"spectrumkv": "spectrumkv_sglang.plugin:register"}
    assert dict(declared["console_scripts"]) == {"spectrumkv": "spectrumkv_sglang.cli:main"}
    for target in ("spectrumkv_sglang.plugin:register", "spectrumkv_sglang.cli:main"):
        module, function = target.split(":")
        source = wheel.read(module.replace(".", "/") + ".py").decode()
        assert re.search(rf"^def {function}\(", source, re.MULTILINE)


def test_an_installation_is_light_and_extras_bring_the_rest(metadata: Message) -> None:
    requirements = metadata.get_all("Requires-Dist") or []
    core = {re.split(r"[^A-Za-z0-9._-]", line)[0] for line in requirements if "extra ==" not in line}
    assert core
    assert not any(name.startswith(tuple(HEAVY)) for name in core)
    assert set(metadata.get_all("Provides-Extra") or []) >= {
        "sglang",
        "mooncake",
        "mooncake-cuda13",
        "mooncake-non-cuda",
    }


def test_the_version_is_the_one_in_the_code(metadata: Message) -> None:
    assert metadata["Version"] == __version__


def test_the_licence_travels_with_the_wheel(wheel: zipfile.ZipFile, metadata: Message) -> None:
    assert metadata["License-Expression"] == "Apache-2.0"
    (name,) = [name for name in wheel.namelist() if name.endswith("/licenses/LICENSE")]
    assert b"Apache License" in wheel.read(name)


def test_every_core_dependency_is_explained(metadata: Message) -> None:
    explained = (ROOT / "docs" / "dependencies.md").read_text()
    for line in metadata.get_all("Requires-Dist") or []:
        name = re.split(r"[^A-Za-z0-9._-]", line)[0]
        assert f"`{name}`" in explained, f"docs/dependencies.md does not explain {name}"


def test_the_command_starts_without_importing_torch_or_sglang() -> None:
    code = "import sys, spectrumkv_sglang.cli; print([m for m in ('torch', 'sglang', 'mooncake') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
