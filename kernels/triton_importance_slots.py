"""Scores by pool slot on the GPU: begin and end of an observed forward, one launch each for all its requests."""

# Triton reads the annotations of kernels, so only what it knows can stand there.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from spectrumkv_sglang.kernels.importance_format import MOST_OBSERVATIONS, RECEIVED_ONE, REQUEST_COLUMNS

BLOCK_KEYS = 256

_COLUMNS = tl.constexpr(REQUEST_COLUMNS)
_MOST = tl.constexpr(MOST_OBSERVATIONS)
_UNIT = tl.constexpr(1.0 / RECEIVED_ONE)


@triton.jit(
    do_not_specialize=["requests_at", "token_stride"],
    do_not_specialize_on_alignment=["pool_indices_ptr", "req_to_token_ptr"],
)
def _begin(
    words_ptr,
    slots_ptr,
    pool_indices_ptr,
    req_to_token_ptr,
    received_ptr,
    could_attend_ptr,
    published_ptr,
    requests_at,
    token_stride,
    BLOCK: tl.constexpr,
):
    request = words_ptr + requests_at + tl.program_id(1) * _COLUMNS
    keys, prefix = tl.load(request + 3), tl.load(request + 2)
    key = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = key < keys
    pool_index = tl.load(pool_indices_ptr + tl.load(request)).to(tl.int64)
    slot = tl.load(req_to_token_ptr + pool_index * token_stride + key, mask=inside, other=0)
    tl.store(slots_ptr + tl.load(request + 1) + key, slot.to(tl.int32), mask=inside)
    fresh = inside & (key >= prefix)
    where = slot.to(tl.int64)
    tl.store(received_ptr + where, tl.zeros([BLOCK], tl.int64), mask=fresh)
    tl.store(could_attend_ptr + where, tl.zeros([BLOCK], tl.int32), mask=fresh)
    tl.store(published_ptr + where, tl.zeros([BLOCK], tl.float32), mask=fresh)


@triton.jit(do_not_specialize=["requests_at", "positions_at", "window", "layers"])
def _count(
    words_ptr,
    slots_ptr,
    could_attend_ptr,
    requests_at,
    positions_at,
    window,
    layers,
    BLOCK: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
):
    request = words_ptr + requests_at + tl.program_id(1) * _COLUMNS
    keys = tl.load(request + 3)
    queries = tl.load(request + 5)
    key = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = key < keys
    slot = tl.load(slots_ptr + tl.load(request + 1) + key, mask=inside, other=0).to(tl.int64)
    positions_ptr = words_ptr + positions_at + tl.load(request + 4)
    count = tl.zeros([BLOCK], tl.int32)
    for first in range(0, queries, BLOCK_QUERIES):
        query = first + tl.arange(0, BLOCK_QUERIES)
        position = tl.load(positions_ptr + query, mask=query < queries, other=-1)
        sees = (key[:, None] <= position[None, :]) & (key[:, None] >= position[None, :] - window)
        count += tl.sum(sees.to(tl.int32), axis=1)
    open_slot = tl.load(could_attend_ptr + slot) < _MOST
    tl.atomic_add(could_attend_ptr + slot, count * layers, mask=inside & open_slot, sem="relaxed")


@triton.jit(do_not_specialize=["requests_at"])
def _publish(
    words_ptr, slots_ptr, received_ptr, could_attend_ptr, published_ptr, requests_at, BLOCK: tl.constexpr
):  # fmt: skip
    request = words_ptr + requests_at + tl.program_id(1) * _COLUMNS
    key = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    chosen = (key < tl.load(request + 3)) & (key >= tl.load(request + 6))
    slot = tl.load(slots_ptr + tl.load(request + 1) + key, mask=chosen, other=0).to(tl.int64)
    could_attend = tl.load(could_attend_ptr + slot, mask=chosen, other=0).to(tl.float32)
    received = tl.load(received_ptr + slot, mask=chosen, other=0).to(tl.float32) * _UNIT
    score = tl.where(could_attend > 0.0, received / tl.maximum(could_attend, 1.0), 0.0)
    tl.store(published_ptr + slot, score, mask=chosen)


def begin_forward(
    words: torch.Tensor,
    requests_at: int,
    requests: int,
    most_keys: int,
    slots: torch.Tensor,
    pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    scores: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """List the pool slots of every request's keys and forget the scores of those that this forward writes.

    Args:
        words: int32 tables; ``requests`` lines of `REQUEST_COLUMNS` from ``requests_at`` on.
        most_keys: keys of the longest request.
        slots: int32, filled.
        pool_indices: int32 or int64 [batch], rows of ``req_to_token``.
        req_to_token: int32 [requests, positions] -> pool slot.
        scores: received int64, could-attend int32 and published float32, each [pool slots].
    """
    _launch(
        _begin,
        (triton.cdiv(most_keys, BLOCK_KEYS), requests),
        (words, slots, pool_indices, req_to_token, *scores, requests_at, req_to_token.stride(0)),
        {"BLOCK": BLOCK_KEYS},
        words.device,
    )


def count_observations(
    words: torch.Tensor,
    requests_at: int,
    requests: int,
    most_keys: int,
    slots: torch.Tensor,
    positions_at: int,
    could_attend: torch.Tensor,
    window: int,
    layers: int,
) -> None:
    """Add to each key's count the sampled queries that could attend to it in ``layers`` layers of ``window``."""
    _launch(
        _count,
        (triton.cdiv(most_keys, BLOCK_KEYS), requests),
        (words, slots, could_attend, requests_at, positions_at, window, layers),
        {"BLOCK": BLOCK_KEYS, "BLOCK_QUERIES": 32},
        words.device,
    )


def publish_scores(
    words: torch.Tensor,
    requests_at: int,
    requests: int,
    most_keys: int,
    slots: torch.Tensor,
    scores: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """Make the mean probability by now the score that is read, for the keys that a request publishes."""
    _launch(
        _publish,
        (triton.cdiv(most_keys, BLOCK_KEYS), requests),
        (words, slots, *scores, requests_at),
        {"BLOCK": BLOCK_KEYS},
        words.device,
    )


def _launch(
    kernel: Any, grid: tuple[int, int], arguments: tuple[Any, ...], constants: dict[str, Any], device: torch.device
) -> None:
    if device.type == "cuda":
        with torch.cuda.device(device):
            kernel[grid](*arguments, **constants, num_warps=4)
    else:
        kernel[grid](*arguments, **constants)
