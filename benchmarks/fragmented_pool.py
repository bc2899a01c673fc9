"""An SGLang plugin that hands out KV pages in random order: a pool as fragmented as it can be.

It is put on the PYTHONPATH of a server (see `sglang_plugin`). The order is drawn anew whenever SGLang empties the pool
(at the start and when the prefix cache is flushed) and when it sorts the pages that were freed, which it does in a
disaggregated pair before it would run short.
"""

from __future__ import annotations

from typing import Any

SEED = 7
_ALLOCATORS = "sglang.srt.mem_cache.allocator"
HOOKED = tuple(
    f"{_ALLOCATORS}.{allocator}.{method}"
    for allocator in ("TokenToKVPoolAllocator", "PagedTokenToKVPoolAllocator")  # page size 1, larger pages
    for method in ("clear", "merge_and_sort_free")
)
"""What is followed by a shuffle."""


def register() -> None:
    """Entry point for SGLang."""
    import torch
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def shuffle(result: Any, allocator: Any, *args: Any, **kwargs: Any) -> None:
        pages = allocator.free_pages
        order = torch.randperm(len(pages), generator=torch.Generator().manual_seed(SEED))
        allocator.free_pages = pages[order.to(pages.device)]

    for name in HOOKED:
        HookRegistry.register(name, shuffle, HookType.AFTER)
