"""Attention that sampled queries pay to paged keys, over requests, KV heads and layers in one launch a pass.

The first pass gives the log-sum-exp of each (query, head) over its visible keys, the second adds each key's
probabilities up over queries and heads. Keys are read from the pool where they lie; all query heads of a KV head go
through the tensor cores together. Sums end in fixed point, which adds up to the same number in any order, so results do
not depend on the order in which programs run. The torch reference is `importance.attention.observed_attention`.
"""

# Triton reads the annotations of kernels, so only what it knows can stand there.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from spectrumkv_sglang.kernels.importance_format import ITEM_COLUMNS, LAYER_COLUMNS, MOST_OBSERVATIONS, RECEIVED_ONE

UNIT_BYTES = 16
"""Key addresses and strides are multiples of this many bytes: a thread moves 16 at a time."""
MOST_DIM = 256

_COLUMNS = tl.constexpr(ITEM_COLUMNS)
_LAYER_COLUMNS = tl.constexpr(LAYER_COLUMNS)
_ONE = tl.constexpr(float(RECEIVED_ONE))
_MOST = tl.constexpr(MOST_OBSERVATIONS)
_LOG2E = tl.constexpr(1.4426950408889634)


class PassShape(NamedTuple):
    """How a pass is cut: rows and keys of a tile, warps that work on it, tiles in flight."""

    rows: int
    keys: int
    warps: int
    stages: int


class ImportanceShapes(NamedTuple):
    """Tiles of both passes, and the keys that one program of the first pass goes through, a multiple of its tile's."""

    log_sums: PassShape
    column_sums: PassShape
    split_keys: int


_FASTEST = ImportanceShapes(PassShape(128, 64, 4, 3), PassShape(32, 128, 4, 3), 2048)
_WIDE = ImportanceShapes(PassShape(64, 32, 4, 2), PassShape(32, 64, 4, 2), 2048)
_INTERPRETED = ImportanceShapes(PassShape(64, 32, 4, 1), PassShape(64, 64, 4, 1), 64)


def shapes_for(device: torch.device, dtype: torch.dtype, dim: int) -> ImportanceShapes:
    """Tiles that were fastest on an H200, smaller ones for wide heads, small ones where the interpreter runs them."""
    if device.type != "cuda":
        return _INTERPRETED
    return _FASTEST if dtype.itemsize == 2 and dim <= 128 else _WIDE


class LayerBatch(NamedTuple):
    """Consecutive layers of one forward whose sampled queries are at hand.

    Attributes:
        queries: [layers, sampled queries, q heads * head dim], contiguous.
        keys: key buffer of the pool's first layer, [pool slots, kv heads, head dim].
        offsets: int64 [all layers, 2] and
        factors: float32 [all layers, 2], see `importance_format.LAYER_COLUMNS`.
        first: index of the first of these layers.
        capped: whether any layer of the model has a logit cap.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    offsets: torch.Tensor
    factors: torch.Tensor
    first: int
    capped: bool


class WorkTables(NamedTuple):
    """Where the work of a forward is described: int32 words on the device, and offsets into them.

    Attributes:
        words: all tables.
        slots: int32 [keys of all requests], pool slot of each key.
        positions_at: sampled queries' positions, ascending within a request.
        log_items_at: items of the first pass, those of each request's first key split first.
        log_items: their number.
        log_tiles: how many of them belong to a first key split.
        sum_items_at: items of the second pass.
        sum_items: their number.
        log_sums: log-sums of one (layer, KV head): rows times key splits of all requests.
        split: whether any request has more than one key split.
    """

    words: torch.Tensor
    slots: torch.Tensor
    positions_at: int
    log_items_at: int
    log_items: int
    log_tiles: int
    sum_items_at: int
    sum_items: int
    log_sums: int
    split: bool


def why_not(keys: list[torch.Tensor]) -> str | None:
    """Why the kernels cannot take these key buffers, or None if they can."""
    for buffer in keys:
        if buffer.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return f"keys of bfloat16, float16 or float32, got {buffer.dtype}"
        if buffer.shape[2] > MOST_DIM or buffer.shape[2] * buffer.element_size() % UNIT_BYTES:
            return f"head dimensions up to {MOST_DIM} in whole units of {UNIT_BYTES} bytes, got {buffer.shape[2]}"
        strides = [stride * buffer.element_size() for stride in buffer.stride()[:2]]
        if buffer.data_ptr() % UNIT_BYTES or any(stride % UNIT_BYTES for stride in strides) or buffer.stride(2) != 1:
            return f"pool addresses and strides divisible by {UNIT_BYTES} bytes, got strides of {strides}"
        first = keys[0]
        if buffer.shape[1:] != first.shape[1:] or buffer.stride() != first.stride() or buffer.dtype != first.dtype:
            return "one shape, dtype and stride for all layers"
    return None


@triton.jit
def _logits(products, scaling, cap, CAPPED: tl.constexpr):
    """Logits times log2(e)."""
    if CAPPED:
        scaled = products * scaling
        divisor = tl.where(cap > 0.0, cap, 1.0)
        # tanh(x) = 1 - 2 / (1 + e^2x), right for both infinities.
        tanh = 1.0 - 2.0 / (1.0 + tl.exp2(scaled * (2.0 * _LOG2E / divisor)))
        return tl.where(cap > 0.0, cap * tanh, scaled) * _LOG2E
    else:
        return products * (scaling * _LOG2E)


@triton.jit
def _load_rows(pointers, dims, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, WIDE: tl.constexpr):
    """[rows, BLOCK_DIM] from the rows' first elements, zero beyond the head."""
    if BLOCK_DIM == DIM:
        loaded = tl.load(pointers[:, None] + dims[None, :])
    else:
        loaded = tl.load(pointers[:, None] + dims[None, :], mask=(dims < DIM)[None, :], other=0.0)
    return loaded.to(tl.float32) if WIDE else loaded


