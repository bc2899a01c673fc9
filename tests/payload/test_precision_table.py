"""Precision table: head runs, wire form and digest."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from spectrumkv_sglang.kernels.precision import Precision
from spectrumkv_sglang.kernels.transforms import Transform
from spectrumkv_sglang.payload.errors import PayloadError
from spectrumkv_sglang.payload.geometry import KVGeometry
from spectrumkv_sglang.payload.precision_table import PrecisionTable

TABLES = st.tuples(st.integers(1, 4), st.integers(1, 4), st.just(2), st.integers(1, 6)).flatmap(
    lambda shape: arrays(np.uint8, shape, elements=st.integers(0, 3))
)


def geometry_of(table: PrecisionTable) -> KVGeometry:
    return KVGeometry(table.layers, table.kv_heads, 64, 64, 1, "bfloat16")


@given(values=TABLES)
@settings(max_examples=60, deadline=None)
def test_head_runs_are_maximal_and_cover_every_head_once(values: np.ndarray) -> None:
    table = PrecisionTable(values)
    for tier, layer, kv in np.ndindex(*values.shape[:3]):
        runs = table.head_runs(tier, layer, kv)
        assert [head for run in runs for head in range(run.lo, run.hi)] == list(range(table.kv_heads))
        assert [run.precision for run in runs for _ in range(run.lo, run.hi)] == values[tier, layer, kv].tolist()
        assert all(left.precision != right.precision for left, right in pairwise(runs))


@given(values=TABLES)
@settings(max_examples=60, deadline=None)
def test_wire_form_round_trips_and_refuses_other_lengths(values: np.ndarray) -> None:
    table = PrecisionTable(values)
    raw = table.to_bytes()
    again = PrecisionTable.from_bytes(raw, geometry_of(table))
    assert again == table
    assert hash(again) == hash(table)
    assert again.digest() == table.digest()
    for wrong in (raw[:-1], raw + b"\0", raw[:1]):
        with pytest.raises(PayloadError, match=f"expected {len(raw)} bytes"):
            PrecisionTable.from_bytes(wrong, geometry_of(table))


@given(raw=st.binary(max_size=64))
@settings(max_examples=100, deadline=None)
def test_garbage_is_refused_or_is_a_table(raw: bytes) -> None:
    try:
        table = PrecisionTable.from_bytes(raw, KVGeometry(2, 3, 8, 8, 1, "float16"))
    except PayloadError:
        return
    assert table.to_bytes() == raw


def test_unknown_precisions_are_refused() -> None:
    values = np.zeros((1, 1, 2, 1), np.uint8)
    values[0, 0, 1, 0] = 14
    with pytest.raises(PayloadError, match="unknown precision 14"):
        PrecisionTable(values)
    with pytest.raises(PayloadError, match="unknown precision 14"):
        PrecisionTable.from_bytes(b"\x01\x00\x0e\x00\x00", KVGeometry(1, 1, 8, 8, 1, "float16"))


VALUES = np.zeros((1, 2, 2, 1), np.uint8)


@pytest.mark.parametrize(
    ("transforms", "message"),
    [
        (np.zeros((2, 2), np.int64), "expected transforms uint8"),
        (np.zeros((1, 2), np.uint8), "expected transforms uint8"),
        (np.array([[0, 0], [3, 0]], np.uint8), "unknown transform 3"),
        (np.array([[0, 0], [0, Transform.DEROPE]], np.uint8), "expected keys alone"),
    ],
)
def test_malformed_transforms_are_refused(transforms: np.ndarray, message: str) -> None:
    with pytest.raises(PayloadError, match=message):
        PrecisionTable(VALUES, transforms)


def test_transforms_belong_to_a_layer_and_make_another_table() -> None:
    transforms = np.array([[Transform.DEROPE, 0], [0, Transform.HADAMARD]], np.uint8)
    table, plain = PrecisionTable(VALUES, transforms), PrecisionTable(VALUES)
    assert table.transform(0, 0) is Transform.DEROPE
    assert table.transform(1, 1) is Transform.HADAMARD
    assert table.transform(0, 1) is Transform.IDENTITY
    assert table.needs_rotation
    assert not plain.needs_rotation
    assert table != plain
    assert table.digest() != plain.digest()
    again = PrecisionTable.from_bytes(table.to_bytes(), geometry_of(table))
    assert again == table
    assert again.transforms.tolist() == transforms.tolist()


def test_head_dimensions_that_a_transform_does_not_take_are_refused() -> None:
    spread = PrecisionTable(np.ones((1, 1, 2, 1), np.uint8), np.array([[0, Transform.HADAMARD]], np.uint8))
    spread.check_geometry(KVGeometry(1, 1, 24, 48, 1, "float16"))
    with pytest.raises(PayloadError, match=r"Hadamard transform: expected a head dimension .* got 24"):
        spread.check_geometry(KVGeometry(1, 1, 48, 24, 1, "float16"))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.zeros((1, 1, 2, 1), np.int64), "expected a uint8 array, got int64"),
        (np.zeros((1, 1, 3, 1), np.uint8), "expected shape"),
        (np.zeros((1, 2, 1), np.uint8), "expected shape"),
        (np.zeros((1, 0, 2, 1), np.uint8), "expected shape"),
        (np.zeros((5, 1, 2, 1), np.uint8), "at most 4 tiers, got 5"),
    ],
)
def test_malformed_tables_are_refused(values: np.ndarray, message: str) -> None:
    with pytest.raises(PayloadError, match=message):
        PrecisionTable(values)


def test_table_is_a_copy_and_cannot_be_changed() -> None:
    values = np.zeros((1, 1, 2, 2), np.uint8)
    table = PrecisionTable(values)
    values[:] = Precision.INT4
    assert not table.values.any()
    with pytest.raises(ValueError, match="read-only"):
        table.values[0, 0, 0, 0] = 1


def test_same_bytes_in_another_shape_are_another_table() -> None:
    wide, tall = PrecisionTable(np.zeros((1, 1, 2, 2), np.uint8)), PrecisionTable(np.zeros((1, 2, 2, 1), np.uint8))
    assert wide != tall
    assert wide.digest() != tall.digest()


def test_a_table_of_another_model_is_refused() -> None:
    with pytest.raises(PayloadError, match="expected 2 layers x 3 KV heads, got 1 x 2"):
        PrecisionTable(np.zeros((1, 1, 2, 2), np.uint8)).check_geometry(KVGeometry(2, 3, 8, 8, 1, "float16"))
