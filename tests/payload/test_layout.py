"""Layout and sub-chunks: every byte has one owner, and sizes agree however they are computed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spectrumkv_sglang.kernels.precision import Precision
from spectrumkv_sglang.kernels.quantisers import quantiser_for
from spectrumkv_sglang.payload.errors import PayloadError
from spectrumkv_sglang.payload.geometry import KVGeometry
from spectrumkv_sglang.payload.layout import bytes_per_row, max_padding_bytes, payload_bytes, plan_layout
from spectrumkv_sglang.payload.precision_table import PrecisionTable
from spectrumkv_sglang.payload.subchunks import SubChunkCutter

DIMS = st.sampled_from([8, 16, 24, 40, 64, 128])
GEOMETRIES = st.builds(
    KVGeometry,
    layers=st.integers(1, 4),
    kv_heads=st.integers(1, 5),
    head_dim=DIMS,
    v_head_dim=DIMS,
    page_size=st.sampled_from([1, 4, 16]),
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
)
ROWS = st.one_of(st.just(0), st.integers(0, 9), st.integers(0, 2000))


def random_table(geometry: KVGeometry, tiers: int, seed: int) -> PrecisionTable:
    """Half of the tables differ by head, half only by tier and K|V."""
    generator = np.random.default_rng(seed)
    shape = (tiers, geometry.layers, 2, geometry.kv_heads)
    by_head = generator.choice([*Precision], shape)
    by_tier = np.broadcast_to(generator.choice([*Precision], (tiers, 1, 2, 1)), shape)
    return PrecisionTable((by_head if seed % 2 else by_tier).astype(np.uint8))


@given(geometry=GEOMETRIES, seed=st.integers(0, 999), rows=st.lists(ROWS, min_size=1, max_size=4))
@settings(max_examples=150, deadline=None)
def test_segments_cover_the_payload_without_overlap(geometry: KVGeometry, seed: int, rows: list[int]) -> None:
    table = random_table(geometry, len(rows), seed)
    layout = plan_layout(geometry, table, rows)
    assert layout.total_bytes % 256 == 0
    end, block = layout.prologue_bytes, None
    owned = np.zeros((len(rows), geometry.layers, 2, geometry.kv_heads), dtype=np.int64)
    for segment in layout.segments:
        quantiser = quantiser_for(segment.precision)
        alignment = 16
        if block != (segment.layer, segment.kv):
            block, alignment = (segment.layer, segment.kv), 256
        assert segment.codes_offset == -(-end // alignment) * alignment
        assert segment.codes_bytes == quantiser.code_bytes(
            segment.rows, segment.heads, geometry.dim_of(segment.kv), geometry.itemsize
        )
        codes_end = segment.codes_offset + segment.codes_bytes
        assert segment.params_offset == -(-codes_end // 16) * 16
        assert segment.params_bytes == quantiser.param_bytes(segment.rows, segment.heads, geometry.dim_of(segment.kv))
        end = segment.params_offset + segment.params_bytes
        assert segment.rows == rows[segment.tier] > 0
        assert segment.row_start == sum(rows[: segment.tier])
        heads = table.values[segment.tier, segment.layer, segment.kv, segment.head_lo : segment.head_hi]
        assert (heads == segment.precision).all()
        owned[segment.tier, segment.layer, segment.kv, segment.head_lo : segment.head_hi] += segment.rows
    assert layout.total_bytes == -(-end // 256) * 256
    assert np.array_equal(owned, np.broadcast_to(np.reshape(rows, (-1, 1, 1, 1)), owned.shape))


@given(geometry=GEOMETRIES, seed=st.integers(0, 999), rows=st.lists(ROWS, min_size=1, max_size=4), data=st.data())
@settings(max_examples=150, deadline=None)
def test_sizes_agree_and_padding_is_bounded(
    geometry: KVGeometry, seed: int, rows: list[int], data: st.DataObject
) -> None:
    table = random_table(geometry, len(rows), seed)
    total = payload_bytes(geometry, table, rows)
    assert total == plan_layout(geometry, table, rows).total_bytes
    padding = total - int(bytes_per_row(geometry, table) @ np.array(rows))
    used = [tier for tier, count in enumerate(rows) if count]
    # Rounding may count one byte a row too much, and only where rows share parameters.
    rounding = sum(rows) * any(quantiser_for(precision).block_rows > 1 for precision in table.precisions)
    assert 256 - rounding <= padding <= max_padding_bytes(geometry, table, used)
    more = list(rows)
    more[data.draw(st.integers(0, len(rows) - 1))] += data.draw(st.integers(0, 40))
    assert payload_bytes(geometry, table, more) >= total


def test_cost_of_a_row_counts_parameters() -> None:
    geometry = KVGeometry(30, 3, 64, 64, 1, "float32")
    values = np.zeros((3, 30, 2, 3), np.uint8)
    values[1], values[2] = Precision.INT8, Precision.INT4
    cost = bytes_per_row(geometry, PrecisionTable(values))
    assert cost.tolist() == [46_080, 180 * (64 + 2), 180 * (32 + 4)]


def test_a_row_that_shares_parameters_bears_its_part_rounded_up() -> None:
    geometry = KVGeometry(1, 1, 8, 40, 1, "float32")
    values = np.full((2, 1, 2, 1), Precision.INT4_CHANNEL, np.uint8)
    values[1, 0, 1] = Precision.NATIVE
    # A full block of 128 rows: 128 rows x 8 / 2 and 8 x 4 bytes of keys, 128 x 40 / 2 and 40 x 4 bytes of values.
    shared, keys_only = (512 + 32 + 2560 + 160) / 128, (512 + 32 + 128 * 160) / 128
    cost = bytes_per_row(geometry, PrecisionTable(values))
    assert cost.tolist() == [int(shared) + 1, int(keys_only) + 1]
    # One row takes a block's parameters.
    assert plan_layout(geometry, PrecisionTable(values), (1, 0)).segments[0].params_bytes == 32
    assert plan_layout(geometry, PrecisionTable(values), (129, 0)).segments[0].params_bytes == 64


def test_a_payload_without_rows_is_a_prologue() -> None:
    geometry = KVGeometry(2, 1, 8, 8, 1, "float16")
    table = PrecisionTable(np.zeros((2, 2, 2, 1), np.uint8))
    assert plan_layout(geometry, table, (0, 0)).segments == ()
    assert payload_bytes(geometry, table, (0, 0)) == 256


@pytest.mark.parametrize("size", [plan_layout, payload_bytes], ids=lambda function: function.__name__)
def test_wrong_counts_and_foreign_tables_are_refused(size: object) -> None:
    assert callable(size)
    geometry = KVGeometry(2, 1, 8, 8, 1, "float16")
    table = PrecisionTable(np.zeros((2, 2, 2, 1), np.uint8))
    with pytest.raises(PayloadError, match=r"expected 2 row counts >= 0, got \[1\]"):
        size(geometry, table, (1,))
    with pytest.raises(PayloadError, match=r"expected 2 row counts >= 0, got \[1, -1\]"):
        size(geometry, table, (1, -1))
    with pytest.raises(PayloadError, match="expected 2 layers x 3 KV heads"):
        size(KVGeometry(2, 3, 8, 8, 1, "float16"), table, (1, 1))


@given(
    geometry=GEOMETRIES,
    seed=st.integers(0, 999),
    pages=st.integers(0, 60),
    missing=st.integers(0, 15),
    slack=st.floats(1, 12),
)
@settings(max_examples=80, deadline=None)
def test_subchunks_are_the_longest_that_fit(
    geometry: KVGeometry, seed: int, pages: int, missing: int, slack: float
) -> None:
    table = random_table(geometry, 3, seed)
    page = geometry.page_size
    rows = max(0, pages * page - missing % page)
    tiers = np.random.default_rng(seed).integers(0, 3, rows).astype(np.uint8)
    dearest = max(payload_bytes(geometry, table, [page * (tier == t) for t in range(3)]) for tier in range(3))
    slot_bytes = int((dearest + 256 * 2 * geometry.layers * 3) * slack)

    def counts(first: int, count: int) -> list[int]:
        return np.bincount(tiers[first * page : (first + count) * page], minlength=3).tolist()

    next_page = 0
    for subchunk in SubChunkCutter(page, geometry, table, slot_bytes).cut(tiers):
        assert subchunk.page_start == next_page
        assert subchunk.page_count >= 1
        assert list(subchunk.rows_per_tier) == counts(subchunk.page_start, subchunk.page_count)
        assert subchunk.payload_bytes == payload_bytes(geometry, table, subchunk.rows_per_tier) <= slot_bytes
        next_page += subchunk.page_count
        if next_page < pages:
            assert payload_bytes(geometry, table, counts(subchunk.page_start, subchunk.page_count + 1)) > slot_bytes
    assert next_page == pages


@given(
    geometry=GEOMETRIES,
    seed=st.integers(0, 999),
    pages=st.integers(1, 40),
    slack=st.floats(1, 8),
    moves=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 2)), max_size=12),
)
@settings(max_examples=60, deadline=None)
def test_cutting_on_after_a_row_moved_is_cutting_anew(
    geometry: KVGeometry, seed: int, pages: int, slack: float, moves: list[tuple[int, int]]
) -> None:
    table = random_table(geometry, 3, seed)
    page = geometry.page_size
    tiers = np.random.default_rng(seed).integers(0, 3, pages * page).astype(np.uint8)
    dearest = max(payload_bytes(geometry, table, [page * (tier == t) for t in range(3)]) for tier in range(3))
    slot_bytes = int((dearest + 256 * 2 * geometry.layers * 3) * slack)
    moves = [(row % tiers.size, tier) for row, tier in moves]
    found = list(SubChunkCutter(page, geometry, table, slot_bytes).cut_after_each(tiers, moves))
    expected = [SubChunkCutter(page, geometry, table, slot_bytes).cut(tiers)]
    for row, tier in moves:
        tiers[row] = tier
        expected.append(SubChunkCutter(page, geometry, table, slot_bytes).cut(tiers))
    assert found == expected


def test_a_page_that_fits_no_slot_names_the_bytes_it_needs() -> None:
    geometry = KVGeometry(2, 2, 64, 64, 16, "float32")
    table = PrecisionTable(np.zeros((1, 2, 2, 2), np.uint8))
    needed = payload_bytes(geometry, table, [16])
    tiers = np.zeros(64, np.uint8)
    assert len(SubChunkCutter(16, geometry, table, needed).cut(tiers)) == 4
    with pytest.raises(PayloadError, match=f"needs {needed} bytes, a landing slot has {needed - 1}; raise slot_bytes"):
        SubChunkCutter(16, geometry, table, needed - 1).cut(tiers)
    with pytest.raises(PayloadError, match="expected tiers below 1, got 1"):
        SubChunkCutter(1, geometry, table, 2**20).cut(np.ones(4, np.uint8))
    with pytest.raises(PayloadError, match="page_size must be at least 1"):
        SubChunkCutter(0, geometry, table, 2**20).cut(tiers)
