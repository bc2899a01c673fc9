"""The ``spectrumkv size`` command: what it would bring, before anything is started."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console

from spectrumkv_sglang.sizing.transport import Transport

if TYPE_CHECKING:
    from spectrumkv_sglang.config import SpectrumKVConfig
    from spectrumkv_sglang.sizing.model_kv import ModelKV
    from spectrumkv_sglang.sizing.result import SizingResult

ASSUMED_TFLOPS = 400.0
"""Of one rank at prefill: 40 % of an H100's or H200's dense bfloat16 peak, near what gpu.md's 8,192 and 32,768 token
prefills of an 8B shape come to (530 and 300)."""


def size(
    gbps: Annotated[float, typer.Option(min=1e-3, help="Rate of the link between a prefill and a decode host, Gb/s.")],
    prompt_tokens: Annotated[list[int], typer.Option(min=1, max=10**7, help="Length of a prompt; may be repeated.")],
    model_path: Annotated[
        Path | None,
        typer.Option(
            "--model-path",
            "--model",
            metavar="DIR",
            help="Local model directory with its config.json; default: the one that --config's launch config names.",
        ),
    ] = None,
    tp: Annotated[int, typer.Option(min=1, max=1024, help="Tensor-parallel size of both servers.")] = 1,
    dtype: Annotated[
        str, typer.Option(help="Dtype of the KV pool: auto (the model's), float32, float16, bfloat16.")
    ] = ("auto"),
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Launch config or settings: its profile is listed first, its slots count."),
    ] = None,
    speeds: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Measured speeds: the benchmarks' kernels.json, transfer.json or gpu.json, or this command's --json.",
        ),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure packing and unpacking on this machine first (under a minute).")
    ] = False,
    prefill_rate: Annotated[
        float | None, typer.Option(min=1e-3, help="Tokens a second that a prefill server prefills; default: estimated.")
    ] = None,
    tflops: Annotated[
        float, typer.Option(min=1e-6, help="TFLOP/s that a rank reaches at prefill, for the estimate.")
    ] = ASSUMED_TFLOPS,
    transport: Annotated[
        Transport | None,
        typer.Option(help="What a chunk costs beside its bytes; default: the launch config's backend, else tcp."),
    ] = None,
    chunk_tokens: Annotated[int, typer.Option(min=1, help="SGLang's --chunked-prefill-size, tokens.")] = 8192,
    json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON as well.")
    ] = None,
) -> None:
    """Say what tiered KV would bring this model on this link: bytes, times, break-even, memory, whether to bother."""
    from spectrumkv_sglang.sizing.model_kv import read_model
    from spectrumkv_sglang.sizing.rendering import print_sizing

    if speeds is not None and measure:
        raise typer.BadParameter("give one of --speeds and --measure", param_hint="--measure")
    console = Console()
    model = read_model(model_path or _configured_model(config), tp=tp, dtype=dtype)
    prefill, assumed = _prefill_time(model, prefill_rate, tflops)
    result = _sizing(
        model,
        gbps,
        sorted(set(prompt_tokens)),
        config,
        speeds,
        measure,
        transport or _configured_transport(config),
        chunk_tokens,
        prefill,
        assumed,
        lambda line: console.print(line, highlight=False),
    )
    print_sizing(result, console)
    if json is not None:
        try:
            json.write_bytes(msgspec.json.format(msgspec.json.encode(result)) + b"\n")
        except OSError as error:
            raise typer.BadParameter(f"cannot write {json}: {error.strerror}", param_hint="--json") from error


def _configured_model(path: Path | None) -> Path:
    """The model directory that a launch config names.

    Raises:
        BadParameter: there is no launch config, or it names no directory of this machine.
    """
    from spectrumkv_sglang.launch_config import read_launch_config
    from spectrumkv_sglang.launch_flags import last_value

    hint = "--model-path"
    if path is None:
        raise typer.BadParameter("missing: give the model's directory, or a launch config (--config)", param_hint=hint)
    named = last_value(read_launch_config(path).arguments("prefill"), "--model-path", "--model")
    if named is None:
        raise typer.BadParameter(f"missing, and {path} names no model-path: give the directory", param_hint=hint)
    if not Path(named).is_dir():
        raise typer.BadParameter(
            f"missing, and the model-path of {path}, {named}, is no directory here: give the directory", param_hint=hint
        )
    return Path(named)


def _configured_transport(path: Path | None) -> Transport:
    """By the backend that a launch config names; TCP, the slower one, where none does."""
    from spectrumkv_sglang.errors import SpectrumKVError
    from spectrumkv_sglang.launch_config import read_launch_config

    if path is None:
        return Transport.TCP
    try:
        backend = read_launch_config(path).backend
    except SpectrumKVError:  # settings alone; what is wrong with them is said where they are read
        return Transport.TCP
    return Transport.TCP if backend.endswith("_tcp") else Transport.RDMA


def _prefill_time(model: ModelKV, rate: float | None, tflops: float) -> tuple[Callable[[int], float], str]:
    """Seconds of a prefill by tokens, and how they come about."""
    from spectrumkv_sglang.sizing.errors import SizingError

    if rate is not None:
        return (lambda tokens: tokens / rate), f"prefill: {rate:g} tokens a second, as given"
    work = model.work
    if model.native_reason is not None:
        return (lambda tokens: 0.0), ""
    if work is None:
        raise SizingError("config.json does not tell how much work a prefill is: give --prefill-rate")
    speed = tflops * 1e12 * model.tp
    ranks = f" on each of {model.tp} ranks" if model.tp > 1 else ""
    return (
        (lambda tokens: work.operations(tokens) / speed),
        f"prefill: estimated from the model's size at {tflops:g} TFLOP/s{ranks}; --prefill-rate states it",
    )


def _sizing(
    model: ModelKV,
    gbps: float,
    prompts: list[int],
    config_path: Path | None,
    speeds_path: Path | None,
    measure: bool,
    transport: Transport,
    chunk_tokens: int,
    prefill: Callable[[int], float],
    prefill_assumed: str,
    say: Callable[[str], None],
) -> SizingResult:
    from spectrumkv_sglang.config import SpectrumKVConfig, load_config
    from spectrumkv_sglang.sizing.advice import Advice, advise
    from spectrumkv_sglang.sizing.estimate import Cluster, estimate
    from spectrumkv_sglang.sizing.measurement import measure_speeds
    from spectrumkv_sglang.sizing.result import SIZING_FORMAT, PoolMemory, SizingResult
    from spectrumkv_sglang.sizing.speeds import GOODPUT_SHARE, assumed_table, read_speeds
    from spectrumkv_sglang.tuning.link_model import bytes_per_second

    configured = load_config(config_path)
    memory = PoolMemory(
        landing_bytes=configured.landing_slots * configured.slot_bytes * model.tp,
        staging_bytes=configured.staging_slots * configured.slot_bytes * model.tp,
    )
    if model.native_reason is not None or model.rank is None:
        text = f"this model's KV travels natively, reason {model.native_reason}: {model.native_detail}"
        remedy = f"; {model.remedy}" if model.remedy else ""
        advice = [Advice(tokens, False, text + remedy) for tokens in prompts]
        return SizingResult(
            SIZING_FORMAT, model.name, model.native_reason, model.native_detail, model.bytes_per_token, model.tp, gbps,
            gbps * GOODPUT_SHARE, configured.min_tokens, memory, [], None, [], advice,
        )  # fmt: skip
    policies = _policies(configured, first=config_path is not None)
    if measure:
        table = measure_speeds(model.rank, [(one.profile, one.budget) for one in policies], say, transport)
    elif speeds_path is not None:
        table = read_speeds(speeds_path, bytes_per_token=model.rank.native_bytes_per_token, transport=transport)
    else:
        table = assumed_table(transport)
    cluster = Cluster(bytes_per_second(gbps * GOODPUT_SHARE), model.tp, chunk_tokens, configured.slot_bytes)
    estimates = [estimate(tokens, model.rank, cluster, policies, table, prefill) for tokens in prompts]
    default = SpectrumKVConfig.model_fields["profile"].default
    shared = f", shared by {model.tp} ranks" if model.tp > 1 else ""
    return SizingResult(
        format=SIZING_FORMAT,
        model=model.name,
        native_reason=None,
        detail=model.native_detail,
        kv_bytes_per_token=model.bytes_per_token,
        tp=model.tp,
        gbps=gbps,
        goodput_gbps=gbps * GOODPUT_SHARE,
        min_tokens=configured.min_tokens,
        memory=memory,
        assumptions=[
            prefill_assumed,
            f"packing: {table.source}",
            f"link: {GOODPUT_SHARE:.1%} of its rate for one request alone{shared}; pools not fragmented; chunks of "
            f"{chunk_tokens:,} tokens, sent while the next is prefilled; idle servers, empty caches",
        ],
        speeds=table,
        estimates=estimates,
        advice=[
            advise(
                one,
                min_tokens=configured.min_tokens,
                gbps=gbps,
                lead=configured.loaded_profile.name,
                lead_is="as configured" if config_path or configured.profile != default else "the default",
                speeds_assumed=not table.by_profile,
            )
            for one in estimates
        ],
    )


def _policies(configured: SpectrumKVConfig, *, first: bool) -> list[SpectrumKVConfig]:
    """The configured profile and budget, if a file states them, and every shipped profile at its own budget."""
    from spectrumkv_sglang.config import ENV_PREFIX, load_config
    from spectrumkv_sglang.profiles.profile import shipped_profiles

    found = [configured] if first else []
    for name in shipped_profiles():
        own = load_config(None, {f"{ENV_PREFIX}PROFILE": name})
        policy = configured.restricted_to(own.allowed_tiers).with_policy(name, own.budget)
        if not first or (configured.loaded_profile.name, configured.budget) != (name, own.budget):
            found.append(policy)
    return found