@triton.jit(
    do_not_specialize=[
        "items_at", "positions_at", "first_layer", "queries", "slot_stride", "head_stride", "log_sums", "group",
    ]
)  # fmt: skip
def _log_sums(
    queries_ptr,
    keys_ptr,
    words_ptr,
    slots_ptr,
    offsets_ptr,
    factors_ptr,
    log_sums_ptr,
    items_at,
    positions_at,
    first_layer,
    queries,
    slot_stride,
    head_stride,
    log_sums,
    group,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    CAPPED: tl.constexpr,
    WIDE: tl.constexpr,
    UNIT: tl.constexpr,
):
    head, layer = tl.program_id(1), tl.program_id(2)
    item = words_ptr + items_at + tl.program_id(0) * _COLUMNS
    PRECISION: tl.constexpr = "ieee" if WIDE else "tf32"  # what the second says means nothing to 16-bit factors
    key_base, query_base = tl.load(item), tl.load(item + 1)
    rows = tl.load(item + 2) * group
    first_row = tl.load(item + 3)
    first_key, end_key = tl.load(item + 4), tl.load(item + 5)
    at = tl.load(item + 6)
    start = tl.load(offsets_ptr + (first_layer + layer) * _LAYER_COLUMNS)
    window = tl.load(offsets_ptr + (first_layer + layer) * _LAYER_COLUMNS + 1).to(tl.int32)
    scaling = tl.load(factors_ptr + (first_layer + layer) * _LAYER_COLUMNS)
    cap = tl.load(factors_ptr + (first_layer + layer) * _LAYER_COLUMNS + 1)

    row = first_row + tl.arange(0, BLOCK_ROWS)
    inside = row < rows
    readable = tl.minimum(row, rows - 1)
    query = query_base + readable // group
    position = tl.load(words_ptr + positions_at + query)
    dims = tl.arange(0, BLOCK_DIM)
    q_head = head * group + readable % group
    line = (layer.to(tl.int64) * queries + query) * (tl.num_programs(1) * group) + q_head
    q = _load_rows(queries_ptr + line * DIM, dims, DIM, BLOCK_DIM, WIDE)

    # Positions ascend: no row sees keys before the first one's window or after the last one's position.
    skipped = tl.maximum(tl.min(position, axis=0) - window - first_key, 0) // BLOCK_KEYS
    end = tl.minimum(end_key, tl.max(position, axis=0) + 1)
    keys_of_head = keys_ptr + (start + head.to(tl.int64) * head_stride) * UNIT
    largest = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    for block in range(first_key + skipped * BLOCK_KEYS, end, BLOCK_KEYS):
        key = block + tl.arange(0, BLOCK_KEYS)
        slot = tl.load(slots_ptr + key_base + tl.minimum(key, end - 1)).to(tl.int64)
        k = _load_rows(keys_of_head + slot * slot_stride * UNIT, dims, DIM, BLOCK_DIM, WIDE)
        products = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        logits = _logits(products, scaling, cap, CAPPED)
        hidden = (key[None, :] > position[:, None]) | (key[None, :] < position[:, None] - window)
        logits = tl.where(hidden, float("-inf"), logits)
        larger = tl.maximum(largest, tl.max(logits, axis=1))
        origin = tl.where(larger == float("-inf"), 0.0, larger)
        total = total * tl.exp2(largest - origin) + tl.sum(tl.exp2(logits - origin[:, None]), axis=1)
        largest = larger
    # A row that saw nothing: -inf + log2(1).
    result = largest + tl.log2(tl.where(total == 0.0, 1.0, total))
    line = (layer.to(tl.int64) * tl.num_programs(1) + head) * log_sums
    tl.store(log_sums_ptr + line + at + tl.arange(0, BLOCK_ROWS), result, mask=inside)


