"""The paper model of a transfer, held against measured TCP points, and what it says of links up to 400 Gb/s.

    python benchmarks/link_model.py --kernels docs/results/gpu.json --transfers transfer.json... --out DIR [--plot]

Kernels' speeds come from benchmarks/kernels.py; the cost that no overlap hides is fitted to the measured transfers.
Every point is predicted with a cost that was fitted without the points of its link. `link_model_forecast` says in which
forms fast links are forecast.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from link_model_forecast import FORMS, GOAL_VARIANT, MIB, PROMPTS, SHAPES, SLOTS_MIB, Setting, forecasts_of, goal_of
from link_model_points import (
    PointsError,
    codecs_of,
    cross_validated,
    packing_seconds,
    plain_overheads,
    points_of,
    pool_bytes_per_token,
    transfers_of,
)
from link_model_table import goal_table, ratio_table, sequential_table, time_table, validation_table
from rich.console import Console
from transfer_samples import Sample
from transfer_table import console as wide_console

from spectrumkv_sglang.tuning.fixed_cost import fit_fixed_cost

# One plain socket on a token bucket of 1 to 25 Gb/s got .956 to .970 of it, on the H200 machine too.
GOODPUT_SHARE = 0.957


def _read(path: Path, run: int) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if "samples" in document:
        return document
    runs = document.get("transfer")
    if not isinstance(runs, list) or not -len(runs) <= run < len(runs):
        raise PointsError(f"{path} has neither `samples` nor a transfer run {run}: expected transfer.json or gpu.json")
    return dict(runs[run])


def _plain(console: Console, overheads: Mapping[str, Sequence[tuple[Sample, float]]]) -> dict[str, dict[str, float]]:
    """Medians of what plain Mooncake took beyond V / B."""
    found = {}
    for variant, entries in overheads.items():
        seconds = statistics.median(over for _, over in entries)
        blocks = statistics.median(sample.writes or 0 for sample, _ in entries)
        found[variant] = {"seconds": seconds, "blocks": blocks}
        console.print(f"{variant} beyond V / B: median {seconds * 1e3:.1f} ms a request of {blocks:,.0f} blocks")
    return found


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python benchmarks/link_model.py", description="Model of a transfer.")
    parser.add_argument("--kernels", type=Path, required=True, metavar="FILE", help="gpu.json or kernels.json")
    parser.add_argument(
        "--transfers", type=Path, nargs="+", required=True, metavar="FILE", help="transfer.json, or gpu.json"
    )
    parser.add_argument("--run", type=int, default=-1, help="which of gpu.json's transfer runs; default: the last")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="for link_model.json")
    parser.add_argument("--model", default=SHAPES[0], choices=SHAPES, help="shape that was served in the transfers")
    parser.add_argument("--chunk-tokens", type=int, default=8192, help="SGLang's --chunked-prefill-size")
    parser.add_argument("--payload-mib", type=int, default=16, help="slot size in the forecasts")
    parser.add_argument("--unfused", type=float, default=100.0, help="S of the form `unfused`, GB/s")
    parser.add_argument(
        "--goodput", type=float, default=GOODPUT_SHARE, help="of the link's rate, where the run did not measure it"
    )
    parser.add_argument("--plot", action="store_true", help="also write link_model.png (needs matplotlib)")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    return options


def main() -> int:
    """Command line."""
    options = _options()
    console = wide_console()
    kernels = json.loads(options.kernels.read_text(encoding="utf-8"))
    by_slot = {
        shape: {mib: codecs_of(kernels, shape, slot_mib=mib) for mib in {options.payload_mib, *SLOTS_MIB}}
        for shape in SHAPES
    }
    codecs = {shape: of_slot[options.payload_mib] for shape, of_slot in by_slot.items()}
    sizes = {shape: pool_bytes_per_token(kernels, shape) for shape in SHAPES}
    samples, goodput = transfers_of([_read(path, options.run) for path in options.transfers], options.goodput)
    points, excluded = points_of(samples, goodput, codecs[options.model], options.chunk_tokens)
    predictions = cross_validated(points)
    fitted = fit_fixed_cost([point.measured for point in points])
    setting = Setting(fitted, options.chunk_tokens, options.payload_mib * MIB, options.unfused * 1e9)
    forecasts = forecasts_of(codecs, sizes, setting)
    chunk_bytes = {shape: PROMPTS[0] * size for shape, size in sizes.items()}
    goals = [
        goal_of(
            shape,
            {mib: of_variant[GOAL_VARIANT] for mib, of_variant in by_slot[shape].items()},
            chunk_bytes[shape],
            setting,
            forecasts,
        )
        for shape in SHAPES
    ]
    errors = [abs(prediction.relative_error) for prediction in predictions]

    console.print(validation_table(predictions))
    console.print(
        f"{len(points)} points, relative error: mean {statistics.mean(errors):.1%}, largest {max(errors):.1%}"
    )
    for reason, count in excluded.items():
        console.print(f"left out: {count} samples: {reason}")
    console.print(
        f"cost that nothing hides: {fitted.chunk_seconds * 1e3:.2f} ms a chunk, {fitted.payload_seconds * 1e3:.3f} ms "
        "a payload (least squares of the relative errors over all points)"
    )
    plain = _plain(console, plain_overheads(samples, goodput))
    packing = packing_seconds(samples)
    for variant, seconds in packing.items():
        codec = codecs[options.model].get(variant)
        if codec is not None:
            host = f"{codec.pack_host_seconds * 1e3:.2f} ms by the form `host`"
            console.print(f"{variant}: a payload was packed in {seconds * 1e3:.2f} ms; the host's part is {host}")
    console.print(sequential_table(codecs, setting.unfused))
    for form in FORMS:
        console.print(time_table(forecasts, options.model, form))
    for variant in ("int8", GOAL_VARIANT):
        console.print(ratio_table(forecasts, PROMPTS[-1], variant))
    console.print(goal_table(goals))

    report = {
        "goodput_gbps": {f"{rate:g}": value for rate, value in sorted(goodput.items())},
        "excluded_samples": excluded,
        "fixed_cost": asdict(fitted),
        "mean_relative_error": statistics.mean(errors),
        "max_relative_error": max(errors),
        "predictions": [
            {
                "variant": prediction.point.variant,
                "rate_gbps": prediction.point.rate_gbps,
                "prompt_tokens": prediction.point.prompt_tokens,
                "measured_seconds": prediction.point.measured.seconds,
                "predicted_seconds": prediction.seconds,
            }
            for prediction in predictions
        ],
        "plain_beyond_link": plain,
        "packing_seconds_per_payload": packing,
        "forecasts": [asdict(f) for f in forecasts],
        "goals": [asdict(goal) for goal in goals],
    }
    (options.out / "link_model.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if options.plot:
        from link_model_plot import plot_forecasts

        plot_forecasts(forecasts, options.out / "link_model.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
