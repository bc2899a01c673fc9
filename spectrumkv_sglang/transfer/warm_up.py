"""Compiles the kernels of a server's own profile when it starts, so that no request waits for it."""

from __future__ import annotations

import logging
import time

from spectrumkv_sglang.config import SpectrumKVConfig
from spectrumkv_sglang.payload.codec import warm_up_kernels, why_not_kernels
from spectrumkv_sglang.profiles.profile import load_profile
from spectrumkv_sglang.transfer.chunk_planner import NATIVE_PACKED
from spectrumkv_sglang.transfer.pool_view import PoolView

logger = logging.getLogger(__name__)


def warm_up(view: PoolView, config: SpectrumKVConfig) -> None:
    """Compile what payloads of the configured profile, and of short prompts, need. Nothing on a CPU pool.

    A peer's payload of another profile still compiles at its first arrival.
    """
    if view.device.type != "cuda":
        return
    started = time.perf_counter()
    tables = (
        config.loaded_profile.table(view.geometry, config.allowed_tiers),
        load_profile(NATIVE_PACKED).table(view.geometry),
    )
    for table in tables:
        reason = why_not_kernels(view.buffers, table)
        if reason is not None:
            logger.warning("payloads are packed and unpacked by torch, several times slower: %s", reason)
        warm_up_kernels(view.buffers, view.geometry, table)
    logger.info("kernels of profile %s are ready after %.1f s", config.profile, time.perf_counter() - started)
