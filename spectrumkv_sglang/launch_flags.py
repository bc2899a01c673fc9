"""SGLang's command-line flags as a mapping, and back.

A flag is kept as the operator spelt it, without its dashes, with what stood behind it:

    --tp 2 --enable-metrics --cuda-graph-bs 1 2 4      {"tp": 2, "enable-metrics": True, "cuda-graph-bs": [1, 2, 4]}

A number is kept as a number only where its text comes back unchanged. A flag given twice counts as SGLang counts it:
the last one holds.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from spectrumkv_sglang.errors import SpectrumKVError

Scalar: TypeAlias = bool | int | float | str
# True: a flag without a value. False and None: not given. A list: several values behind one flag.
FlagValue: TypeAlias = Scalar | list[Scalar] | None
Flags: TypeAlias = dict[str, FlagValue]

# `spectrumkv launch` gives these itself.
MANAGED_FLAGS = {
    "disaggregation-mode": "`spectrumkv launch prefill|decode|pair` sets it",
    "disaggregation-transfer-backend": "set it with the key `backend` at the top of the file",
    "spectrumkv-config": "`spectrumkv launch` gives the server the launch config itself",
}
_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_FLAG = re.compile(rf"--({_KEY.pattern})(?:=(.*))?", re.DOTALL)
# What names a file or folder: SGLang's flags, by the end of their names.
_FILE_FLAG = re.compile(r".*-(path|file|config)|chat-template|completion-template")
_FOLDER_FLAG = re.compile(r".*-dir")
# What argparse takes for a negative number, in all Python versions.
_NEGATIVE_NUMBER = re.compile(r"-\d+|-\d*\.\d+", re.ASCII)


class FlagsError(SpectrumKVError):
    """Flags cannot be understood, or are not the operator's to give; says which and what to do."""


def flags_from_arguments(arguments: Sequence[str]) -> Flags:
    """Turn arguments of ``sglang.launch_server`` into flags.

    Raises:
        FlagsError: an argument belongs to no flag, or SpectrumKV sets the flag itself.
    """
    given: dict[str, tuple[str | None, list[str]]] = {}
    current: str | None = None
    for argument in arguments:
        flag = _FLAG.fullmatch(argument)
        if flag is not None:
            current = flag[1]
            given.pop(current, None)  # the last one holds, at its own place
            given[current] = (flag[2], [])
        elif argument.startswith("-") and not _is_value(argument):
            raise FlagsError(
                f"{argument!r} is no SGLang flag: expected --name, --name VALUE or --name=VALUE; a value that starts "
                "with a dash is given as --name=VALUE"
            )
        elif current is None or given[current][0] is not None:
            raise FlagsError(f"{argument!r} belongs to no flag: expected --name VALUE")
        else:
            given[current][1].append(argument)
    return check_flags({key: _value(attached, values) for key, (attached, values) in given.items()})


def arguments_from_flags(flags: Mapping[str, FlagValue]) -> list[str]:
    """Turn flags into arguments of ``sglang.launch_server``, in their order.

    Raises:
        FlagsError: a key or a value is none that a command line can hold.
    """
    arguments: list[str] = []
    for key, value in check_flags(dict(flags)).items():
        if value is None or value is False:
            continue
        if value is True:
            arguments.append(f"--{key}")
        elif isinstance(value, list):
            arguments += [f"--{key}", *(_text(element) for element in value)]
        elif _is_value(_text(value)):
            arguments += [f"--{key}", _text(value)]
        else:
            arguments.append(f"--{key}={_text(value)}")
    return arguments


def last_value(arguments: Sequence[str], *names: str) -> str | None:
    """Value that SGLang takes for a flag, in any of its spellings ("--model-path", "--model"): the last one given.

    Returns None where it is not given, or has no value.
    """
    found: str | None = None
    for i, argument in enumerate(arguments):
        name, separator, attached = argument.partition("=")
        if name in names:
            following = arguments[i + 1] if i + 1 < len(arguments) else "--"
            found = attached if separator else following if _is_value(following) else None
    return found


