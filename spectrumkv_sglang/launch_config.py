"""Launch config: one YAML file with what a probe found out and how the servers of a model are started.

    format: 1
    backend: spectrumkv            # or spectrumkv_tcp; the value of --disaggregation-transfer-backend
    sglang:
      common: {model-path: /models/m, tp: 2}        # flags of both servers, spelt as SGLang does, without dashes
      prefill: {port: 30000}                        # flags of one role; the same key in common does not count then
      decode: {port: 30001, disable-overlap-schedule: true}
    spectrumkv: {profile: k8v4, budget: 0.55}       # fields of the SpectrumKV configuration, the probe's record too

``spectrumkv probe --out`` writes it, ``spectrumkv launch`` starts servers with it, and ``--spectrumkv-config`` takes it
as it is. How flags and their values turn into a command line and back is in ``launch_flags``.
"""

from __future__ import annotations

import difflib
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, get_args

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import PydanticSerializationError

from spectrumkv_sglang.errors import SpectrumKVError
from spectrumkv_sglang.launch_flags import Flags, FlagsError, arguments_from_flags, check_flags, merged_flags
from spectrumkv_sglang.strict_yaml import load_yaml, read_text

FORMAT = 1
ROLES = ("prefill", "decode")
Backend: TypeAlias = Literal["spectrumkv", "spectrumkv_tcp"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)
_LINE_ENDS = ("\x85", "\u2028", "\u2029", "\ufeff")
_HEADER = """\
# Launch config of SpectrumKV for SGLang. Start servers with: spectrumkv launch prefill|decode|pair --config THIS_FILE
# Flags under sglang: are SGLang's own and yours to change. Another model, or other values under spectrumkv: than the
# probe judged, need `spectrumkv probe` again; until then servers use the tiers high and mid only.
"""


class LaunchConfigError(SpectrumKVError):
    """A launch config cannot be read, used or written; says which file and key, what is expected and what to do."""


def _checked(flags: Any) -> Any:
    try:
        return check_flags(flags)
    except FlagsError as error:
        raise ValueError(str(error)) from error


def _named_fields(section: Any) -> Any:
    for name in section if isinstance(section, dict) else ():
        if not isinstance(name, str):
            raise ValueError(f"expected fields with names, got {name!r}: put it in quotes or remove it")
    return section


RoleFlags = Annotated[Flags, BeforeValidator(_checked)]


class SGLangFlags(BaseModel):
    """Flags of ``sglang.launch_server``, without dashes: those of both servers and those of each role."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    common: RoleFlags = Field(default_factory=dict, description="flags of both servers")
    prefill: RoleFlags = Field(default_factory=dict, description="flags of the prefill server")
    decode: RoleFlags = Field(default_factory=dict, description="flags of the decode server")


class LaunchConfig(BaseModel):
    """The content of a launch config; see the module.

    ``spectrumkv`` holds the fields of ``SpectrumKVConfig`` as they stand in the file; ``config.load_config`` checks
    them.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal[1] = Field(default=1, description=f"version of this file's layout: {FORMAT}")
    backend: Backend = Field(
        default="spectrumkv", description="spectrumkv (RDMA, as SGLang's mooncake) or spectrumkv_tcp (as mooncake_tcp)"
    )
    sglang: SGLangFlags = Field(description="sections common, prefill and decode with SGLang's flags")
    spectrumkv: Annotated[dict[str, Any], BeforeValidator(_named_fields)] = Field(
        description="fields of the SpectrumKV configuration"
    )

    def flags(self, role: str) -> Flags:
        """Flags of one server: those of both, then those of its role, which replace the ones of the same name.

        Raises:
            LaunchConfigError: ``role`` is neither prefill nor decode.
        """
        if role not in ROLES:
            raise LaunchConfigError(f"unknown role {str(role)!r}: expected {' or '.join(ROLES)}")
        return merged_flags(self.sglang.common, self.sglang.prefill if role == "prefill" else self.sglang.decode)

    def arguments(self, role: str) -> list[str]:
        """The flags of :meth:`flags` as the arguments of ``sglang.launch_server``.

        Raises:
            LaunchConfigError: ``role`` is neither prefill nor decode.
        """
        return arguments_from_flags(self.flags(role))


# ---- reading -----------------------------------------------------------------------------------------------------


def read_launch_config(path: str | Path) -> LaunchConfig:
    """Read a launch config and check everything in it but the fields of ``spectrumkv:``.

    Raises:
        LaunchConfigError: names the file, the key, what is expected and what to do.
    """
    path = Path(path)
    document = _load_document(path)
    if not isinstance(document, dict) or "format" not in document:
        raise LaunchConfigError(
            f"{path} is no launch config: expected the keys format, sglang and spectrumkv; make one with `spectrumkv "
            f"probe --model-path MODEL --out {path}`"
        )
    found = document["format"]
    if type(found) is not int or found != FORMAT:
        newer = type(found) is int and found > FORMAT
        remedy = "use a SpectrumKV as new as the one that wrote it, or probe again" if newer else "probe again"
        raise LaunchConfigError(
            f"{path}: format = {found!r}, expected {FORMAT}: {remedy} with `spectrumkv probe --model-path MODEL "
            f"--out {path}`"
        )
    try:
        return LaunchConfig.model_validate(document)
    except ValidationError as error:
        problems = dict.fromkeys(_describe(problem) for problem in error.errors())
        raise LaunchConfigError(f"{path}: " + "; ".join(problems)) from error


