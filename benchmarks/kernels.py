"""How near pack, unpack and checksum come to the GPU's memory bandwidth: table, JSON and plot.

    python benchmarks/kernels.py --out DIR [--quick] [--payloads-only]

The floor of a kernel is the fewest bytes that it must read and write over the measured bandwidth of a device copy: the
chunk's rows in the pool once and the payload once. An unpack that is not allowed to write before the checksum is known
has to read the payload twice; its fraction of the one-read floor is given, and of the two-read floor beside it.

What the host needs to queue one payload is measured for a whole chunk, and for payloads that just fit into a slot.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from kernel_cases import MIXES, MODELS, Chunk, Mix, geometry_of, make_chunk, make_pool
from kernel_timing import RUNS, copy_bandwidth, gpu_seconds, wall_seconds

from spectrumkv_sglang.kernels.triton_checksum import close_payload, sum_payload, sum_tails
from spectrumkv_sglang.kernels.triton_pack import pack_groups
from spectrumkv_sglang.kernels.triton_unpack import unpack_groups
from spectrumkv_sglang.payload.codec import KVBuffers, pack_with_checksum, unpack_if_intact
from spectrumkv_sglang.payload.device_codec import UnpackOutcome
from spectrumkv_sglang.payload.exchange import Pending
from spectrumkv_sglang.payload.geometry import KVGeometry
from spectrumkv_sglang.payload.prologue import Prologue

TOKENS = 8192
SLOTS_MIB = (16, 64)
"""Sizes of a slot whose payloads are queued for the host's time; 16 MiB is the default."""