def merged_flags(common: Flags, own: Flags) -> Flags:
    """Both servers' flags and behind them a role's own, which replace the ones of the same name."""
    return {key: value for key, value in common.items() if key not in own} | own


def with_absolute_paths(flags: Flags) -> Flags:
    """``flags`` with absolute paths, for servers that are started in another folder.

    A file's name counts as one where the file is there; else it may be a hub id, or the name of a shipped template.
    """
    return {key: _absolute(key.replace("_", "-"), value) for key, value in flags.items()}


def check_managed(argument: str) -> None:
    """Raise FlagsError if the argument is a flag that ``spectrumkv launch`` gives itself."""
    flag = _FLAG.fullmatch(argument)
    if flag is not None:
        _check_managed(flag[1])


def check_flags(flags: Any) -> Flags:
    """Return ``flags`` if they can be given to ``sglang.launch_server``; None counts as no flags.

    Raises:
        FlagsError: says which key or value cannot, and what to do.
    """
    if flags is None:
        return {}
    if not isinstance(flags, dict):
        raise FlagsError(f"expected flags and values, such as `tp: 2`, got {flags!r}")
    for key, value in flags.items():
        if not isinstance(key, str):
            raise FlagsError(f"key {key!r}: expected a flag's name: put it in quotes or remove it")
        if _KEY.fullmatch(key) is None:
            raise FlagsError(f"key {key!r}: expected a flag's name without dashes in front, such as model-path or tp")
        _check_managed(key)
        _check_value(key, value)
    return flags


def _check_managed(key: str) -> None:
    # argparse takes an unambiguous beginning for the whole flag.
    name = key.replace("_", "-")
    for managed, remedy in MANAGED_FLAGS.items():
        if managed.startswith(name) and len(name) > 1:
            raise FlagsError(f"{key} stands for --{managed}, which is not given here: remove it, {remedy}")


def _check_value(key: str, value: Any) -> None:
    if isinstance(value, list):
        if not value:
            raise FlagsError(f"{key} = []: expected at least one value; write `true` for a flag without a value")
        for element in value:
            if isinstance(element, bool) or not isinstance(element, (int, float, str)):
                raise FlagsError(f"{key}: expected a list of texts and numbers, got {element!r} in it")
            if not _is_value(_text(element)):
                raise FlagsError(f"{key}: {element!r} in a list: SGLang would take it for a flag; remove the dash")
    elif value is not None and not isinstance(value, (bool, int, float, str)):
        raise FlagsError(
            f"{key} = {value!r}: expected a text, a number, true for a flag without a value, or a list of values; put "
            "JSON and dates in quotes"
        )
    if any("\0" in element for element in (value if isinstance(value, list) else [value]) if isinstance(element, str)):
        raise FlagsError(f"{key} = {value!r}: a command line cannot hold the character NUL: remove it")


def _is_value(argument: str) -> bool:
    """Whether argparse takes an argument for a value rather than for a flag."""
    if not argument.startswith("-") or argument == "-":
        return True
    if _NEGATIVE_NUMBER.fullmatch(argument):
        return True
    return " " in argument and "=" not in argument


def _text(value: Scalar) -> str:
    return repr(value) if isinstance(value, float) else str(value)


def _value(attached: str | None, values: list[str]) -> FlagValue:
    if attached is not None:
        return _scalar(attached)
    if not values:
        return True
    return _scalar(values[0]) if len(values) == 1 else [_scalar(value) for value in values]


def _scalar(text: str) -> Scalar:
    """A number where its text comes back unchanged, else the text."""
    for kind in (int, float):
        try:
            number = kind(text)
        except ValueError:
            continue
        if math.isfinite(number) and _text(number) == text:
            return number
    return text


def _absolute(name: str, value: FlagValue) -> FlagValue:
    if not isinstance(value, str):
        return value
    is_path = _FOLDER_FLAG.fullmatch(name) or (_FILE_FLAG.fullmatch(name) and os.path.exists(value))
    return os.path.abspath(value) if is_path else value