@triton.jit(do_not_specialize=["items_at", "log_sums", "group"])
def _join_splits(words_ptr, log_sums_ptr, items_at, log_sums, group, BLOCK_ROWS: tl.constexpr):
    """Log-sums over all key splits, in the place of the first one's."""
    head, layer = tl.program_id(1), tl.program_id(2)
    item = words_ptr + items_at + tl.program_id(0) * _COLUMNS
    rows = tl.load(item + 2) * group
    row = tl.load(item + 3) + tl.arange(0, BLOCK_ROWS)
    splits = tl.load(item + 7)
    inside = row < rows
    line = (layer.to(tl.int64) * tl.num_programs(1) + head) * log_sums
    first = log_sums_ptr + line + tl.load(item + 6) + tl.arange(0, BLOCK_ROWS)
    largest = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    for split in range(splits):
        part = tl.load(first + split * rows, mask=inside, other=float("-inf"))
        larger = tl.maximum(largest, part)
        origin = tl.where(larger == float("-inf"), 0.0, larger)
        total = total * tl.exp2(largest - origin) + tl.exp2(part - origin)
        largest = larger
    tl.store(first, largest + tl.log2(tl.where(total == 0.0, 1.0, total)), mask=inside)


@triton.jit(
    do_not_specialize=[
        "items_at", "positions_at", "first_layer", "queries", "slot_stride", "head_stride", "log_sums", "group",
    ]
)  # fmt: skip
def _column_sums(
    queries_ptr,
    keys_ptr,
    words_ptr,
    slots_ptr,
    offsets_ptr,
    factors_ptr,
    log_sums_ptr,
    received_ptr,
    could_attend_ptr,
    items_at,
    positions_at,
    first_layer,
    queries,
    slot_stride,
    head_stride,
    log_sums,
    group,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    CAPPED: tl.constexpr,
    WIDE: tl.constexpr,
    UNIT: tl.constexpr,
):
    head, layer = tl.program_id(1), tl.program_id(2)
    item = words_ptr + items_at + tl.program_id(0) * _COLUMNS
    PRECISION: tl.constexpr = "ieee" if WIDE else "tf32"  # what the second says means nothing to 16-bit factors
    key_base, query_base = tl.load(item), tl.load(item + 1)
    rows = tl.load(item + 2) * group
    first_row = tl.load(item + 3)
    first_key, end_key = tl.load(item + 4), tl.load(item + 5)
    at = tl.load(item + 6)
    start = tl.load(offsets_ptr + (first_layer + layer) * _LAYER_COLUMNS)
    window = tl.load(offsets_ptr + (first_layer + layer) * _LAYER_COLUMNS + 1).to(tl.int32)
    scaling = tl.load(factors_ptr + (first_layer + layer) * _LAYER_COLUMNS)
    cap = tl.load(factors_ptr + (first_layer + layer) * _LAYER_COLUMNS + 1)

    key = first_key + tl.arange(0, BLOCK_KEYS)
    inside = key < end_key
    slot = tl.load(slots_ptr + key_base + tl.minimum(key, end_key - 1)).to(tl.int64)
    dims = tl.arange(0, BLOCK_DIM)
    keys_of_head = keys_ptr + (start + head.to(tl.int64) * head_stride) * UNIT
    k = _load_rows(keys_of_head + slot * slot_stride * UNIT, dims, DIM, BLOCK_DIM, WIDE)

    first_query = layer.to(tl.int64) * queries + query_base
    log_sums_of_head = log_sums_ptr + (layer.to(tl.int64) * tl.num_programs(1) + head) * log_sums + at
    total = tl.zeros([BLOCK_KEYS], tl.float32)
    for block in range(first_row, rows, BLOCK_ROWS):
        row = block + tl.arange(0, BLOCK_ROWS)
        readable = tl.minimum(row, rows - 1)
        query = readable // group
        position = tl.load(words_ptr + positions_at + query_base + query)
        position = tl.where(row < rows, position, -1)
        log_sum = tl.load(log_sums_of_head + readable)
        q_line = (first_query + query) * (tl.num_programs(1) * group) + head * group + readable % group
        q = _load_rows(queries_ptr + q_line * DIM, dims, DIM, BLOCK_DIM, WIDE)
        products = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        logits = _logits(products, scaling, cap, CAPPED)
        seen = (key[:, None] <= position[None, :]) & (key[:, None] >= position[None, :] - window)
        total += tl.sum(tl.exp2(tl.where(seen, logits - log_sum[None, :], float("-inf"))), axis=1)

    # What is not a number counts as nothing received.
    total = tl.where(total == total, total, 0.0)
    heads = (tl.num_programs(1) * group).to(tl.float32)
    fixed = (total * (_ONE / heads) + 0.5).to(tl.int64)
    open_slot = tl.load(could_attend_ptr + slot) < _MOST
    tl.atomic_add(received_ptr + slot, fixed, mask=inside & open_slot, sem="relaxed")


