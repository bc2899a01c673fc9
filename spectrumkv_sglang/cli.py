"""The `spectrumkv` command: a table of commands; each one's work is in a module of its own, imported when it runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from spectrumkv_sglang.calibration.command import calibrate
from spectrumkv_sglang.errors import SpectrumKVError
from spectrumkv_sglang.report.command import report as report_page
from spectrumkv_sglang.search.command import tune
from spectrumkv_sglang.simulation.command import simulate
from spectrumkv_sglang.sizing.command import size

EXIT_CODES = "Exit codes: 0 fine, 1 a problem that stops SpectrumKV, 2 wrong usage."

app = typer.Typer(
    help="SpectrumKV for SGLang: move the KV cache between prefill and decode in a precision-tiered payload.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

app.command(epilog=EXIT_CODES)(calibrate)
app.command("report", epilog=EXIT_CODES)(report_page)
app.command(epilog=EXIT_CODES)(simulate)
app.command(epilog=EXIT_CODES)(size)
app.command(epilog=EXIT_CODES)(tune)

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
    prefill_url: Annotated[
        str | None, typer.Option(metavar="URL", help="Examine a running pair instead: its prefill server's address.")
    ] = None,
    decode_url: Annotated[str | None, typer.Option(metavar="URL", help="And its decode server's.")] = None,
) -> None:
    """Say whether SpectrumKV works on this host (or a running pair), what is tiered, and what to do about problems."""
    if (prefill_url is None) != (decode_url is None):
        raise typer.BadParameter("a pair has two sides: give --prefill-url and --decode-url")
    if prefill_url is not None:
        typer.echo(f"Looking at the pair of {prefill_url} and {decode_url}")
    else:
        typer.echo(
            "Looking at this host: versions, SGLang, transport, GPUs, configuration; importing SGLang takes a while"
        )

    from spectrumkv_sglang.doctor import examine, examine_pair
    from spectrumkv_sglang.doctor.rendering import print_report

    if prefill_url is not None and decode_url is not None:
        report = examine_pair(prefill_url, decode_url)
    else:
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
    given: Annotated[
        list[str] | None,
        typer.Argument(metavar="FILE", help="Profiles of your own, listed before the shipped ones."),
    ] = None,
    json: JsonFile = None,
    layers: Annotated[int, typer.Option(help="Layers with KV.")] = 32,
    kv_heads: Annotated[int, typer.Option(help="KV heads, all tensor-parallel ranks together.")] = 8,
    head_dim: Annotated[int, typer.Option(help="Size of a head, a multiple of 8.")] = 128,
    dtype: Annotated[str, typer.Option(help="KV dtype: float32, float16 or bfloat16.")] = "bfloat16",
) -> None:
    """List the shipped profiles, and yours, with what a token costs in each tier. The defaults are Llama-3.1-8B's."""
    from spectrumkv_sglang.payload.errors import PayloadError
    from spectrumkv_sglang.payload.geometry import KVGeometry
    from spectrumkv_sglang.profile_listing import list_profiles, profile_table

    try:
        geometry = KVGeometry(
            layers=layers, kv_heads=kv_heads, head_dim=head_dim, v_head_dim=head_dim, page_size=1, dtype=dtype
        )
    except PayloadError as error:
        raise typer.BadParameter(str(error)) from error
    listed = list_profiles(geometry, given or ())
    Console().print(profile_table(listed, geometry))
    _write_json(json, msgspec.json.encode(listed))


