"""Precision maps within a budget."""

from __future__ import annotations

import itertools
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spectrumkv_sglang.calibration.allocation import Allocation, NominalChunk, allocate, expected_of
from spectrumkv_sglang.calibration.candidates import DEFAULT, Candidates, PartCandidates
from spectrumkv_sglang.calibration.errors import CalibrationError
from spectrumkv_sglang.calibration.expected_cost import ExpectedCost, Granularity
from spectrumkv_sglang.calibration.sensitivity import SENSITIVITY_FORMAT, MeasuredOn, PartSensitivity, Sensitivity
from spectrumkv_sglang.kernels.precision import Precision
from spectrumkv_sglang.kernels.transforms import Transform
from spectrumkv_sglang.payload.geometry import KVGeometry
from spectrumkv_sglang.payload.layout import payload_bytes
from spectrumkv_sglang.payload.precision_table import PrecisionTable
from spectrumkv_sglang.payload.tier_map import tier_map_bytes
from spectrumkv_sglang.transfer.chunk_planner import CHUNK_MESSAGE_BYTES, SUBCHUNK_MESSAGE_BYTES

FEW = Candidates(
    PartCandidates((Precision.INT2_CHANNEL, Precision.INT4_CHANNEL), (Precision.INT2_CHANNEL,), Transform.IDENTITY),
    PartCandidates((Precision.INT2, Precision.INT4, Precision.INT8), (Precision.INT2,), Transform.HADAMARD),
)


def _allocate(sensitivity: Sensitivity, granularity: Granularity, target: float, tokens: int = 8192) -> Allocation:
    chunk = NominalChunk(sensitivity.geometry, tokens)
    return allocate(ExpectedCost(sensitivity, DEFAULT, granularity), DEFAULT, chunk, target)


@pytest.mark.parametrize("granularity", Granularity)
@pytest.mark.parametrize("target", [0.17, 0.2, 0.27, 0.4, 0.5])
def test_the_nominal_chunk_keeps_to_the_budget(
    sensitivity: Sensitivity, granularity: Granularity, target: float
) -> None:
    allocation = _allocate(sensitivity, granularity, target)
    assert allocation.wire_ratio <= target
    if granularity is Granularity.HEADS:
        assert allocation.wire_ratio > target - 0.01  # one head's step is that small


def test_bytes_are_those_of_the_payload_with_messages(sensitivity: Sensitivity) -> None:
    allocation = _allocate(sensitivity, Granularity.LAYERS, 0.27)
    geometry = sensitivity.geometry
    tiers = np.zeros((3, *allocation.cells.shape), np.uint8)
    tiers[2] = allocation.cells
    table = PrecisionTable(tiers, allocation.transforms)
    wire = payload_bytes(geometry, table, (4, 0, 8188)) + tier_map_bytes(8192)
    wire += SUBCHUNK_MESSAGE_BYTES + CHUNK_MESSAGE_BYTES + len(table.to_bytes())
    assert allocation.wire_ratio == wire / (8192 * geometry.native_bytes_per_token)


def test_finer_maps_are_expected_to_cost_less(sensitivity: Sensitivity) -> None:
    costs = []
    parts = _allocate(sensitivity, Granularity.PARTS, 0.27)
    by_head = ExpectedCost(sensitivity, DEFAULT, Granularity.HEADS)
    for granularity in Granularity:
        allocation = _allocate(sensitivity, granularity, parts.wire_ratio)
        assert allocation.wire_ratio <= parts.wire_ratio
        costs.append(float(expected_of(allocation.cells, by_head, DEFAULT).sum()))
    assert costs[0] > costs[1] > costs[2]


def test_a_larger_budget_costs_less(sensitivity: Sensitivity) -> None:
    costs = [_allocate(sensitivity, Granularity.LAYERS, target).expected_kl for target in (0.17, 0.2, 0.3, 0.4, 0.55)]
    assert all(larger < smaller for smaller, larger in itertools.pairwise(costs))


