"""The configuration file: fields at its top level, or in the ``spectrumkv:`` section of a launch config."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import yaml

from spectrumkv_sglang.errors import SpectrumKVError
from spectrumkv_sglang.profiles.profile import is_profile_path
from spectrumkv_sglang.strict_yaml import load_yaml, read_text

CONFIG_PATH_VARIABLE = "SPECTRUMKV_CONFIG"
FILE_SECTION = "spectrumkv"
LAUNCH_CONFIG_KEYS = ("format", "backend", "sglang")
"""What a launch config holds beside its ``spectrumkv:`` section; see ``launch_config``."""


class ConfigError(SpectrumKVError):
    """A configuration file or variable cannot be used; says which one, which field and what is allowed."""


def read_config_file(path: Path, fields: Collection[str]) -> dict[str, Any]:
    """Values of ``fields`` that the file states, a profile's path made relative to the file.

    Raises:
        ConfigError: names the file, the field and what to do.
    """
    try:
        document = load_yaml(read_text(path))
    except (OSError, UnicodeDecodeError) as error:  # the latter is a ValueError, too
        raise ConfigError(
            f"cannot read SpectrumKV configuration {path} (--spectrumkv-config or {CONFIG_PATH_VARIABLE}): {error}"
        ) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"SpectrumKV configuration {path} is not valid YAML: {error}") from error
    where = str(path)
    if isinstance(document, dict) and FILE_SECTION in document:
        _refuse_unknown(document, (FILE_SECTION, *LAUNCH_CONFIG_KEYS), f"{path}, beside section {FILE_SECTION}", fields)
        document, where = document[FILE_SECTION], f"{path}, section {FILE_SECTION}"
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(f"SpectrumKV configuration {where}: expected fields and values, got {document!r}")
    _refuse_unknown(document, fields, where, ())
    document = _beside(path, document)
    controller = document.get("controller")
    if isinstance(controller, dict) and isinstance(controller.get("candidates"), list):
        found = [_beside(path, item) if isinstance(item, dict) else item for item in controller["candidates"]]
        document = {**document, "controller": {**controller, "candidates": found}}
    return document


def _beside(path: Path, section: dict[str, Any]) -> dict[str, Any]:
    """``section`` of the file ``path``, a profile's path in it made relative to the file."""
    profile = section.get("profile")
    if isinstance(profile, str) and is_profile_path(profile):
        return {**section, "profile": str(path.parent / profile)}
    return section


def _refuse_unknown(
    document: Mapping[Any, Any], known: Collection[str], where: str, misplaced: Collection[str]
) -> None:
    for name in document:
        if name not in known:
            moved = f": move it into section {FILE_SECTION}" if name in misplaced else ""
            hint = moved or f"{suggestion(str(name), known)}: correct or remove it"
            raise ConfigError(f"SpectrumKV configuration {where}: unknown field {name!r}{hint}")


def suggestion(name: str, names: Collection[str]) -> str:
    """The text " (did you mean ...?)" where one of ``names`` is close to ``name``, else nothing."""
    close = difflib.get_close_matches(name, list(names), n=1)
    return f" (did you mean {close[0]}?)" if close else ""