@app.command(
    epilog="Exit codes: 0 fine, 1 a problem, 2 wrong usage; a prefill or decode server's own; a pair stopped by a "
    "signal: 128 + its number.",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def launch(
    context: typer.Context,
    role: Annotated[str, typer.Argument(metavar="prefill|decode|pair", help="What to start on this machine.")],
    config: Annotated[
        Path, typer.Option("--config", metavar="FILE", help="Launch config that `spectrumkv probe --out` wrote.")
    ],
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse to serve a model that is not the one that was probed.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command lines and start nothing.")] = False,
    router_host: Annotated[str, typer.Option(help="Of a pair: address that its router listens on.")] = "127.0.0.1",
    router_port: Annotated[int, typer.Option(min=1, max=65535, help="Of a pair: port of its router.")] = 8000,
    log_dir: Annotated[Path, typer.Option(metavar="DIR", help="Of a pair: folder for its logs.")] = Path(
        "spectrumkv-logs"
    ),
    ready_timeout: Annotated[
        float, typer.Option(min=1, metavar="SECONDS", help="Of a pair: longest wait until it is healthy.")
    ] = 1800,
) -> None:
    """Start sglang.launch_server with a launch config. Further SGLang flags are passed on, last, so that they win."""
    from spectrumkv_sglang.launch.launcher import launch as start

    start(
        role,
        config,
        context.args,
        strict=strict,
        dry_run=dry_run,
        router_host=router_host,
        router_port=router_port,
        log_dir=log_dir,
        ready_timeout_seconds=ready_timeout,
        say=typer.echo,
    )


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog="Exit codes: 0 low tier allowed, 10 not allowed, 11 inconclusive, 1 no result, 2 wrong usage. "
    "Options that are not listed here are SGLang's own and go to its server and into the launch config.",
)
def probe(
    context: typer.Context,
    model_path: Annotated[
        str | None, typer.Option("--model-path", "--model", metavar="DIR", help="Model directory or hub id.")
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE", help="Launch config to write; replaced at once, or not at all.")
    ] = Path("launch.yaml"),
    json: JsonFile = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Picture of the result: .png, .svg or .pdf.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", help="SpectrumKV settings to judge (an earlier launch config too)."),
    ] = None,
    profile: Annotated[str | None, typer.Option(help="Profile to judge: a shipped one or a .yaml file.")] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Judge a profile made for this model first: its layers are measured on this text."
        ),
    ] = None,
    budget: Annotated[float | None, typer.Option(help="Budget b that will be served: wire / native bytes.")] = None,
    backend: Annotated[
        str | None,
        typer.Option(help="Backend for the launch config: spectrumkv (RDMA) or spectrumkv_tcp; default: what is here."),
    ] = None,
    trials: Annotated[int, typer.Option(min=1, help="Needle trials a length, spread over the depths.")] = 3,
    depths: Annotated[
        str, typer.Option(help="Where needles are hidden, from 0 (start) to 1 (end of the prompt), with commas.")
    ] = "0.1,0.5,0.9",
    length: Annotated[
        list[int] | None,
        typer.Option(
            help="Tokens that a needle prompt and its answer fit in; may be repeated. Default: what time allows."
        ),
    ] = None,
    haystack: Annotated[Path | None, typer.Option(metavar="FILE", help="Text to hide needles in.")] = None,
    text: Annotated[Path | None, typer.Option(metavar="FILE", help="Text to judge perplexity, KL, top-1 on.")] = None,
    seed: Annotated[int, typer.Option(help="Of the needles and the order of the text.")] = 0,
    needle_seconds: Annotated[float, typer.Option(min=0, help="Time that needle prompts may take; seconds.")] = 45.0,
    request_timeout: Annotated[float, typer.Option(min=1, help="Longest request; seconds.")] = 600.0,
    max_kl: Annotated[
        float | None, typer.Option(help="Limit of the KL divergence, nats a token; default: the config's, .03.")
    ] = None,
    max_dppl: Annotated[
        float | None, typer.Option(help="Limit of the rise in perplexity, %; default: the config's, 5.")
    ] = None,
    min_top1: Annotated[
        float | None, typer.Option(help="Limit of the top-1 agreement, 0 to 1; default: the config's, .9.")
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None, typer.Option(metavar="A B", help="Compare two --json results; probe nothing.")
    ] = None,
) -> None:
    """Judge which precision tiers a model bears, in a real SGLang server, and write the launch config."""
    from spectrumkv_sglang.probe import command

    if compare is not None:
        command.compare(*compare, Console())
        return
    if model_path is None:
        raise typer.BadParameter("missing: give the model's directory", param_hint="--model-path")
    asked = command.ProbeCommand(
        model_path=model_path,
        out=out,
        json=json,
        plot=plot,
        config=config,
        profile=profile,
        calibrate=calibrate,
        budget=budget,
        backend=backend,
        trials=trials,
        depths=depths,
        lengths=length or (),
        haystack=haystack,
        text=text,
        seed=seed,
        needle_seconds=needle_seconds,
        request_timeout=request_timeout,
        max_kl=max_kl,
        max_dppl=max_dppl,
        min_top1=min_top1,
        engine_arguments=context.args,
    )
    raise typer.Exit(command.probe(asked, Console()))


