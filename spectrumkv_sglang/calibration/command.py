"""The options of ``spectrumkv calibrate``; what it does is in `calibrate`, imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from spectrumkv_sglang.calibration.head_cost import HeadCost


def calibrate(
    model_path: Annotated[
        Path, typer.Option("--model-path", "--model", metavar="DIR", help="Local Hugging Face model directory.")
    ],
    text: Annotated[Path, typer.Option(metavar="FILE", help="Text to measure on, of several windows.")],
    budget: Annotated[float, typer.Option(min=0, max=1, help="Budget b to allocate: wire / native bytes.")],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Profile to write, .yaml; replaced at once.")],
    sensitivity: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Measurement to reuse, as for another budget; not there: saved there."),
    ] = None,
    heads: Annotated[
        HeadCost | None,
        typer.Option(
            help="Allocate single KV heads too, by what each costs alone (measured) or by how far back it attends "
            "(attention); default: by layers."
        ),
    ] = None,
    keys: Annotated[
        str | None, typer.Option(metavar="P,P...", help="Precisions for keys; default: 2 to 8 bits by channel.")
    ] = None,
    values: Annotated[
        str | None, typer.Option(metavar="P,P...", help="Precisions for values; default: 2 to 8 bits by row.")
    ] = None,
    key_transform: Annotated[str, typer.Option(help="Of the keys: identity, derope or hadamard.")] = "identity",
    value_transform: Annotated[str, typer.Option(help="Of the values: hadamard or identity.")] = "hadamard",
    texts: Annotated[int, typer.Option(min=1, help="Windows of the text to measure on.")] = 2,
    held_out_texts: Annotated[int, typer.Option(min=0, help="Other windows to check the map on; 0: no check.")] = 4,
    prefix_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens whose KV is rounded.")] = 1792,
    continuation_tokens: Annotated[int, typer.Option(min=1, help="Tokens that are scored after the prefix.")] = 320,
    chunk_tokens: Annotated[
        int, typer.Option(min=64, help="Tokens of the chunk that must keep to the budget, overheads included.")
    ] = 8192,
    seed: Annotated[int, typer.Option(min=0, help="Of windows and intervals.")] = 0,
    device: Annotated[str, typer.Option(help="Where the model runs: cpu, cuda, cuda:1, ...")] = "cpu",
    dtype: Annotated[
        str, typer.Option(help="The model computes in it: auto (float32 on a CPU), float32, float16, bfloat16.")
    ] = "auto",
    kv_dtype: Annotated[str, typer.Option(help="The KV pool's dtype: auto (the model's), ...")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of a CPU run; default: torch's choice.")] = None,
    json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON as well.")
    ] = None,
) -> None:
    """Measure what each layer's keys and values cost a model in few bits, and write the best profile for a budget."""
    from spectrumkv_sglang.calibration import calibrate as work
    from spectrumkv_sglang.calibration.preparation import CalibrationCommand

    work.calibrate(
        CalibrationCommand(
            model_path=model_path,
            budget=budget,
            out=out,
            text=text,
            sensitivity=sensitivity,
            heads=heads,
            keys=keys.split(",") if keys is not None else None,
            values=values.split(",") if values is not None else None,
            key_transform=key_transform,
            value_transform=value_transform,
            texts=texts,
            held_out_texts=held_out_texts,
            prefix_tokens=prefix_tokens,
            continuation_tokens=continuation_tokens,
            chunk_tokens=chunk_tokens,
            seed=seed,
            device=device,
            dtype=dtype,
            kv_dtype=kv_dtype,
            threads=threads,
            json=json,
        ),
        Console(),
    )
