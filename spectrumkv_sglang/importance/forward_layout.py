"""What a prefill forward observes: its requests, their sampled queries, and the kernels' work on them. Host only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class ObservedRequests:
    """The requests of a forward that add tokens, in the order of the batch; int64 arrays, one entry a request.

    Attributes:
        batch_rows: row in the batch.
        prefixes: tokens before the ones that the forward adds.
        keys: tokens with the added ones.
        publish_from: first position whose score the forward publishes.
        first_queries: where a request's sampled queries begin, with the number of all queries behind the last.
        query_rows: rows of q that are sampled, int64 [queries].
        query_positions: their positions in the request, int64 [queries], ascending within a request.
    """

    batch_rows: NDArray[np.int64]
    prefixes: NDArray[np.int64]
    keys: NDArray[np.int64]
    publish_from: NDArray[np.int64]
    first_queries: NDArray[np.int64]
    query_rows: NDArray[np.int64]
    query_positions: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.batch_rows)

    @property
    def queries(self) -> int:
        """Sampled queries of all requests."""
        return len(self.query_rows)


def requests_of_forward(
    prefixes: Sequence[int],
    extends: Sequence[int],
    continuing: Sequence[bool],
    sample_queries: Callable[[int], NDArray[np.int64]],
) -> ObservedRequests:
    """Requests of a batch with ``prefixes`` earlier and ``extends`` new tokens, entry by entry.

    Entries without new tokens pad the batch. A request that is ``continuing`` an earlier chunk publishes its new
    tokens only: the earlier ones may be on their way. ``sample_queries`` is the scorer's.
    """
    rows = [row for row, extend in enumerate(extends) if extend > 0]
    prefix = np.array([prefixes[row] for row in rows], dtype=np.int64)
    extend = np.array([extends[row] for row in rows], dtype=np.int64)
    samples = [sample_queries(int(tokens)) for tokens in extend]
    counts = np.array([len(sample) for sample in samples], dtype=np.int64)
    sampled = np.concatenate([np.zeros(0, dtype=np.int64), *samples])
    first_rows = np.cumsum(extend) - extend
    return ObservedRequests(
        batch_rows=np.array(rows, dtype=np.int64),
        prefixes=prefix,
        keys=prefix + extend,
        publish_from=np.where([continuing[row] for row in rows], prefix, 0).astype(np.int64),
        first_queries=np.concatenate(([0], np.cumsum(counts))),
        query_rows=sampled + np.repeat(first_rows, counts),
        query_positions=sampled + np.repeat(prefix, counts),
    )


@dataclass(frozen=True)
class KernelWork:
    """Tables of the kernels (`triton_importance`, `triton_importance_slots`) in one int32 array, with offsets into it.

    Attributes:
        words: everything; the indices of the sampled rows of q come first.
        positions_at, requests_at, log_items_at, sum_items_at: first words of the tables.
        log_items, log_tiles, sum_items: items of the first pass, those of first key splits, items of the second pass.
        log_sums: log-sums of one (layer, KV head).
        split: whether any request has more than one key split.
        total_keys, most_keys: of all requests, of the longest one.
    """

    words: NDArray[np.int32]
    positions_at: int
    requests_at: int
    log_items_at: int
    log_items: int
    log_tiles: int
    sum_items_at: int
    sum_items: int
    log_sums: int
    split: bool
    total_keys: int
    most_keys: int


def kernel_work(requests: ObservedRequests, group: int, tile_rows: int, split_keys: int, block_keys: int) -> KernelWork:
    """Cut a forward into work items.

    Args:
        group: query heads of a KV head.
        tile_rows: (query, head of the group) rows of an item of the first pass.
        split_keys: keys of an item of the first pass.
        block_keys: keys of an item of the second pass.
    """
    queries = np.diff(requests.first_queries)
    rows, splits = queries * group, -(-requests.keys // split_keys)
    key_base = np.cumsum(requests.keys) - requests.keys
    log_base = np.cumsum(rows * splits) - rows * splits
    per_request = np.column_stack((key_base, requests.first_queries[:-1], queries))

    tiles = -(-rows // tile_rows)
    owner, index = _numbered(tiles * splits)
    split, tile = np.divmod(index, np.maximum(tiles, 1)[owner])
    first_key, first_row = split * split_keys, tile * tile_rows
    log_items = np.column_stack(
        (
            per_request[owner],
            first_row,
            first_key,
            np.minimum(requests.keys[owner], first_key + split_keys),
            log_base[owner] + split * rows[owner] + first_row,
            splits[owner],
        )
    )[np.argsort(split > 0, kind="stable")]

    owner, index = _numbered(-(-requests.keys // block_keys))
    first_key = index * block_keys
    # Positions ascend within a request: shifted apart, those of all requests ascend, and one search does.
    shift = requests.keys.max(initial=0) + 1
    shifted = requests.query_positions + np.repeat(np.arange(len(requests)) * shift, queries)
    first_query = np.searchsorted(shifted, first_key + owner * shift) - requests.first_queries[owner]
    sum_items = np.column_stack(
        (
            per_request[owner],
            first_query * group,
            first_key,
            np.minimum(requests.keys[owner], first_key + block_keys),
            log_base[owner],
            np.zeros_like(owner),
        )
    )[first_query < queries[owner]]

    lines = np.column_stack(
        (
            requests.batch_rows,
            key_base,
            requests.prefixes,
            requests.keys,
            requests.first_queries[:-1],
            queries,
            requests.publish_from,
            np.zeros_like(rows),
        )
    )
    parts = (requests.query_rows, requests.query_positions, lines, log_items, sum_items)
    starts = np.cumsum([0, *(part.size for part in parts)])
    return KernelWork(
        words=np.concatenate([part.reshape(-1) for part in parts]).astype(np.int32),
        positions_at=int(starts[1]),
        requests_at=int(starts[2]),
        log_items_at=int(starts[3]),
        log_items=len(log_items),
        log_tiles=int(tiles.sum()),
        sum_items_at=int(starts[4]),
        sum_items=len(sum_items),
        log_sums=int((rows * splits).sum()),
        split=bool((splits > 1).any()),
        total_keys=int(requests.keys.sum()),
        most_keys=int(requests.keys.max(initial=0)),
    )


def _numbered(counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For ``counts[i]`` items of each owner i: the owner of each item, and its number among the owner's."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
