"""What lossless compression would take off a payload, and what it would cost: tables and JSON.

    python benchmarks/lossless.py --model-path DIR --text FILE [--profile NAME ...] [--device cuda] [--out DIR]

Packs the KV of one prefix through each profile, all tokens in its lowest tier, and compresses the payload with
zstandard on one core and, with ``--device cuda``, with nvCOMP's codecs on a GPU. Beside the profiles stands native KV
cut into upper and lower bytes, as a lossless codec for it would.

*order 0* is the entropy of a payload's bytes over 8 bits: what a coder that looks at each byte alone reaches at best
with one table (Shannon 1948); *in 64 KiB* with a table for each 64 KiB, as nvCOMP's ANS has. *break-even* is the link
above which compressing in front of the write takes longer than it saves, decompression left out: saved share x
compression speed; *with decompression*, compressing, writing and decompressing one after the other.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import zstandard
from lossless_nvcomp import GpuRow, load_nvcomp, measure
from lossless_outcome import CHUNK_BYTES, Outcome, order_0
from lossless_payloads import Payload, native_planes, on_cpu, profile_payload

from spectrumkv_sglang.evaluation.model import EvalModel, read_model_files
from spectrumkv_sglang.evaluation.windows import cut_windows
from spectrumkv_sglang.probe.texts import load_judged_text
from spectrumkv_sglang.profiles.profile import shipped_profiles
from spectrumkv_sglang.transfer.pool_view import PoolView

LEVELS = (1, 3)
RUNS = 3


def zstandard_outcome(data: bytes, level: int) -> Outcome:
    """zstandard on one core, the median of a few runs; of the thread's own time, so that other work is left out."""
    compress, decompress = [], []
    for _ in range(RUNS):
        started = time.thread_time()
        packed = zstandard.ZstdCompressor(level=level).compress(data)
        between = time.thread_time()
        zstandard.ZstdDecompressor().decompress(packed)
        compress.append(between - started)
        decompress.append(time.thread_time() - between)
    return Outcome(len(data), len(packed), statistics.median(compress), statistics.median(decompress))


def cpu_row(payload: Payload) -> tuple[list[str], dict[str, object]]:
    """Cells and document of one payload."""
    bounds = order_0(payload.data), order_0(payload.data, CHUNK_BYTES)
    cells = [payload.name, f"{len(payload.data) / 1e6:.1f}", *(f"{bound:.3f}" for bound in bounds)]
    row: dict[str, object] = {"profile": payload.name, "bytes": len(payload.data)}
    row |= {"order_0": bounds[0], "order_0_chunks": bounds[1]}
    for level in LEVELS:
        found = zstandard_outcome(payload.data, level)
        row[f"zstd_{level}"] = found.document()
        rates = f"{found.compress_rate / 1e6:.0f}, {found.decompress_rate / 1e6:.0f}"
        cells.append(f"{found.ratio:.3f}, {rates}, {found.break_even / 1e6:.0f} Mb/s")
    return cells, row


def gpu_cells(row: GpuRow) -> list[str]:
    """Cells of one payload and codec."""
    if row.outcome is None:
        return [row.payload, row.codec, row.error or "", "", "", "", ""]
    found = row.outcome
    rates = (found.compress_rate / 1e9, found.decompress_rate / 1e9)
    links = (found.break_even / 1e9, found.break_even_both / 1e9)
    codec = row.codec if row.reused_buffers else f"{row.codec} (buffers of its own)"
    return [row.payload, codec, f"{found.ratio:.3f}", *(f"{rate:.1f}" for rate in (*rates, *links))]


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a Markdown table."""
    print("| " + " | ".join(columns) + " |")
    print("|---" * len(columns) + "|")
    for row in rows:
        print("| " + " | ".join(row) + " |")


def prefilled_pool(arguments: argparse.Namespace) -> PoolView:
    """The KV of one prefix of the text, in the host's memory."""
    files = read_model_files(arguments.model_path)
    (window,) = cut_windows(
        files.tokenizer,
        load_judged_text(arguments.text),
        prefix_tokens=(arguments.prefix_tokens,),
        continuation_tokens=1,
        texts=1,
        seed=0,
        context_tokens=files.context_tokens,
    )
    model = EvalModel(files, arguments.device, "float32", files.dtype)
    return on_cpu(model.prefill(window.name, window.prefix(arguments.prefix_tokens), {}).prefix.view)


def main() -> None:
    """Measure every payload and write ``lossless.json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--prefix-tokens", type=int, default=1792)
    parser.add_argument("--profile", action="append", help="shipped name or file; all shipped ones when left out")
    parser.add_argument("--device", default="cpu", help="cuda: prefill there, and measure nvCOMP besides zstandard")
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"), help="folder for the JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    nvcomp = load_nvcomp() if arguments.device.startswith("cuda") else None
    view = prefilled_pool(arguments)
    payloads = [profile_payload(view, name) for name in arguments.profile or shipped_profiles()]
    payloads += native_planes(view)
    measured = [cpu_row(payload) for payload in payloads]
    levels = [f"zstd {level}: ratio, MB/s in and out, break-even" for level in LEVELS]
    print_table(["payload", "MB", "order 0", "in 64 KiB", *levels], [cells for cells, _ in measured])
    report: dict[str, object] = {
        "model": arguments.model_path.name,
        "tokens": view.pool_slots,
        "payloads": [row for _, row in measured],
    }
    if nvcomp is not None:
        rows = list(measure(payloads, arguments.device))
        print(f"\nnvCOMP {nvcomp.__version__} on {torch.cuda.get_device_name(arguments.device)}\n")
        columns = ["payload", "codec", "ratio", "GB/s in", "GB/s out", "break-even, Gb/s", "with decompression, Gb/s"]
        by_payload = sorted(rows, key=lambda row: [payload.name for payload in payloads].index(row.payload))
        print_table(columns, [gpu_cells(row) for row in by_payload])
        report["nvcomp"] = {
            "version": nvcomp.__version__,
            "device": torch.cuda.get_device_name(arguments.device),
            "rows": [gpu_document(row) for row in rows],
        }
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "lossless.json").write_text(json.dumps(report, indent=1) + "\n")


def gpu_document(row: GpuRow) -> dict[str, object]:
    """For the JSON file."""
    head: dict[str, object] = {"profile": row.payload, "codec": row.codec}
    if row.outcome is None:
        return head | {"error": row.error}
    return head | {"reused_buffers": row.reused_buffers} | row.outcome.document()


if __name__ == "__main__":
    main()