def _load_document(path: Path) -> Any:
    try:
        text = read_text(path)
    except FileNotFoundError as error:
        raise LaunchConfigError(
            f"there is no launch config {path}: make one with `spectrumkv probe --model-path MODEL --out {path}`"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchConfigError(f"cannot read launch config {path}: {error}") from error
    try:
        return load_yaml(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise LaunchConfigError(
            f"launch config {path} is not valid YAML: {error}; correct it or probe again"
        ) from error


def _describe(problem: Any) -> str:
    """One validation problem, told to an operator."""
    location = [str(part) for part in problem["loc"]]
    key = ".".join(location[:2] if location[0] == "sglang" else location[:1])
    if problem["type"] == "extra_forbidden":
        known = SGLangFlags.model_fields if len(location) > 1 else LaunchConfig.model_fields
        close = difflib.get_close_matches(location[-1], list(known), n=1)
        suggestion = f" (did you mean {close[0]}?)" if close else ""
        return f"unknown section {key}{suggestion}: expected {', '.join(known)}; correct or remove it"
    if problem["type"] == "missing":
        about = LaunchConfig.model_fields[location[0]].description
        return f"{key} is missing: add the section ({about}) or probe again"
    if problem["type"] == "value_error":
        return f"{key}: {problem['msg'].removeprefix('Value error, ')}"
    fields = SGLangFlags.model_fields if len(location) > 1 else LaunchConfig.model_fields
    about = fields[location[min(len(location), 2) - 1]].description
    return f"{key} = {problem['input']!r}: expected {about}"


# ---- writing -----------------------------------------------------------------------------------------------------


def check_writable(path: str | Path) -> None:
    """Find out, before any work, whether ``replace_file`` can write ``path``. Changes nothing.

    Raises:
        LaunchConfigError: the folder is missing or cannot be written to, or ``path`` is there and is no ordinary
            file or is write-protected.
    """
    target = Path(os.path.realpath(path))
    try:
        scratch, descriptor = _create_beside(target, _mode_of(target))
        os.close(descriptor)
        scratch.unlink()
    except OSError as error:
        raise _cannot_write(path, error) from error


def write_launch_config(path: str | Path, config: LaunchConfig) -> None:
    """Write a launch config in one step: a reader sees the old file or the new one, never a part.

    A link is followed and the permissions of a file that is there are kept. Comments in it are lost.

    Raises:
        LaunchConfigError: it cannot be written; what was there before is unchanged and nothing else is left behind.
    """
    try:
        content = (_HEADER + _to_yaml(config)).encode("utf-8")
    except (yaml.YAMLError, PydanticSerializationError) as error:
        raise LaunchConfigError(f"{path}: a value cannot be written as YAML: {error}") from error
    replace_file(path, content)


def replace_file(path: str | Path, content: bytes) -> None:
    """Write any file as ``write_launch_config`` writes a launch config.

    Raises:
        LaunchConfigError: as there.
    """
    target = Path(os.path.realpath(path))
    try:
        scratch, descriptor = _create_beside(target, _mode_of(target))
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(scratch, target)
        except BaseException:
            with suppress(FileNotFoundError):
                scratch.unlink()
            raise
        _sync_folder(target.parent)
    except OSError as error:
        raise _cannot_write(path, error) from error


def _to_yaml(config: LaunchConfig) -> str:
    document = config.model_dump(mode="json")
    return yaml.dump(
        document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False, width=10**6
    )


class _Dumper(yaml.SafeDumper):
    """Escapes the line ends of Unicode, which come back as spaces or vanish where they stand as they are."""

    def represent_str(self, data: str) -> Any:
        style = '"' if any(end in data for end in _LINE_ENDS) else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


_Dumper.add_representer(str, _Dumper.represent_str)


def _mode_of(target: Path) -> int | None:
    """Permissions of the file that is there; None for no file.

    Raises:
        OSError: it is no ordinary file, or is write-protected.
    """
    try:
        found = target.stat()
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError("it is a folder")
    if not stat.S_ISREG(found.st_mode):
        raise OSError("it is no ordinary file")
    if not found.st_mode & 0o222 or not os.access(target, os.W_OK):
        raise PermissionError("the file is write-protected")
    return stat.S_IMODE(found.st_mode)


def _create_beside(target: Path, mode: int | None) -> tuple[Path, int]:
    """Create a new file in the folder of ``target``, of the permissions ``mode`` (None: an ordinary new file's)."""
    scratch = target.parent / f".{target.name[:50]}.{secrets.token_hex(8)}.tmp"
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    if mode is not None:
        os.fchmod(descriptor, mode)
    return scratch, descriptor


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _cannot_write(path: str | Path, error: OSError) -> LaunchConfigError:
    folder = Path(os.path.realpath(path)).parent
    reason = error.strerror or str(error)
    if not folder.is_dir():
        reason = f"{folder} is no folder" if folder.exists() else f"the folder {folder} does not exist"
    return LaunchConfigError(f"cannot write {path}: {reason}; name a file that can be written")
