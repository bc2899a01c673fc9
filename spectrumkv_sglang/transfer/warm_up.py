"""Compiles the kernels of what a server sends when it starts, so that no request waits for it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from spectrumkv_sglang.payload.codec import warm_up_kernels, why_not_kernels
from spectrumkv_sglang.profiles.profile import load_profile
from spectrumkv_sglang.transfer.pool_view import PoolView
from spectrumkv_sglang.transfer.sending_policy import SendingPolicy
from spectrumkv_sglang.tuning.own_candidate import NATIVE_PACKED

logger = logging.getLogger(__name__)


def warm_up(view: PoolView, policies: Iterable[SendingPolicy]) -> None:
    """Compile what payloads of ``policies``, and of short prompts, need. Nothing on a CPU pool.

    A peer's payload of another profile still compiles at its first arrival.
    """
    if view.device.type != "cuda":
        return
    started = time.perf_counter()
    policies = tuple(policies)
    tables = {table.digest(): table for table in (policy.table(view) for policy in policies)}
    packed = load_profile(NATIVE_PACKED).table(view.geometry)
    for table in (tables | {packed.digest(): packed}).values():
        reason = why_not_kernels(view.buffers, table)
        if reason is not None:
            logger.warning("payloads are packed and unpacked by torch, several times slower: %s", reason)
        warm_up_kernels(view.buffers, view.geometry, table)
    names = ", ".join(dict.fromkeys(policy.profile.name for policy in policies))
    logger.info("kernels of profile %s are ready after %.1f s", names, time.perf_counter() - started)
