"""``spectrumkv launch``: servers from a launch config. Checks the whole file first, then starts them or prints how."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from spectrumkv_sglang.config import load_config
from spectrumkv_sglang.launch.pair import (
    DEFAULT_LOG_DIR,
    DEFAULT_READY_TIMEOUT_SECONDS,
    DEFAULT_ROUTER_HOST,
    DEFAULT_ROUTER_PORT,
    pair_commands,
    run_pair,
)
from spectrumkv_sglang.launch.server_commands import LaunchError, ServerCommand, server_command
from spectrumkv_sglang.launch_config import ROLES, read_launch_config

PAIR = "pair"


def launch(
    role: str,
    path: Path,
    further: Sequence[str] = (),
    *,
    strict: bool = False,
    dry_run: bool = False,
    router_host: str = DEFAULT_ROUTER_HOST,
    router_port: int = DEFAULT_ROUTER_PORT,
    log_dir: Path = DEFAULT_LOG_DIR,
    ready_timeout_seconds: float = DEFAULT_READY_TIMEOUT_SECONDS,
    say: Callable[[str], None] = print,
) -> None:
    """Start what ``role`` names from the launch config ``path``.

    A prefill or decode server takes this process's place, so that signals and the exit status are its own. A pair is
    run and watched until it ends.

    Args:
        role: "prefill", "decode" or "pair".
        further: flags for ``sglang.launch_server``, put last.
        strict: servers refuse to start where they would only drop tiers and warn.
        dry_run: print the commands and start nothing.
        router_host, router_port, log_dir, ready_timeout_seconds: of a pair.
        say: takes what the operator should see.

    Raises:
        LaunchConfigError, ConfigError: the file, or an environment variable, cannot be used.
        LaunchError: what is asked cannot be started.
        ProcessError: a program of the pair ended.
    """
    if role not in (*ROLES, PAIR):
        raise LaunchError(f"unknown role {role!r}: expected {', '.join(ROLES)} or {PAIR}")
    config = read_launch_config(path)
    load_config(path, {**os.environ, "SPECTRUMKV_STRICT": "true"} if strict else os.environ)
    if role == PAIR:
        commands = pair_commands(config, path, further, strict=strict, router_host=router_host, router_port=router_port)
        if dry_run:
            for command in commands.all:
                say(command.line)
            return
        _require_packages("sglang", "sglang_router")
        run_pair(commands, log_dir=log_dir, ready_timeout_seconds=ready_timeout_seconds, say=say)
        return
    command = server_command(config, path, role, further, strict=strict)
    if dry_run:
        say(command.line)
        return
    _require_packages("sglang")
    _become(command)


def _become(command: ServerCommand) -> None:
    print(f"spectrumkv: {command.line}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os.execve(command.arguments[0], command.arguments, {**os.environ, **command.variables})


def _require_packages(*packages: str) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            distribution = "'spectrumkv-sglang[sglang]'" if package == "sglang" else package.replace("_", "-")
            raise LaunchError(f"the package {package} is not installed beside SpectrumKV: pip install {distribution}")
