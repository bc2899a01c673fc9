"""Command lines of the servers that a launch config describes: a prefill or decode server, and a router in front."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from spectrumkv_sglang.errors import SpectrumKVError
from spectrumkv_sglang.launch_config import LaunchConfig
from spectrumkv_sglang.launch_flags import check_managed, last_value

# SGLang's own defaults.
DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 30000
DEFAULT_BOOTSTRAP_PORT = 8998
ROUTER_GRACE_SECONDS = 10
_ANY_ADDRESS = ("0.0.0.0", "::", "[::]", "")


class LaunchError(SpectrumKVError):
    """Servers cannot be started as asked; says why and what to do."""


@dataclass(frozen=True)
class ServerCommand:
    """How to start one server.

    Attributes:
        name: "prefill", "decode" or "router".
        arguments: program and arguments.
        variables: environment variables on top of the program's own.
    """

    name: str
    arguments: tuple[str, ...]
    variables: Mapping[str, str]

    @property
    def line(self) -> str:
        """The command as a shell takes it."""
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.variables.items()]
        return " ".join([*settings, shlex.join(self.arguments)])

    @property
    def host(self) -> str:
        """Address that the server listens on."""
        return last_value(self.arguments, "--host") or DEFAULT_HOST

    @property
    def port(self) -> int:
        """Port of its HTTP server."""
        return self._port("--port", DEFAULT_PORT)

    @property
    def bootstrap_port(self) -> int:
        """Port of a prefill server's bootstrap service."""
        return self._port("--disaggregation-bootstrap-port", DEFAULT_BOOTSTRAP_PORT)

    @property
    def url(self) -> str:
        """Address for HTTP requests from this machine."""
        host = DEFAULT_HOST if self.host in _ANY_ADDRESS else self.host
        return (
            f"http://[{host}]:{self.port}" if ":" in host and not host.startswith("[") else f"http://{host}:{self.port}"
        )

    def _port(self, flag: str, default: int) -> int:
        text = last_value(self.arguments, flag)
        if text is None:
            return default
        if not (text.isascii() and text.isdigit() and 0 < int(text) < 65536):
            raise LaunchError(f"{self.name}: {flag} {text}: expected a port from 1 to 65535")
        return int(text)


def python_command(module: str, *arguments: str) -> tuple[str, ...]:
    """Command that runs a module without the working directory on Python's path.

    ``python -m`` puts it there, and a folder ``kernels/`` in it (a checkout of this project has one) would hide the
    package of that name which SGLang imports. Relative paths in arguments keep their meaning.

    Raises:
        LaunchError: Python 3.10, which cannot leave the working directory out, in a folder that has ``kernels/``.
    """
    if sys.version_info >= (3, 11):
        return (sys.executable, "-P", "-m", module, *arguments)
    if Path("kernels").is_dir():
        raise LaunchError(
            f"the folder {Path('kernels').resolve()} would hide the package `kernels` that SGLang imports: start from "
            "another folder, or use Python 3.11 or later"
        )
    return (sys.executable, "-m", module, *arguments)


def server_command(
    config: LaunchConfig,
    path: Path,
    role: str,
    further: Sequence[str] = (),
    *,
    strict: bool = False,
    defaults: Sequence[str] = (),
    environ: Mapping[str, str] = os.environ,
) -> ServerCommand:
    """Command of a prefill or decode server.

    Args:
        config: content of the launch config.
        path: its file, which the server reads its SpectrumKV configuration from.
        role: "prefill" or "decode".
        further: flags put last, so that they win.
        strict: the server refuses to start where it would only drop tiers and warn.
        defaults: flags put first, for what neither the file nor ``further`` says.
        environ: environment of the server, to leave alone what is set there.

    Raises:
        LaunchConfigError: an unknown role.
        FlagsError: a further flag contradicts the role, the backend or the file.
    """
    for argument in further:
        check_managed(argument)
    flags = [*defaults, *config.arguments(role)]
    flags += ["--disaggregation-mode", role, "--disaggregation-transfer-backend", config.backend]
    flags += ["--spectrumkv-config", os.path.abspath(path), *further]
    variables = {"SPECTRUMKV_STRICT": "true"} if strict else {}
    if last_value(flags, "--device") == "cpu" and not environ.get("SGLANG_USE_CPU_ENGINE"):
        variables["SGLANG_USE_CPU_ENGINE"] = "1"  # without it SGLang looks for a GPU, whatever --device says
    return ServerCommand(role, python_command("sglang.launch_server", *flags), variables)


def router_command(
    prefill: ServerCommand, decode: ServerCommand, *, host: str, port: int, small_load_balancer: bool
) -> ServerCommand:
    """Command of a router in front of one prefill and one decode server on this machine.

    Args:
        small_load_balancer: the one in Python that comes with the router, which needs no native code.
    """
    flags = ["--pd-disaggregation", *(["--mini-lb"] if small_load_balancer else [])]
    flags += ["--prefill", prefill.url, str(prefill.bootstrap_port), "--decode", decode.url]
    flags += ["--host", host, "--port", str(port)]
    # By default the native router takes 3 minutes to end, even when no request is running.
    flags += ["--shutdown-grace-period-secs", str(ROUTER_GRACE_SECONDS)]
    return ServerCommand("router", python_command("sglang_router.launch_router", *flags), {})