def add_received(
    batch: LayerBatch,
    tables: WorkTables,
    log_sums: torch.Tensor,
    received: torch.Tensor,
    could_attend: torch.Tensor,
    shapes: ImportanceShapes,
) -> None:
    """Queue both passes over the layers of ``batch``.

    Args:
        log_sums: float32 scratch, at least layers x KV heads x ``tables.log_sums``.
        received: int64 [pool slots], added to: probability summed over queries and layers, averaged over query heads,
            as a multiple of 1 / `RECEIVED_ONE`. What is not a number adds nothing.
        could_attend: int32 [pool slots]; slots with `MOST_OBSERVATIONS` or more are not added to.
    """
    layers, queries, width = batch.queries.shape
    kv_heads, dim = batch.keys.shape[1:]
    group = width // dim // kv_heads
    itemsize = batch.keys.element_size()
    inputs = (batch.queries, batch.keys, tables.words, tables.slots, batch.offsets, batch.factors, log_sums)
    numbers = (
        tables.positions_at,
        batch.first,
        queries,
        batch.keys.stride(0) * itemsize // UNIT_BYTES,
        batch.keys.stride(1) * itemsize // UNIT_BYTES,
        tables.log_sums,
        group,
    )
    constants = {
        "DIM": dim,
        "BLOCK_DIM": max(16, triton.next_power_of_2(dim)),
        "CAPPED": batch.capped,
        # Tensor cores take two factors of one 16-bit format; the interpreter multiplies none of bfloat16 right.
        "WIDE": itemsize != 2 or batch.queries.dtype != batch.keys.dtype or log_sums.device.type != "cuda",
        "UNIT": UNIT_BYTES // itemsize,
    }
    _launch(
        _log_sums,
        (tables.log_items, kv_heads, layers),
        (*inputs, tables.log_items_at, *numbers),
        {**constants, **_tile(shapes.log_sums)},
        shapes.log_sums,
        log_sums.device,
    )
    if tables.split:
        _launch(
            _join_splits,
            (tables.log_tiles, kv_heads, layers),
            (tables.words, log_sums, tables.log_items_at, tables.log_sums, group),
            {"BLOCK_ROWS": shapes.log_sums.rows},
            shapes.log_sums,
            log_sums.device,
        )
    _launch(
        _column_sums,
        (tables.sum_items, kv_heads, layers),
        (*inputs, received, could_attend, tables.sum_items_at, *numbers),
        {**constants, **_tile(shapes.column_sums)},
        shapes.column_sums,
        log_sums.device,
    )


def _tile(shape: PassShape) -> dict[str, int]:
    return {"BLOCK_ROWS": shape.rows, "BLOCK_KEYS": shape.keys}


def _launch(
    kernel: Any,
    grid: tuple[int, int, int],
    arguments: tuple[Any, ...],
    constants: dict[str, Any],
    shape: PassShape,
    device: torch.device,
) -> None:
    if device.type == "cuda":
        with torch.cuda.device(device):
            kernel[grid](*arguments, **constants, num_warps=shape.warps, num_stages=shape.stages)
    else:
        kernel[grid](*arguments, **constants)
