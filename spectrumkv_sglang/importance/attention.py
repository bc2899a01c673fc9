"""Attention that sampled queries pay to the keys of a sequence.

Fused attention kernels give no attention matrix, so the rows of the sampled queries are computed again, as SnapKV's
observation window (arXiv 2404.14469) and ZipCache's probe tokens (arXiv 2405.14256) do.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK_BYTES = 64 * 1024 * 1024
"""Most bytes of one block of float32 logits, and of one float32 copy of keys (a single row or head may exceed it)."""


def observed_attention(
    q: Tensor,
    k: Tensor,
    query_positions: Tensor,
    scaling: float,
    sliding_window: int | None = None,
    logit_cap: float | None = None,
    block_bytes: int = BLOCK_BYTES,
) -> tuple[Tensor, Tensor]:
    """Attention probability that each key receives from the sampled queries, under the causal mask.

    Args:
        q: queries ``[queries, q_heads, head_dim]``, any float dtype. ``q_heads`` is a multiple of ``kv_heads``; query
            head h reads KV head ``h // (q_heads / kv_heads)``.
        k: keys ``[keys, kv_heads, head_dim]`` of positions 0, 1, ... of the same sequence, rotated as the model does.
        query_positions: int64 ``[queries]``, position of each query in ``[0, keys)``, any order. Best left on the CPU:
            a device tensor costs one synchronisation.
        scaling: factor on the logits (``layer.scaling`` in SGLang).
        sliding_window: keys before its own position that a query sees; None or a negative number for all of them. This
            is SGLang's ``layer.sliding_window_size``, one less than ``sliding_window`` of a Hugging Face config.
        logit_cap: logits become ``cap * tanh(logits / cap)``; None or 0 for none.
        block_bytes: memory bound of one block, see below.

    Returns:
        ``(column_sums, could_attend)``, float32 ``[keys]`` on ``k``'s device: the probability each key received, summed
        over queries and averaged over query heads, and the number of sampled queries that could attend to it. The
        importance of a key is their ratio: the raw sum favours early tokens and is worse than chance.

    Memory: queries and KV heads go in blocks; beside its inputs and outputs it holds at most one float32 copy of
    ``block_bytes`` of keys, two blocks of logits of ``block_bytes`` and their boolean mask.

    Raises:
        ValueError: shapes that do not fit, or a position outside the keys.
    """
    if q.dim() != 3 or k.dim() != 3 or q.shape[2] != k.shape[2] or k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(
            "expected q [queries, q_heads, head_dim] and k [keys, kv_heads, head_dim] with q_heads a multiple of "
            f"kv_heads, got {tuple(q.shape)} and {tuple(k.shape)}"
        )
    positions = query_positions.to(device="cpu", dtype=torch.int64)
    if positions.shape != (q.shape[0],):
        raise ValueError(f"expected {q.shape[0]} query positions, got shape {tuple(positions.shape)}")
    keys = k.shape[0]
    if len(positions) and (int(positions.min()) < 0 or int(positions.max()) >= keys):
        raise ValueError(
            f"query positions must lie in [0, {keys}), got {int(positions.min())} to {int(positions.max())}"
        )
    window = sliding_window if sliding_window is not None and sliding_window >= 0 else None
    column_sums = torch.zeros(keys, dtype=torch.float32, device=k.device)
    could_attend = _queries_that_could_attend(positions, keys, window).to(k.device)
    if not len(positions):
        return column_sums, could_attend

    kv_heads, head_dim = k.shape[1], k.shape[2]
    group = q.shape[1] // kv_heads
    heads_at_once = min(kv_heads, max(1, block_bytes // (keys * head_dim * 4)))
    queries_at_once = max(1, block_bytes // (keys * heads_at_once * group * 4))
    positions, order = positions.sort()
    order_on_device, positions_on_device = order.to(q.device), positions.to(k.device)
    for head in range(0, kv_heads, heads_at_once):
        heads = slice(head, min(head + heads_at_once, kv_heads))
        keys_block = k[:, heads].permute(1, 2, 0).to(torch.float32)
        for first in range(0, len(positions), queries_at_once):
            block = slice(first, first + queries_at_once)
            # Sorted positions: nothing in this block sees a key before `low` or from `high` on.
            low = 0 if window is None else max(0, int(positions[first]) - window)
            high = int(positions[block][-1]) + 1
            queries = q[order_on_device[block], head * group : heads.stop * group].to(torch.float32) * scaling
            queries = queries.unflatten(1, (-1, group)).permute(1, 2, 0, 3).flatten(1, 2)
            logits = torch.bmm(queries, keys_block[:, :, low:high]).unflatten(1, (group, -1))
            if logit_cap:
                logits.div_(logit_cap).tanh_().mul_(logit_cap)
            logits.masked_fill_(_hidden_keys(positions_on_device[block], low, high, window), float("-inf"))
            column_sums[low:high] += logits.softmax(dim=-1).sum(dim=(0, 1, 2))
    return column_sums.div_(q.shape[1]), could_attend


def _hidden_keys(positions: Tensor, low: int, high: int, window: int | None) -> Tensor:
    """Bool [queries, high - low]: key ``low + j`` is not visible to the query."""
    key_positions = torch.arange(low, high, device=positions.device)
    hidden = key_positions > positions[:, None]
    if window is not None:
        hidden |= key_positions < positions[:, None] - window
    return hidden


def _queries_that_could_attend(positions: Tensor, keys: int, window: int | None) -> Tensor:
    """Float32 [keys]: number of queries that see each key, by differences (one step up, one step down a query)."""
    steps = torch.zeros(keys + 1, dtype=torch.float64)
    first_seen = torch.zeros_like(positions) if window is None else (positions - window).clamp_(min=0)
    ones = torch.ones(len(positions), dtype=torch.float64)
    steps.index_add_(0, first_seen, ones)
    steps.index_add_(0, positions + 1, -ones)
    return steps.cumsum(0)[:keys].to(torch.float32)
