"""Probe a model unless its launch config is there already, then serve it as a pair on this machine.

    python -m spectrumkv_sglang.launch.probe_then_launch --model-path M [--out launch.yaml] [-- SGLang flags]

The probe runs before anything serves, and again only when the model, the policy or the flags are not those that the
launch config was made for. It alone decides which tiers are served: where it does not allow the low tier, the pair
starts all the same, with the tiers high and mid. ``--probe-only`` is for what starts servers by other means, such as
systemd units.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from spectrumkv_sglang.config import SpectrumKVConfig, load_config
from spectrumkv_sglang.errors import SpectrumKVError
from spectrumkv_sglang.launch.launcher import launch
from spectrumkv_sglang.launch.pair import DEFAULT_LOG_DIR, DEFAULT_ROUTER_HOST, DEFAULT_ROUTER_PORT
from spectrumkv_sglang.launch.probe_process import PROBE_EXIT_CODES, run_to_end
from spectrumkv_sglang.launch.processes import stopping_on_signals
from spectrumkv_sglang.launch.server_commands import LaunchError, python_command
from spectrumkv_sglang.launch_config import (
    BACKENDS,
    LaunchConfig,
    check_writable,
    read_launch_config,
    write_launch_config,
)
from spectrumkv_sglang.launch_flags import arguments_from_flags, flags_from_arguments, last_value, with_absolute_paths
from spectrumkv_sglang.profiles.profile import load_profile
from spectrumkv_sglang.sglang_compat import ServedModel
from spectrumkv_sglang.verification.fingerprint import FingerprintError
from spectrumkv_sglang.verification.record import profile_digest
from spectrumkv_sglang.verification.served import served_fingerprint

DEFAULT_OUT = Path("launch.yaml")
_OUTCOMES = {
    "low_allowed": "the probe allows the low tier",
    "low_not_allowed": "the probe does not allow the low tier: servers use the tiers high and mid",
    "inconclusive": "the probe was inconclusive: servers use the tiers high and mid",
}


@dataclass(frozen=True)
class Wanted:
    """What is to be probed and served.

    Attributes:
        model_path: directory, weight file or hub id.
        profile: name or path; None: the one of the launch config, or the probe's default.
        budget: wire bytes / native bytes; None likewise.
        backend: spectrumkv or spectrumkv_tcp; None likewise.
        probe_options: further options of `spectrumkv probe`; they do not decide whether to probe.
        engine: SGLang's flags for the probe and both servers.
    """

    model_path: str
    profile: str | None = None
    budget: float | None = None
    backend: str | None = None
    probe_options: tuple[str, ...] = ()
    engine: tuple[str, ...] = ()


def reason_to_probe(path: Path, wanted: Wanted) -> str | None:
    """Why the launch config ``path`` does not answer for what is wanted; None when it does.

    Raises:
        SpectrumKVError: the file is there but cannot be used.
    """
    if not path.exists():
        return f"there is no {path} yet"
    config = read_launch_config(path)
    settings = load_config(path, {})  # what the file says: a server compares its environment itself
    return _other_flags(config, wanted) or _other_policy(settings, wanted) or _other_model(config, settings)


def ensure_probed(path: Path, wanted: Wanted, *, reprobe: bool = False) -> None:
    """Have a launch config for what is wanted in ``path``, by ``spectrumkv probe`` if need be.

    Of several that do this for one folder at once, one probes and the others wait for it.

    Args:
        reprobe: probe whatever is there.

    Raises:
        LaunchConfigError: ``path`` cannot be written.
        LaunchError: what is there cannot be used, or the probe failed.
    """
    check_writable(path)
    with _alone_in(path.resolve().parent):
        try:
            reason = "--reprobe" if reprobe else reason_to_probe(path, wanted)
        except SpectrumKVError as error:
            raise LaunchError(f"{error}; with --reprobe {path} is replaced") from error
        if reason is None:
            print(f"{path} holds the probe of this very model: not probing again", flush=True)
            _use_backend(path, wanted.backend)
        else:
            print(f"probing {wanted.model_path}: {reason}", flush=True)
            _run_probe(path, wanted)
    read_launch_config(path)
    record = load_config(path, {}).probe
    print(_OUTCOMES[record.verdict] if record is not None else f"{path} holds no probe record", flush=True)


def _run_probe(path: Path, wanted: Wanted) -> None:
    arguments = ["probe", "--model-path", wanted.model_path, "--out", str(path)]
    arguments += ["--profile", wanted.profile] if wanted.profile is not None else []
    arguments += ["--budget", repr(wanted.budget)] if wanted.budget is not None else []
    arguments += ["--backend", wanted.backend] if wanted.backend is not None else []
    arguments += [*wanted.probe_options, *wanted.engine]
    code = run_to_end(python_command("spectrumkv_sglang.cli", *arguments))
    if code not in PROBE_EXIT_CODES:
        raise LaunchError(f"spectrumkv probe ended with exit code {code}, see above: nothing is started")


def _use_backend(path: Path, backend: str | None) -> None:
    """Write another backend into the launch config; it changes nothing of what was probed."""
    config = read_launch_config(path)
    if backend is not None and backend != config.backend:
        write_launch_config(path, config.model_copy(update={"backend": backend}))


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Hold the folder's lock; waits for whoever holds it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _other_flags(config: LaunchConfig, wanted: Wanted) -> str | None:
    """What was probed with another flag than is wanted now; flags of prefill and decode alone do not count."""
    probed = config.sglang.common
    asked_for = with_absolute_paths(flags_from_arguments(("--model-path", wanted.model_path, *wanted.engine)))
    for key, value in asked_for.items():
        asked = arguments_from_flags({key: value})
        found = arguments_from_flags({key: probed.get(key)})
        same_path = key == "model-path" and os.path.realpath(str(value)) == os.path.realpath(str(probed.get(key)))
        if asked != found and not same_path:
            return f"it was made with {' '.join(found) or f'no --{key}'}, now {' '.join(asked)} is asked for"
    return None


def _other_policy(settings: SpectrumKVConfig, wanted: Wanted) -> str | None:
    if wanted.profile is not None:
        profile = load_profile(wanted.profile)
        if profile_digest(profile) != profile_digest(settings.loaded_profile):
            return f"it holds the profile {settings.profile}, now {wanted.profile} is asked for"
    # Where the low tier is not allowed, the file serves a larger budget than was asked for and probed.
    probed = settings.probe.policy.budget if settings.probe is not None else None
    if wanted.budget is not None and wanted.budget not in (settings.budget, probed):
        return f"it holds the budget {settings.budget:g}, now {wanted.budget:g} is asked for"
    return None


def _other_model(config: LaunchConfig, settings: SpectrumKVConfig) -> str | None:
    record = settings.probe
    if record is None:
        return "it holds no probe record"
    if record.edited:
        return "its probe record was edited"
    flags = config.arguments("prefill")
    model = ServedModel(
        path=last_value(flags, "--model-path", "--model") or "",
        quantization=last_value(flags, "--quantization"),
        revision=last_value(flags, "--revision"),
        download_dir=last_value(flags, "--download-dir"),
    )
    try:
        served = served_fingerprint(model, record.fingerprint.dtype)
    except FingerprintError as error:
        return str(error)
    differences = [*record.fingerprint.differences(served), *record.policy.differences(settings.probed_policy())]
    return "; ".join(differences) or None


def argument_parser() -> argparse.ArgumentParser:
    """Parser of this module's command line."""
    parser = argparse.ArgumentParser(
        prog="python -m spectrumkv_sglang.launch.probe_then_launch",
        description="Probe a model unless that was done already, then serve it as a prefill/decode pair.",
        allow_abbrev=False,
    )
    parser.add_argument("--model-path", required=True, metavar="M", help="directory of the model, or its hub id")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, metavar="FILE", help="launch config; %(default)s")
    parser.add_argument("--profile", metavar="P", help="precision profile to probe and serve")
    parser.add_argument("--budget", type=float, metavar="B", help="wire bytes / native bytes")
    parser.add_argument("--backend", choices=BACKENDS, help="RDMA or TCP; as the launch config says by default")
    parser.add_argument(
        "--probe-options", default="", metavar="'OPTION ...'", help="further options of `spectrumkv probe`, in quotes"
    )
    parser.add_argument("--reprobe", action="store_true", help="probe again, whatever the launch config says")
    parser.add_argument("--probe-only", action="store_true", help="start no server")
    parser.add_argument("--strict", action="store_true", help="refuse to serve a model that is not the probed one")
    parser.add_argument("--router-host", default=DEFAULT_ROUTER_HOST, help="address of the router; %(default)s")
    parser.add_argument("--router-port", type=int, default=DEFAULT_ROUTER_PORT, help="its port; %(default)s")
    parser.add_argument("--log-dir", type=Path, default=DEFAULT_LOG_DIR, help="folder for logs; %(default)s")
    parser.add_argument("engine", nargs="*", metavar="-- SGLANG_FLAG", help="SGLang flags for probe and servers")
    return parser


def _wanted(options: argparse.Namespace) -> Wanted:
    try:
        probe_options = shlex.split(options.probe_options)
    except ValueError as error:
        raise LaunchError(f"--probe-options {options.probe_options}: {error}: quote it as for a shell") from error
    return Wanted(
        model_path=options.model_path,
        profile=options.profile,
        budget=options.budget,
        backend=options.backend,
        probe_options=tuple(probe_options),
        engine=tuple(options.engine),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; see the module."""
    options = argument_parser().parse_args(arguments)
    try:
        wanted = _wanted(options)
        flags_from_arguments(wanted.engine)
        with stopping_on_signals():
            ensure_probed(options.out, wanted, reprobe=options.reprobe)
        if not options.probe_only:
            launch(
                "pair",
                options.out,
                strict=options.strict,
                router_host=options.router_host,
                router_port=options.router_port,
                log_dir=options.log_dir,
            )
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except SpectrumKVError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