def test_the_same_measurement_gives_the_same_map(sensitivity: Sensitivity) -> None:
    first, second = (_allocate(sensitivity, Granularity.HEADS, 0.3) for _ in range(2))
    assert np.array_equal(first.cells, second.cells)


def test_layers_that_cost_alike_get_alike_but_for_one_step(sensitivity: Sensitivity) -> None:
    even = msgspec.structs.replace(
        sensitivity,
        keys=msgspec.structs.replace(sensitivity.keys, layers={"int2_channel": [0.01] * 4}, heads=None),
        values=msgspec.structs.replace(sensitivity.values, layers={"int3": [0.0] * 4}, heads=None),
    )
    cells = _allocate(even, Granularity.LAYERS, 0.27).cells
    for kv in (0, 1):
        bits = [Precision(int(cell)).bits for cell in cells[:, kv, 0]]
        assert max(bits) - min(bits) <= 1
        assert bits == sorted(bits, reverse=True)


def test_an_unreachable_budget_names_the_least(sensitivity: Sensitivity) -> None:
    with pytest.raises(CalibrationError, match=r"--budget 0\.1: the smallest map takes 0\.14") as refused:
        _allocate(sensitivity, Granularity.LAYERS, 0.1)
    least = float(str(refused.value).split("give at least ")[1].split(",")[0])
    assert (_allocate(sensitivity, Granularity.LAYERS, least).cells[:, 0] == Precision.INT2_CHANNEL).all()
    with pytest.raises(CalibrationError):
        _allocate(sensitivity, Granularity.LAYERS, least - 2e-4)


@given(st.lists(st.floats(0, 1), min_size=4, max_size=4), st.floats(0.16, 0.5))
@settings(max_examples=25, deadline=None)
def test_no_map_of_at_most_as_many_bytes_is_expected_to_be_better_by_more_than_a_step(
    layers: list[float], target: float
) -> None:
    geometry = KVGeometry(2, 1, 64, 64, 1, "bfloat16")
    sensitivity = _two_layers(geometry, layers)
    chunk = NominalChunk(geometry, 1024)
    expected = ExpectedCost(sensitivity, FEW, Granularity.LAYERS)
    allocation = allocate(expected, FEW, chunk, target)
    maps = []
    for keys in itertools.product(FEW.keys.precisions, repeat=2):
        for values in itertools.product(FEW.values.precisions, repeat=2):
            cells = np.array([[[keys[layer]], [values[layer]]] for layer in (0, 1)], dtype=np.uint8)
            maps.append(
                (chunk.wire_ratio(cells, allocation.transforms), float(expected_of(cells, expected, FEW).sum()))
            )
    best = min(cost for ratio, cost in maps if ratio <= target)
    step = max(float(-np.diff(expected.of(kv), axis=-1).min()) for kv in (0, 1))
    assert best - 1e-12 <= allocation.expected_kl <= best + step + 1e-12


def _two_layers(geometry: KVGeometry, layers: list[float]) -> Sensitivity:
    nothing = dict.fromkeys(("weights", "config", "tokenizer", "quantization", "dtype"), "x")
    keys = PartSensitivity("identity", {"int2_channel": 0.2, "int4_channel": 0.01}, {"int2_channel": layers[:2]})
    values = PartSensitivity("hadamard", {"int2": 0.05, "int4": 0.003, "int8": 1e-5}, {"int2": layers[2:]})
    measured_on = MeasuredOn("t.txt", "0", ["text-1"], 64, 16, 0, 4)
    return Sensitivity(SENSITIVITY_FORMAT, "m", nothing, geometry, measured_on, keys, values, {}, "")


def test_native_costs_nothing_and_sixteen_bits(sensitivity: Sensitivity) -> None:
    with_native = replace(DEFAULT, keys=replace(DEFAULT.keys, precisions=(*DEFAULT.keys.precisions, Precision.NATIVE)))
    expected = ExpectedCost(sensitivity, with_native, Granularity.LAYERS)
    assert (expected.of(0)[..., -1] == 0).all()
    allocation = allocate(expected, with_native, NominalChunk(sensitivity.geometry), 0.76)
    assert (allocation.cells[:, 0] == Precision.NATIVE).all()
