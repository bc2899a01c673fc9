"""The `spectrumkv` command: a table of commands; each one's work is in a module of its own, imported when it runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from spectrumkv_sglang.errors import SpectrumKVError

EXIT_CODES = "Exit codes: 0 fine, 1 a problem that stops SpectrumKV, 2 wrong usage."

app = typer.Typer(
    help="SpectrumKV for SGLang: move the KV cache between prefill and decode in a precision-tiered payload.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON as well.")]


@app.command(epilog=EXIT_CODES)
def doctor(
    json: JsonFile = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", help="Configuration to check; default: SPECTRUMKV_CONFIG."),
    ] = None,
    model_path: Annotated[
        Path | None, typer.Option("--model-path", metavar="DIR", help="Local model directory with its config.json.")
    ] = None,
) -> None:
    """Say whether SpectrumKV works on this host, what it will tier, and what to do about each problem."""
    from spectrumkv_sglang.doctor import examine
    from spectrumkv_sglang.doctor.rendering import print_report

    report = examine(config, model_path, os.environ)
    print_report(report, Console())
    _write_json(json, report.to_json())
    raise typer.Exit(report.exit_code)


@app.command(epilog=EXIT_CODES)
def version(json: JsonFile = None) -> None:
    """Print the versions of SpectrumKV and of what it runs on."""
    from spectrumkv_sglang.doctor.versions import installed_versions

    versions = installed_versions()
    for name, installed in versions.items():
        typer.echo(f"{name} {installed}")
    _write_json(json, msgspec.json.encode(versions))


@app.command(epilog=EXIT_CODES)
def profiles(
    json: JsonFile = None,
    layers: Annotated[int, typer.Option(help="Layers with KV.")] = 32,
    kv_heads: Annotated[int, typer.Option(help="KV heads, all tensor-parallel ranks together.")] = 8,
    head_dim: Annotated[int, typer.Option(help="Size of a head, a multiple of 8.")] = 128,
    dtype: Annotated[str, typer.Option(help="KV dtype: float32, float16 or bfloat16.")] = "bfloat16",
) -> None:
    """List the shipped profiles with what a token costs in each tier. The defaults are Llama-3.1-8B's."""
    from spectrumkv_sglang.payload.errors import PayloadError
    from spectrumkv_sglang.payload.geometry import KVGeometry
    from spectrumkv_sglang.profile_listing import list_profiles, profile_table

    try:
        geometry = KVGeometry(
            layers=layers, kv_heads=kv_heads, head_dim=head_dim, v_head_dim=head_dim, page_size=1, dtype=dtype
        )
    except PayloadError as error:
        raise typer.BadParameter(str(error)) from error
    listed = list_profiles(geometry)
    Console().print(profile_table(listed, geometry))
    _write_json(json, msgspec.json.encode(listed))


def _write_json(path: Path | None, content: bytes) -> None:
    if path is None:
        return
    try:
        path.write_bytes(content)
    except OSError as error:
        raise typer.BadParameter(f"cannot write {path}: {error.strerror}", param_hint="--json") from error


def main() -> None:
    """Entry point of the console script."""
    try:
        app()
    except SpectrumKVError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(1)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        typer.echo("error: torch is not installed; SGLang brings it: pip install 'spectrumkv-sglang[sglang]'", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
