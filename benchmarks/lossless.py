"""What lossless compression would take off a payload, and what it would cost: table and JSON.

    python benchmarks/lossless.py --model-path DIR --text FILE [--profile NAME ...] [--out DIR]

Packs the KV of one prefix through each profile, all tokens in its lowest tier, and compresses the payload with
zstandard on one core. *order 0* is the entropy of its bytes over 8 bits: what an entropy coder that looks at each byte
alone, ANS included, reaches at best (Shannon 1948). *break-even* is the link above which compressing in front of the
write takes longer than it saves, decompression left out: saved share x compression speed.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
import zstandard

from spectrumkv_sglang.evaluation.model import EvalModel, read_model_files
from spectrumkv_sglang.evaluation.windows import cut_windows
from spectrumkv_sglang.payload.codec import pack_payload
from spectrumkv_sglang.payload.layout import plan_layout
from spectrumkv_sglang.probe.texts import load_judged_text
from spectrumkv_sglang.profiles.profile import load_profile, shipped_profiles
from spectrumkv_sglang.transfer.pool_view import PoolView

LEVELS = (1, 3)


def payload_of(view: PoolView, name: str) -> bytes:
    """The body of the payload of every row of a pool in the lowest tier of a profile."""
    profile, rows = load_profile(name), view.pool_slots
    tier = max(profile.tiers_defined)
    counts = np.bincount([tier], minlength=3) * rows
    layout = plan_layout(view.geometry, profile.table(view.geometry), counts.tolist())
    out = torch.zeros(layout.total_bytes, dtype=torch.uint8)
    tiers = np.full(rows, tier, dtype=np.uint8)
    rotated = view.rotation.at(0, rows) if view.rotation is not None else None
    pack_payload(view.buffers, torch.arange(rows), tiers, layout, out, rotated=rotated)
    return out[layout.prologue_bytes :].numpy().tobytes()


def order_0(data: bytes) -> float:
    """Entropy of the bytes over 8 bits."""
    share = np.bincount(np.frombuffer(data, np.uint8), minlength=256) / len(data)
    share = share[share > 0]
    return float(-(share * np.log2(share)).sum() / 8)


def measure(name: str, data: bytes) -> dict[str, object]:
    """Ratios and speeds of one payload; bytes a second of what goes in (compression) or comes out."""
    row: dict[str, object] = {"profile": name, "bytes": len(data), "order_0": order_0(data)}
    for level in LEVELS:
        started = time.perf_counter()
        packed = zstandard.ZstdCompressor(level=level).compress(data)
        between = time.perf_counter()
        zstandard.ZstdDecompressor().decompress(packed)
        ended = time.perf_counter()
        ratio, speed = len(packed) / len(data), len(data) / (between - started)
        row[f"zstd_{level}"] = {
            "ratio": ratio,
            "compress_bytes_per_second": speed,
            "decompress_bytes_per_second": len(data) / (ended - between),
            "break_even_bits_per_second": max(0.0, 1 - ratio) * speed * 8,
        }
    return row


def show(rows: list[dict[str, object]]) -> None:
    """Print the table."""
    columns = ["profile", "MB", "order 0", *(f"zstd {level}: ratio, MB/s, break-even" for level in LEVELS)]
    print("| " + " | ".join(columns) + " |")
    print("|---" * len(columns) + "|")
    for row in rows:
        cells = [str(row["profile"]), f"{row['bytes'] / 1e6:.1f}", f"{row['order_0']:.3f}"]  # type: ignore[operator]
        for level in LEVELS:
            found: dict[str, float] = row[f"zstd_{level}"]  # type: ignore[assignment]
            speed, limit = found["compress_bytes_per_second"] / 1e6, found["break_even_bits_per_second"] / 1e6
            cells.append(f"{found['ratio']:.3f}, {speed:.0f}, {limit:.0f} Mb/s")
        print("| " + " | ".join(cells) + " |")


def main() -> None:
    """Measure every profile and write ``lossless.json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--prefix-tokens", type=int, default=1792)
    parser.add_argument("--profile", action="append", help="shipped name or file; all shipped ones when left out")
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"), help="folder for the JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
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
    model = EvalModel(files, "cpu", "float32", files.dtype)
    view = model.prefill(window.name, window.prefix(arguments.prefix_tokens), {}).prefix.view
    rows = [measure(name, payload_of(view, name)) for name in arguments.profile or shipped_profiles()]
    show(rows)
    arguments.out.mkdir(parents=True, exist_ok=True)
    report = {"model": arguments.model_path.name, "tokens": view.pool_slots, "payloads": rows}
    (arguments.out / "lossless.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
