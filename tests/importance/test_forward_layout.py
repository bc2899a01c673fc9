"""What a forward observes, and how the kernels' work on it is cut."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spectrumkv_sglang.importance.forward_layout import ObservedRequests, kernel_work, requests_of_forward
from spectrumkv_sglang.importance.scorers import WindowScorer
from spectrumkv_sglang.kernels.importance_format import ITEM_COLUMNS, REQUEST_COLUMNS

lengths = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 200)), min_size=1, max_size=6)


def requests_of(entries: list[tuple[int, int]]) -> ObservedRequests:
    prefixes, extends = zip(*entries, strict=True)
    return requests_of_forward(prefixes, extends, [False] * len(entries), WindowScorer(8, 8).sample_queries)


def test_padding_is_no_request_but_keeps_its_place() -> None:
    requests = requests_of_forward([10, 0, 4], [3, 0, 5], [True, False, False], lambda tokens: np.array([tokens - 1]))
    assert requests.batch_rows.tolist() == [0, 2]
    assert requests.keys.tolist() == [13, 9]
    assert requests.query_rows.tolist() == [2, 7]
    assert requests.query_positions.tolist() == [12, 8]
    assert requests.publish_from.tolist() == [10, 0]
    assert len(requests_of([(5, 0), (0, 0)])) == 0


@given(lengths, st.integers(1, 9), st.sampled_from([(16, 32, 8), (128, 64, 64)]))
@settings(max_examples=80, deadline=None)
def test_every_visible_pair_is_in_one_item_of_each_pass(
    entries: list[tuple[int, int]], group: int, sizes: tuple[int, int, int]
) -> None:
    tile_rows, split_keys, block_keys = sizes
    requests = requests_of(entries)
    if not len(requests):
        return
    work = kernel_work(requests, group, tile_rows, split_keys, block_keys)
    positions = work.words[work.positions_at : work.requests_at].tolist()
    lines = work.words[work.requests_at : work.log_items_at].reshape(-1, REQUEST_COLUMNS)
    items = work.words[work.log_items_at : work.sum_items_at].reshape(-1, ITEM_COLUMNS)
    sums = work.words[work.sum_items_at :].reshape(-1, ITEM_COLUMNS)
    assert (len(lines), len(items), len(sums)) == (len(requests), work.log_items, work.sum_items)
    assert work.words[: work.positions_at].tolist() == requests.query_rows.tolist()
    assert lines[:, 3].sum() == work.total_keys
    assert work.split == bool((requests.keys > split_keys).any())

    wanted = set()
    for line in lines.tolist():
        _, key_base, prefix, keys, first, queries, publish_from, _ = line
        assert 0 <= publish_from <= prefix < keys
        wanted |= {
            (key_base + key, query, member)
            for query in range(first, first + queries)
            for key in range(positions[query] + 1)
            for member in range(group)
        }

    log_sums: dict[int, tuple[int, int, int]] = {}
    seen = []
    for number, (key_base, base, queries, first_row, first_key, end_key, at, splits) in enumerate(items.tolist()):
        assert (first_key == 0) == (number < work.log_tiles)
        assert first_key % split_keys == 0
        assert 0 < end_key - first_key <= split_keys
        rows = range(first_row, min(first_row + tile_rows, queries * group))
        for row in rows:
            # One place for each row and split; a request's splits lie its rows apart.
            where = at + row - first_row
            assert log_sums.setdefault(where, (base, row, first_key)) == (base, row, first_key)
            assert 0 <= where < work.log_sums
            assert first_key // split_keys < splits
            query = base + row // group
            seen += [
                (key_base + key, query, row % group) for key in range(first_key, min(end_key, positions[query] + 1))
            ]
    assert len(log_sums) == work.log_sums
    assert len(seen) == len(set(seen))
    assert set(seen) == wanted

    seen = []
    for key_base, base, queries, first_row, first_key, end_key, at, _ in sums.tolist():
        assert 0 < end_key - first_key <= block_keys
        assert log_sums[at] == (base, 0, 0)
        seen += [
            (key_base + key, base + row // group, row % group)
            for row in range(first_row, queries * group)
            for key in range(first_key, min(end_key, positions[base + row // group] + 1))
        ]
    assert len(seen) == len(set(seen))
    assert set(seen) == wanted


def test_a_batch_of_many_short_requests_is_one_set_of_tables() -> None:
    work = kernel_work(requests_of([(0, 256)] * 64), 4, 128, 2048, 128)
    assert work.log_items == work.log_tiles == 64
    assert work.sum_items == 128
    assert not work.split


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_order_of_requests_changes_no_request(order: tuple[int, ...]) -> None:
    entries = [(0, 50), (120, 33), (7, 200)]
    requests = requests_of([entries[i] for i in order])
    alone = [requests_of([entries[i]]) for i in order]
    for number, single in enumerate(alone):
        start, end = requests.first_queries[number : number + 2]
        assert requests.query_positions[start:end].tolist() == single.query_positions.tolist()
        assert requests.keys[number] == single.keys[0]