class KernelsOfChunk:
    """Every kernel of one chunk, on memory that is filled once."""

    def __init__(self, chunk: Chunk) -> None:
        device = chunk.buffers.device
        self.chunk = chunk
        layout = chunk.layout
        self.payload = torch.empty(layout.total_bytes, dtype=torch.uint8, device=device)
        self.prologue = Prologue(
            1, 1, 0, 0, layout.rows_per_tier, layout.total_bytes, layout.geometry.digest(), layout.table.digest()
        )
        self.checksum = self.whole_pack()
        rows = chunk.slots.numpy()[np.argsort(chunk.tiers, kind="stable")]
        self.launches = chunk.buffers.device_codec.launches(rows, layout)
        self.table = torch.cat([launch.table for launch in self.launches])
        tails = self.table
        self.longest_tail = int((tails[:, 3] - tails[:, 2]).max()) * 2
        self.pool = chunk.buffers.k[0]
        self.words = self.payload.view(torch.int64)
        # Equal sums, so that the unpack kernels write.
        self.verdict = torch.zeros(4, dtype=torch.int64, device=device)
        self.scratch = torch.zeros(4, dtype=torch.int64, device=device)
        self.sums = torch.zeros(layout.total_bytes // 131072 + 2, dtype=torch.int64, device=device)

    def queue_pack(self) -> Pending[int]:
        chunk = self.chunk
        return pack_with_checksum(chunk.buffers, chunk.slots, chunk.tiers, chunk.layout, self.payload, self.prologue)

    def queue_unpack(self) -> Pending[UnpackOutcome]:
        chunk = self.chunk
        return unpack_if_intact(
            self.payload, chunk.buffers, chunk.slots, chunk.tiers, chunk.layout, self.checksum, self.prologue
        )

    def whole_pack(self) -> int:
        return self.queue_pack().wait()

    def whole_unpack(self) -> bool:
        return self.queue_unpack().wait().written

    def pack(self, checksum: bool = True) -> None:
        for launch in self.launches:
            pack_groups(launch, self.pool, self.words, self.sums, checksum)
        if checksum:
            sum_tails(self.table, self.longest_tail, self.words, self.sums)
            close_payload(self.words, self.words, self.sums, self.scratch)

    def sum(self) -> None:
        sum_payload(self.words, self.words, self.scratch)

    def unpack(self) -> None:
        for launch in self.launches:
            for one in launch.apart():
                unpack_groups(one, self.pool, self.words, self.verdict)

    def verified_unpack(self) -> None:
        self.sum()
        self.unpack()


def steady_state(kernels: KernelsOfChunk) -> dict[str, Any]:
    """What queueing a payload costs: host time, and blocks of device memory that PyTorch had to lend.

    Raises:
        RuntimeError: the host waited for the GPU.
    """
    if not kernels.whole_unpack():
        raise SystemExit("the unpacked payload was not the packed one")
    result: dict[str, Any] = {}
    for name, queue in (("pack", kernels.queue_pack), ("unpack", kernels.queue_unpack)):
        taken = []
        # Every exchange in turn grows to the size that it needs, once.
        for _ in range(8):
            queue().wait()
        lent = torch.cuda.memory_stats()["allocation.all.allocated"]
        for _ in range(RUNS):
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            start = time.perf_counter()
            queue()
            taken.append(time.perf_counter() - start)
            torch.cuda.set_sync_debug_mode("default")
        result[name] = {
            "host_seconds": statistics.median(taken),
            "allocations": torch.cuda.memory_stats()["allocation.all.allocated"] - lent,
        }
    return result


def queueing(pool: KVBuffers, geometry: KVGeometry, mix: Mix, b: float) -> list[dict[str, Any]]:
    """What queueing a payload costs that just fits into a slot, for each size of slot up to the whole chunk's."""
    found = []
    for mib in SLOTS_MIB:
        tokens = min(TOKENS, int(mib * 2**20 / (b * geometry.native_bytes_per_token)))
        chunk = make_chunk(pool, geometry, mix, tokens // geometry.page_size * geometry.page_size)
        found.append(
            {"slot_mib": mib, "tokens": chunk.layout.rows, "payload_bytes": chunk.layout.total_bytes}
            | steady_state(KernelsOfChunk(chunk))
        )
    return found


def show_queueing(rows: list[dict[str, Any]]) -> None:
    """Print the host's times of single payloads."""
    print(f"{'model':14}{'page':>5} {'profile':22}{'slot':>5}{'tokens':>7}{'pack us':>9}{'unpack us':>10}{'lent':>6}")
    for row in rows:
        for payload in row["payloads"]:
            pack, unpack = payload["pack"], payload["unpack"]
            print(
                f"{row['model']:14}{row['page_size']:5} {row['profile']:22}{payload['slot_mib']:5}{payload['tokens']:7}"
                f"{pack['host_seconds'] * 1e6:9.0f}{unpack['host_seconds'] * 1e6:10.0f}"
                f"{pack['allocations'] + unpack['allocations']:6}"
            )


def measure(chunk: Chunk, bandwidth: float) -> dict[str, Any]:
    """Times and fractions of the floor of every kernel of a chunk."""
    kernels = KernelsOfChunk(chunk)
    pool, payload = chunk.pool_bytes, chunk.layout.total_bytes
    floor = (pool + payload) / bandwidth
    seconds = {
        "pack": gpu_seconds(kernels.pack),
        "pack_without_checksum": gpu_seconds(lambda: kernels.pack(checksum=False)),
        "checksum": gpu_seconds(kernels.sum),
        "unpack": gpu_seconds(kernels.unpack),
        "verified_unpack": gpu_seconds(kernels.verified_unpack),
    }
    return {
        "payload_bytes": payload,
        "pool_bytes": pool,
        "b": payload / pool,
        "floor_seconds": floor,
        "seconds": seconds,
        "fraction": {
            "pack": floor / seconds["pack"],
            "pack_without_checksum": floor / seconds["pack_without_checksum"],
            "checksum": payload / bandwidth / seconds["checksum"],
            "unpack": floor / seconds["unpack"],
            "verified_unpack": floor / seconds["verified_unpack"],
            "verified_unpack_of_two_reads": (pool + 2 * payload) / bandwidth / seconds["verified_unpack"],
        },
        "steady_state": steady_state(kernels),
        "wall_seconds": {
            "pack": wall_seconds(kernels.whole_pack),
            "unpack": wall_seconds(kernels.whole_unpack),
        },
    }


def environment() -> dict[str, Any]:
    """Machine and versions."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "runs": RUNS,
    }


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    print(
        f"{'model':14}{'page':>5} {'profile':18}{'b':>6}{'floor us':>9}{'pack':>7}{'no sum':>8}{'sum':>7}"
        f"{'unpack':>8}{'verified':>9}{'2 reads':>8}{'pack us':>9}{'unpack us':>10}{'host us':>14}{'wall us':>14}"
    )
    for row in rows:
        f, s = row["fraction"], row["seconds"]
        print(
            f"{row['model']:14}{row['page_size']:5} {row['profile']:18}{row['b']:6.3f}{row['floor_seconds'] * 1e6:9.0f}"
            f"{f['pack']:7.1%}{f['pack_without_checksum']:8.1%}{f['checksum']:7.1%}{f['unpack']:8.1%}"
            f"{f['verified_unpack']:9.1%}{f['verified_unpack_of_two_reads']:8.1%}"
            f"{s['pack'] * 1e6:9.0f}{s['verified_unpack'] * 1e6:10.0f}"
            f"{row['steady_state']['pack']['host_seconds'] * 1e6:7.0f}"
            f"{row['steady_state']['unpack']['host_seconds'] * 1e6:7.0f}"
            f"{row['wall_seconds']['pack'] * 1e6:7.0f}{row['wall_seconds']['unpack'] * 1e6:7.0f}"
        )


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Bars of pack and unpack by profile, one panel a model, at the smallest page size; nothing without matplotlib."""
    try:
        import matplotlib as mpl
    except ImportError:
        return
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    models = list(dict.fromkeys(row["model"] for row in rows))
    figure, axes = plt.subplots(1, len(models), figsize=(5 * len(models), 4), sharey=True, squeeze=False)
    for axis, model in zip(axes[0], models, strict=True):
        page = min(row["page_size"] for row in rows if row["model"] == model)
        chosen = [row for row in rows if row["model"] == model and row["page_size"] == page]
        for shift, kernel in enumerate(("pack", "unpack", "verified_unpack")):
            at = [i + 0.27 * (shift - 1) for i in range(len(chosen))]
            axis.bar(at, [row["fraction"][kernel] for row in chosen], 0.25, label=kernel.replace("_", " "))
        axis.axhline(0.85, color="black", linewidth=0.8, linestyle="--")
        axis.set_xticks(range(len(chosen)), [row["profile"] for row in chosen], rotation=60, ha="right")
        axis.set_title(f"{model}, page size {page}")
    axes[0][0].set_ylabel("fraction of the copy's bandwidth")
    axes[0][0].legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Measure and write ``kernels.json`` and, unless it is about payloads only, ``kernels.png``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"), help="folder for JSON and plot")
    parser.add_argument("--quick", action="store_true", help="Llama-3.1-8B with page size 1 only")
    parser.add_argument(
        "--payloads-only", action="store_true", help="only what the host needs for single payloads, page size 1"
    )
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("a CUDA GPU is needed")
    device = torch.device("cuda", 0)
    bandwidth = copy_bandwidth(device)
    print(f"copy bandwidth {bandwidth / 1e12:.3f} TB/s (read + written)", flush=True)
    rows = []
    for model in list(MODELS)[: 1 if arguments.quick else None]:
        pool = make_pool(geometry_of(model, 1), 2 * TOKENS, device)
        for page_size in (1,) if arguments.quick or arguments.payloads_only else (1, 16, 64):
            for profile, mix in MIXES.items():
                geometry = geometry_of(model, page_size)
                chunk = make_chunk(pool, geometry, mix, TOKENS)
                row = {"model": model, "page_size": page_size, "profile": profile}
                if not arguments.payloads_only:
                    row |= measure(chunk, bandwidth)
                if page_size == 1:
                    row["payloads"] = queueing(pool, geometry, mix, chunk.layout.total_bytes / chunk.pool_bytes)
                rows.append(row)
                print(f"{model} page {page_size} {profile}", flush=True)
        del pool, chunk
        torch.cuda.empty_cache()
    if not arguments.payloads_only:
        show(rows)
    show_queueing([row for row in rows if "payloads" in row])
    arguments.out.mkdir(parents=True, exist_ok=True)
    report = {"machine": environment(), "tokens": TOKENS, "copy_bytes_per_second": bandwidth, "kernels": rows}
    (arguments.out / "kernels.json").write_text(json.dumps(report, indent=1) + "\n")
    if not arguments.payloads_only:
        plot(rows, arguments.out / "kernels.png")


if __name__ == "__main__":
    main()
