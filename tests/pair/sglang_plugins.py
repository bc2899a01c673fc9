"""Small SGLang plugins that the tests put beside ours to break or bend a server on purpose.

They use SGLang's own plugin entry point: a folder with a module and its ``.dist-info`` on PYTHONPATH is enough. None of
them is a part of the product.
"""

from __future__ import annotations

from pathlib import Path

DROP_PAYLOAD = """
def register():
    import os
    if not os.environ.get("SPECTRUMKV_ACTIVE"):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    HookRegistry.register(
        "spectrumkv_sglang.transfer.manager.SpectrumKVManager.send_kvcache",
        lambda original, *args, **kwargs: 0,
        HookType.AROUND,
    )
"""
"""Sends the metadata of a request but none of its KV: what a comparison must notice."""

SHUFFLE_POOL = """
def register():
    import torch
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def shuffle(result, allocator, *args, **kwargs):
        generator = torch.Generator().manual_seed(7)
        pages = allocator.free_pages
        allocator.free_pages = pages[torch.randperm(len(pages), generator=generator)]

    HookRegistry.register(
        "sglang.srt.mem_cache.allocator.TokenToKVPoolAllocator.clear", shuffle, HookType.AFTER
    )
"""
"""Hands out KV pages in random order: a pool as fragmented as it can be."""

REMOVE_EXTENSION_POINT = """
def register():
    import os
    if os.environ.get("SPECTRUMKV_ACTIVE"):
        from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager
        del MooncakeKVManager.send_kvcache_slice
"""
"""A SGLang that lacks one of the things that the backend extends."""

TWO_BIT_INT4 = """
def register():
    import os
    if not os.environ.get("SPECTRUMKV_LOOPBACK"):
        return
    import torch
    from spectrumkv_sglang.kernels import quantisers
    from spectrumkv_sglang.kernels.precision import Precision
    from spectrumkv_sglang.kernels.quantisers import AffineRowQuantiser

    class TwoBits(AffineRowQuantiser):
        def quantise(self, x, near_normal=False):
            values = x.float()
            low, high = values.amin(-1, keepdim=True), values.amax(-1, keepdim=True)
            step = ((high - low) / 3).clamp(min=1e-6)
            return super().quantise(((values - low) / step).round() * step + low)

    quantisers._QUANTISERS[Precision.INT4] = TwoBits(4)
"""
"""INT4 that keeps only four levels a row: a quantiser that a probe must refuse."""


def plugin_path(folder: Path, name: str, source: str) -> str:
    """Write the plugin ``name`` under ``folder``; returns what to put on PYTHONPATH."""
    root = folder / name
    info = root / f"{name}-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (root / f"{name}.py").write_text(source)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{name} = {name}:register\n")
    return str(root.resolve())
