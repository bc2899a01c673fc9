"""The record of a measurement as a file, and what is refused."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from spectrumkv_sglang.calibration.candidates import DEFAULT, choose
from spectrumkv_sglang.calibration.errors import CalibrationError
from spectrumkv_sglang.calibration.expected_cost import ExpectedCost, Granularity
from spectrumkv_sglang.calibration.head_cost import HeadCost
from spectrumkv_sglang.calibration.sensitivity import Sensitivity, encode_sensitivity, load_sensitivity
from spectrumkv_sglang.verification.fingerprint import ModelFingerprint


def test_round_trip(sensitivity: Sensitivity, tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    path.write_bytes(encode_sensitivity(sensitivity))
    assert load_sensitivity(path) == sensitivity


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b'"format": 1', b'"format": 9', "format 9, this build reads 1"),
        (b'"layers": 4', b'"layers": 5', "expected 5 layers of 3 KV heads"),
        (b'"curve": {', b'"curve": {"int7": 1.0,', "expected known precisions"),
        (b"{", b"[", "not a sensitivity file"),
        (b'"int2": 0.02', b'"int2": "much"', "not a sensitivity file"),
    ],
)
def test_files_that_make_no_sense(
    sensitivity: Sensitivity, tmp_path: Path, old: bytes, new: bytes, message: str
) -> None:
    content = encode_sensitivity(sensitivity)
    assert old in content
    path = tmp_path / "s.json"
    path.write_bytes(content.replace(old, new, 1))
    with pytest.raises(CalibrationError, match=message):
        load_sensitivity(path)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="No such file"):
        load_sensitivity(tmp_path / "none.json")


def test_another_model_is_refused(sensitivity: Sensitivity) -> None:
    same = ModelFingerprint(**sensitivity.fingerprint)
    sensitivity.require_model(same, "s.json")
    with pytest.raises(CalibrationError, match=r"another model.*weights"):
        sensitivity.require_model(same.model_copy(update={"weights": "y"}), "s.json")


def test_what_was_not_measured_cannot_be_allocated(sensitivity: Sensitivity) -> None:
    sensitivity.require_candidates(DEFAULT, HeadCost.MEASURED, "s.json")
    sensitivity.require_candidates(choose(["native", "int4_channel"], None, "identity", "hadamard"), None, "s.json")
    with pytest.raises(CalibrationError, match="keys were not measured in fp8_e4m3"):
        sensitivity.require_candidates(choose(["fp8_e4m3"], None, "identity", "hadamard"), None, "s.json")
    with pytest.raises(CalibrationError, match="keys were measured with transform identity, asked for is derope"):
        sensitivity.require_candidates(choose(None, None, "derope", "hadamard"), None, "s.json")
    without = msgspec.structs.replace(sensitivity, keys=msgspec.structs.replace(sensitivity.keys, heads=None))
    with pytest.raises(CalibrationError, match="holds no heads"):
        without.require_candidates(DEFAULT, HeadCost.MEASURED, "s.json")
    with pytest.raises(CalibrationError, match="holds heads by measured, asked for is --heads attention"):
        sensitivity.require_candidates(DEFAULT, HeadCost.ATTENTION, "s.json")


@pytest.mark.parametrize("granularity", Granularity)
def test_a_map_of_one_precision_is_expected_to_cost_what_was_measured(
    sensitivity: Sensitivity, granularity: Granularity
) -> None:
    expected = ExpectedCost(sensitivity, DEFAULT, granularity)
    for kv in (0, 1):
        by_precision = expected.of(kv).sum(axis=(0, 1))
        assert by_precision == pytest.approx(list(sensitivity.of(kv).curve.values()))


def test_shares_are_those_of_the_layers_and_of_the_heads(sensitivity: Sensitivity) -> None:
    by_layer = ExpectedCost(sensitivity, DEFAULT, Granularity.LAYERS).of(0)
    assert (by_layer == by_layer[:, :1]).all()
    nearest = dict.fromkeys(range(1, 6), "int3_channel") | {0: "int2_channel"}
    for place, label in nearest.items():
        measured, expected = sensitivity.keys.layers[label], by_layer[..., place].sum(axis=1)
        assert expected / expected.sum() == pytest.approx([layer / sum(measured) for layer in measured])
    by_head = ExpectedCost(sensitivity, DEFAULT, Granularity.HEADS).of(0)[..., 0]
    heads = sensitivity.keys.heads
    assert heads is not None
    assert by_head[1, 2] / by_head[1, 0] == pytest.approx(heads[1][2] / heads[1][0])
    assert by_head.sum(axis=1) == pytest.approx(by_layer[..., 0].sum(axis=1))


@pytest.mark.parametrize(
    ("keys", "values", "key_transform", "value_transform", "message"),
    [
        (["int7"], None, "identity", "hadamard", "unknown precision 'int7'"),
        (["int4", "int4"], None, "identity", "hadamard", "different precisions"),
        (None, ["int4", "int4_channel"], "identity", "hadamard", "cost the same"),
        (["native"], None, "identity", "hadamard", "nothing to measure"),
        (None, None, "wavelet", "hadamard", "--key-transform wavelet: unknown"),
        (None, None, "identity", "derope", "values carry no rotary embedding"),
    ],
)
def test_candidates_that_make_no_sense(
    keys: list[str] | None, values: list[str] | None, key_transform: str, value_transform: str, message: str
) -> None:
    with pytest.raises(CalibrationError, match=message):
        choose(keys, values, key_transform, value_transform)


def test_candidates_are_sorted_by_what_they_cost() -> None:
    chosen = choose(["int8_channel", "int3_channel", "native"], ["int8", "int4"], "identity", "identity")
    assert [precision.name for precision in chosen.keys.precisions] == ["INT3_CHANNEL", "INT8_CHANNEL", "NATIVE"]
    assert [precision.name for precision in chosen.keys.coarse] == ["INT3_CHANNEL", "INT8_CHANNEL"]
    assert [precision.name for precision in chosen.values.coarse] == ["INT4", "INT8"]
