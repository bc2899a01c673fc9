"""The options of ``spectrumkv tune``; what it does is in `tune`, imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def tune(
    model_path: Annotated[
        Path, typer.Option("--model-path", "--model", metavar="DIR", help="Local Hugging Face model directory.")
    ],
    text: Annotated[Path, typer.Option(metavar="FILE", help="Text to judge on, of several windows.")],
    out: Annotated[
        Path,
        typer.Option("--out", metavar="DIR", help="Folder for the frontier, its profiles, candidates and picture."),
    ],
    study: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="What was judged, to go on from after an interruption; default: study.log in --out."
        ),
    ] = None,
    evaluations: Annotated[int, typer.Option(min=1, help="Most points to judge, earlier runs counted.")] = 200,
    patience: Annotated[
        int, typer.Option(min=1, help="End after so many points in a row that add under .1 % of hypervolume.")
    ] = 40,
    max_kl: Annotated[
        float | None, typer.Option(min=0, help="Points that lose more are of no use; nats a token; default: no limit.")
    ] = None,
    least_kl: Annotated[float, typer.Option(help="A KL below this counts as this; nats a token.")] = 1e-5,
    candidates: Annotated[
        int, typer.Option(min=1, max=16, help="Points of the frontier that the controller gets at most.")
    ] = 8,
    key_bits: Annotated[str, typer.Option(help="Bits of keys to choose from.")] = "2,3,4,5,6,8",
    value_bits: Annotated[str, typer.Option(help="Bits of values.")] = "2,3,4,5,6,8",
    key_scales: Annotated[str, typer.Option(help="Scales of keys: channel, row.")] = "channel,row",
    value_scales: Annotated[str, typer.Option(help="Scales of values.")] = "row",
    key_transform: Annotated[str, typer.Option(help="Transforms of keys.")] = "identity,derope,hadamard",
    value_transform: Annotated[str, typer.Option(help="Transforms of values.")] = "identity,hadamard",
    edges: Annotated[str, typer.Option(help="Numbers of first and last layers in 8 bits.")] = "0,1,2",
    upgrade: Annotated[
        str, typer.Option(help="Shares of the way from the lowest tier to the next that the budget grants.")
    ] = "0,0.25,0.5,0.75",
    texts: Annotated[int, typer.Option(min=1, help="Windows of the text to judge on.")] = 4,
    prefix_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens whose KV travels.")] = 1024,
    continuation_tokens: Annotated[int, typer.Option(min=1, help="Tokens that are scored after the prefix.")] = 128,
    chunk_tokens: Annotated[
        int, typer.Option(min=64, help="Tokens of the chunk that bytes and budgets are stated for.")
    ] = 8192,
    speeds: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Speeds of pack and unpack, of --save-speeds; default: measured here."),
    ] = None,
    save_speeds: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the speeds that were measured, for other searches.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of windows and starting points.")] = 0,
    device: Annotated[str, typer.Option(help="Where the model runs: cpu, cuda, cuda:1, ...")] = "cpu",
    dtype: Annotated[
        str, typer.Option(help="The model computes in it: auto (float32 on a CPU), float32, float16, bfloat16.")
    ] = "auto",
    kv_dtype: Annotated[str, typer.Option(help="The KV pool's dtype: auto (the model's), ...")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of a CPU run; default: torch's choice.")] = None,
) -> None:
    """Search the profiles that lose least, at every size and speed, and write candidates for the controller."""
    from spectrumkv_sglang.search.preparation import TuneCommand
    from spectrumkv_sglang.search.space import space_from
    from spectrumkv_sglang.search.tune import tune as work

    work(
        TuneCommand(
            model_path=model_path,
            text=text,
            out=out,
            study=study,
            evaluations=evaluations,
            patience=patience,
            max_kl=max_kl,
            least_kl=least_kl,
            candidates=candidates,
            space=space_from(
                key_bits=key_bits,
                value_bits=value_bits,
                key_scales=key_scales,
                value_scales=value_scales,
                key_transform=key_transform,
                value_transform=value_transform,
                edges=edges,
                upgrade=upgrade,
            ),
            texts=texts,
            prefix_tokens=prefix_tokens,
            continuation_tokens=continuation_tokens,
            chunk_tokens=chunk_tokens,
            speeds=speeds,
            save_speeds=save_speeds,
            seed=seed,
            device=device,
            dtype=dtype,
            kv_dtype=kv_dtype,
            threads=threads,
        ),
        Console(),
    )
