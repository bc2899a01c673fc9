"""The ``spectrumkv simulate`` command: the controller beside every fixed choice, on a cluster that need not exist."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from spectrumkv_sglang.simulation.replay import ReplayResult


@dataclass(frozen=True)
class SimulationReport:
    """What ``--json`` holds: the policies' results, the cluster's rate in Gb/s or the trace's file, and the seed."""

    link: str
    seed: int
    results: list[ReplayResult]


def simulate(
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Configuration whose controller: section is used; default: the shipped one."),
    ] = None,
    requests: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="CSV of arrival_s,prompt_tokens,output_tokens; default: drawn as below."),
    ] = None,
    bandwidth: Annotated[
        Path | None, typer.Option(metavar="FILE", help="CSV of from_s,gbps; default: --gbps all the time.")
    ] = None,
    gbps: Annotated[float, typer.Option(min=1e-6, help="Rate of each prefill rank's link, Gb/s.")] = 25.0,
    count: Annotated[int, typer.Option(min=1, max=10**7, help="Requests to draw.")] = 1000,
    per_second: Annotated[float, typer.Option(min=1e-9, help="Requests a second, a Poisson process.")] = 1.0,
    prompt_tokens: Annotated[int, typer.Option(min=1, max=10**8, help="Median of the prompts' lengths.")] = 8192,
    output_tokens: Annotated[int, typer.Option(min=1, max=10**8, help="Median of the outputs' lengths.")] = 256,
    spread: Annotated[float, typer.Option(min=0, max=4, help="Standard deviation of the lengths' logarithm.")] = 0.5,
    prefill_ranks: Annotated[
        int, typer.Option(min=1, max=65536, help="Prefill ranks, each with a link of its own.")
    ] = 1,
    prefill_rate: Annotated[float, typer.Option(min=1e-9, help="Tokens a second that a rank prefills.")] = 20000.0,
    decode_ms: Annotated[float, typer.Option(min=0, help="Milliseconds of a decoded token.")] = 20.0,
    kv_bytes: Annotated[
        int, typer.Option(min=1, max=10**9, help="Native KV bytes of a token; Llama 3.1 8B: 131072.")
    ] = 131072,
    codec_gbs: Annotated[
        float, typer.Option(min=1e-9, help="GB/s of native KV through pack and unpack, where no candidate says.")
    ] = 40.0,
    chunk_ms: Annotated[float, typer.Option(min=0, help="Milliseconds that a chunk costs beside its stages.")] = 2.0,
    payload_ms: Annotated[float, typer.Option(min=0, help="The same of each of its payloads.")] = 0.0,
    native_chunk_ms: Annotated[
        float | None, typer.Option(min=0, help="The same of a chunk on SGLang's own path; default: --chunk-ms.")
    ] = None,
    chunk_tokens: Annotated[int, typer.Option(min=1, help="SGLang's --chunked-prefill-size.")] = 8192,
    overlap: Annotated[
        float,
        typer.Option(min=0.01, max=1, help="Speed of a transfer while its rank computes; share of its full speed."),
    ] = 1.0,
    slot_mib: Annotated[float, typer.Option(min=1e-3, help="Largest payload: slot_bytes, in MiB.")] = 16.0,
    seed: Annotated[int, typer.Option(min=0, help="Of arrivals and lengths.")] = 0,
    json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON as well.")
    ] = None,
) -> None:
    """Replay requests over a link: the controller beside each fixed candidate and native; TTFT, JCT, bytes, KL."""
    from spectrumkv_sglang.config import load_config
    from spectrumkv_sglang.simulation import replay as work
    from spectrumkv_sglang.simulation.traces import BandwidthTrace, poisson_requests, read_bandwidth, read_requests
    from spectrumkv_sglang.tuning.frontier import NATIVE, Candidate
    from spectrumkv_sglang.tuning.link_model import FixedCost, bytes_per_second
    from spectrumkv_sglang.tuning.own_candidate import own_candidate

    loaded = load_config(config)
    settings = loaded.controller
    candidates = [Candidate(item.label, item.budget, item.kl, item.speed) for item in settings.candidates]
    own = own_candidate(settings, loaded.loaded_profile, loaded.budget, loaded.budget)
    if own.name not in [item.name for item in candidates]:
        candidates.append(own)
    safe = next(item for item in candidates if item.name == (settings.safe or own.name))
    asked = (
        read_requests(requests)
        if requests is not None
        else poisson_requests(
            count,
            per_second=per_second,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            spread=spread,
            seed=seed,
        )
    )
    link = read_bandwidth(bandwidth) if bandwidth is not None else BandwidthTrace([(0.0, bytes_per_second(gbps))])
    cluster = work.Cluster(
        prefill_ranks=prefill_ranks,
        prefill_tokens_per_second=prefill_rate,
        decode_seconds_per_token=decode_ms / 1e3,
        kv_bytes_per_token=kv_bytes,
        codecs=work.with_true_speeds(candidates, codec_gbs * 1e9),
        fixed=FixedCost(chunk_ms / 1e3, payload_ms / 1e3),
        native_chunk_seconds=(chunk_ms if native_chunk_ms is None else native_chunk_ms) / 1e3,
        payload_bytes=slot_mib * 1024 * 1024,
        chunk_tokens=chunk_tokens,
        overlap=overlap,
    )
    unmeasured = work.unknown_speeds(candidates)
    results = [
        work.replay(asked, link, cluster, unmeasured, safe, settings, fixed=fixed, min_tokens=loaded.min_tokens)
        for fixed in (None, NATIVE, *candidates)
    ]
    where = str(bandwidth) if bandwidth is not None else f"{gbps:g} Gb/s"
    console = Console()
    console.print(_table(results, where))
    console.print("controller: " + ", ".join(f"{name} {number}" for name, number in results[0].chosen.items()))
    if json is not None:
        try:
            json.write_bytes(msgspec.json.format(msgspec.json.encode(SimulationReport(where, seed, results))))
        except OSError as error:
            raise typer.BadParameter(f"cannot write {json}: {error.strerror}", param_hint="--json") from error


def _table(results: list[ReplayResult], where: str) -> Table:
    first = results[0]
    table = Table(title=f"{first.requests} requests, link {where}; seconds, JCT mean", box=SIMPLE_HEAD, padding=(0, 1))
    for column in ("policy", "TTFT 50%", "99%", "JCT", "99%", "b", "KL", "late"):
        table.add_column(column, justify="left" if column == "policy" else "right", no_wrap=True)
    for result in results:
        times = (result.ttft_s["p50"], result.ttft_s["p99"], result.jct_s["mean"], result.jct_s["p99"])
        ends = (f"{result.wire_share:.3f}", f"{result.mean_kl:.4f}", str(result.late))
        table.add_row(result.policy, *(f"{seconds:.2f}" for seconds in times), *ends)
    return table