@app.command("eval", epilog=EXIT_CODES)
def evaluate(
    model_path: Annotated[
        Path, typer.Option("--model-path", "--model", metavar="DIR", help="Local Hugging Face model directory.")
    ],
    profile: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[@BUDGET][:SCORER]", help="Profile to evaluate, such as balanced@0.3; may be repeated."
        ),
    ] = None,
    baseline: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[@BUDGET]",
            help="Baseline beside them, such as kivi-4, pdtrim, or scorers (each profile by every scorer); may be "
            "repeated. A wrong name lists them all.",
        ),
    ] = None,
    text: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Text to predict; default: a short one that is shipped.")
    ] = None,
    prefix_tokens: Annotated[
        str, typer.Option(metavar="N[,N...]", help="Tokens whose KV travels; several lengths with commas.")
    ] = "1792",
    continuation_tokens: Annotated[int, typer.Option(min=1, help="Tokens that are scored after the prefix.")] = 320,
    texts: Annotated[
        int | None, typer.Option(min=1, help="Windows drawn from the text; default: 4, or as many as there are.")
    ] = None,
    budget: Annotated[
        float | None, typer.Option(min=0, max=1, help="Budget b of profiles that state none: wire / native bytes.")
    ] = None,
    scorer: Annotated[str, typer.Option(help="Token importance, for profiles that state none.")] = "window",
    seed: Annotated[int, typer.Option(min=0, help="Of windows, random tiers, needles and intervals.")] = 0,
    generate: Annotated[int, typer.Option(min=0, metavar="N", help="Compare N greedy tokens with native's.")] = 0,
    needles: Annotated[
        bool, typer.Option("--needles", help="Hide needles in prompts of the same lengths: one each, and eight in one.")
    ] = False,
    device: Annotated[str, typer.Option(help="Where the model runs: cpu, cuda, cuda:1, ...")] = "cpu",
    dtype: Annotated[
        str, typer.Option(help="The model computes in it: auto (float32 on a CPU), float32, float16, bfloat16.")
    ] = "auto",
    kv_dtype: Annotated[
        str, typer.Option(help="The KV pool's dtype, which native bytes are counted in: auto (the model's), ...")
    ] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of a CPU run; default: torch's choice.")] = None,
    json: JsonFile = None,
    markdown: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the tables in Markdown as well.")] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Picture of bytes against KL: .png, .svg or .pdf.")
    ] = None,
) -> None:
    """Measure what profiles cost a model on real text: perplexity, KL and top-1 beside the bytes on the wire."""
    from spectrumkv_sglang.evaluation import command

    asked = command.EvaluationCommand(
        model_path=model_path,
        profiles=profile or (),
        baselines=baseline or (),
        text=text,
        prefix_tokens=prefix_tokens,
        continuation_tokens=continuation_tokens,
        texts=texts,
        budget=budget,
        scorer=scorer,
        seed=seed,
        generate=generate,
        needles=needles,
        device=device,
        dtype=dtype,
        kv_dtype=kv_dtype,
        threads=threads,
        json=json,
        markdown=markdown,
        plot=plot,
    )
    command.evaluate(asked, Console())


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
