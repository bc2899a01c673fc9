"""Are the packages there, and of versions that work together?"""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Iterable

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from spectrumkv_sglang.doctor.findings import Section
from spectrumkv_sglang.doctor.isolated import run_python
from spectrumkv_sglang.sglang_compat import NEWEST_SGLANG, OLDEST_SGLANG, version_supported
from spectrumkv_sglang.version import __version__

PLUGIN_GROUP = "sglang.srt.plugins"
PLUGIN_NAME = "spectrumkv"
MOONCAKE_PREFIX = "mooncake-transfer-engine"
# Up to 0.3.11 a peer that reaches Mooncake's port may read and write any byte of the process.
OLDEST_MOONCAKE = Version("0.3.12")


def installed_version(distribution: str) -> str | None:
    """Version of an installed distribution, None when it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def installed_versions() -> dict[str, str]:
    """Versions of this package, Python and what it runs on, by name; "not installed" where there is none."""
    names = ("sglang", "torch", "triton")
    return {
        "spectrumkv-sglang": __version__,
        "python": platform.python_version(),
        **{name: installed_version(name) or "not installed" for name in names},
        **(dict(_installed_mooncakes()) or {MOONCAKE_PREFIX: "not installed"}),
    }


def check_versions(allowed_plugins: str | None) -> Section:
    """Python, torch, Triton, SGLang, Mooncake and this package; `allowed_plugins` is the value of SGLANG_PLUGINS."""
    section = Section("versions")
    section.ok("python", f"{platform.python_version()} ({sys.executable})")
    _check_plugin(section, allowed_plugins)
    _check_torch(section)
    _check_sglang(section, installed_version("sglang"))
    _check_mooncake(section, _installed_mooncakes())
    return section


def _check_plugin(section: Section, allowed_plugins: str | None) -> None:
    entry_points = importlib.metadata.entry_points(group=PLUGIN_GROUP)
    if not any(entry_point.name == PLUGIN_NAME for entry_point in entry_points):
        section.problem(
            "spectrumkv-sglang",
            f"{__version__}, but its SGLang plugin is not registered",
            "install the package (pip install spectrumkv-sglang) instead of putting its source on PYTHONPATH",
        )
        return
    allowed = {name.strip() for name in (allowed_plugins or "").split(",") if name.strip()}
    if allowed and PLUGIN_NAME not in allowed:
        section.problem(
            "spectrumkv-sglang",
            f"{__version__}, but SGLANG_PLUGINS={allowed_plugins} keeps SGLang from loading it",
            f"add {PLUGIN_NAME} to SGLANG_PLUGINS, or unset it",
        )
        return
    section.ok("spectrumkv-sglang", f"{__version__}, plugin registered")


def _check_torch(section: Section) -> None:
    torch = installed_version("torch")
    if torch is None:
        section.problem("torch", "not installed", "install SGLang, which brings the torch that it needs")
        return
    section.ok("torch", torch)
    triton = installed_version("triton")
    if triton is None:
        section.info("triton", "not installed: needed on GPUs only", "on a GPU host install the Triton of your torch")
    else:
        section.ok("triton", triton)


def _check_sglang(section: Section, installed: str | None) -> None:
    supported = f"SGLang {_dotted(OLDEST_SGLANG)} to {_dotted(NEWEST_SGLANG)}"
    if installed is None:
        section.problem("sglang", "not installed", f"install {supported}: pip install 'spectrumkv-sglang[sglang]'")
        return
    version = _parsed(installed)
    if version_supported(installed):
        section.ok("sglang", installed)
    elif version is None:
        section.warning("sglang", f"{installed}: not a released version", f"tested with {supported}")
    elif version.release < OLDEST_SGLANG:
        section.problem("sglang", f"{installed} is too old", f"install {supported}")
    else:
        section.warning(
            "sglang",
            f"{installed} is newer than the versions tested",
            f"tested with {supported}; when all extension points below are found it may well work",
        )


def _installed_mooncakes() -> list[tuple[str, str]]:
    """(distribution, version) of every Mooncake flavour that is installed."""
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        name = canonicalize_name(distribution.metadata["Name"] or "")
        if name.startswith(MOONCAKE_PREFIX):
            found.setdefault(name, distribution.version)
    return sorted(found.items())


def _check_mooncake(section: Section, installed: Iterable[tuple[str, str]]) -> None:
    flavours = list(installed)
    if not flavours:
        section.problem(
            "mooncake",
            "not installed",
            "install one flavour: pip install 'spectrumkv-sglang[mooncake]' (CUDA 12), "
            "[mooncake-cuda13] or [mooncake-non-cuda]",
        )
        return
    named = ", ".join(f"{name} {version}" for name, version in flavours)
    if len(flavours) > 1:
        section.problem(
            "mooncake",
            f"several flavours are installed over each other: {named}",
            "uninstall all of them, then install one",
        )
        return
    name, installed_mooncake = flavours[0]
    version = _parsed(installed_mooncake)
    if version is not None and version < OLDEST_MOONCAKE:
        section.problem(
            "mooncake",
            f"{named}: up to 0.3.11 a peer can read and write any memory of the process",
            f"pip install '{name}>={OLDEST_MOONCAKE}'",
        )
        return
    loaded = run_python("import mooncake.engine")
    if not loaded.succeeded:
        section.problem(
            "mooncake",
            f"{named} is installed but cannot be loaded: {loaded.last_line}",
            "install the flavour that fits this host (non-cuda without a GPU) and the system libraries "
            "listed under transport",
        )
        return
    section.ok("mooncake", named)


def _dotted(release: tuple[int, ...]) -> str:
    return ".".join(str(part) for part in release)


def _parsed(version: str) -> Version | None:
    try:
        parsed = Version(version)
    except InvalidVersion:
        return None
    return None if parsed.is_devrelease and parsed.release == (0, 0, 0) else parsed
