"""How fast a GPU packs and unpacks."""

from __future__ import annotations

from typing import Any

from spectrumkv_sglang.report.content import Section, Table, number


def kernel_sections(document: dict[str, Any]) -> list[Section]:
    """The result of benchmarks/kernels.py, or gpu.json that holds one."""
    kernels = document["kernels"] if isinstance(document["kernels"], dict) else document
    rows = [
        [
            f"{one['model']}, {one['profile']}", f"{one['b']:.3f}",
            number(one["pool_bytes"] / one["seconds"]["pack"] / 1e9),
            number(one["pool_bytes"] / one["seconds"]["verified_unpack"] / 1e9),
            f"{one['fraction']['pack']:.0%}", f"{one['fraction']['verified_unpack']:.0%}",
        ]
        for one in kernels["kernels"]
        if one["page_size"] == 1
    ]  # fmt: skip
    columns = ["model, profile", "b", "pack, GB/s of native KV", "verified unpack", "pack, of the floor", "unpack"]
    gpu = kernels["machine"]["gpu"]
    text = (
        f"{kernels['tokens']:,} tokens on pages of one token, {gpu}; the floor is the fewest bytes at a copy's speed."
    )
    return [Section(f"Kernels: {gpu}", [text], [Table("Packing and unpacking", columns, rows)])]
