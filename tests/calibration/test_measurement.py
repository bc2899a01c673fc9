"""What is rounded, and that it costs what the code that serves costs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from spectrumkv_sglang.calibration.candidates import DEFAULT, choose
from spectrumkv_sglang.calibration.head_cost import HeadCost
from spectrumkv_sglang.calibration.head_scores import head_scores
from spectrumkv_sglang.calibration.measurement import MeasurementPlan, measure, measurement_work
from spectrumkv_sglang.calibration.rounding import RoundedCells, round_cells
from spectrumkv_sglang.config import load_config
from spectrumkv_sglang.evaluation.model import EvalModel, read_model_files
from spectrumkv_sglang.evaluation.prefix import PrefixKV
from spectrumkv_sglang.evaluation.served_path import ProfileMethod
from spectrumkv_sglang.evaluation.windows import TextWindow, cut_windows
from spectrumkv_sglang.kernels.precision import Precision
from spectrumkv_sglang.kernels.transforms import Transform

PREFIX, CONTINUATION = 160, 24
LAYERS, KV_HEADS = 3, 2


@pytest.fixture(scope="module")
def model(model_folder: Path) -> EvalModel:
    return EvalModel(read_model_files(model_folder), "cpu", "float32", "bfloat16")


@pytest.fixture(scope="module")
def windows(model_folder: Path, text_file: Path) -> list[TextWindow]:
    return cut_windows(
        read_model_files(model_folder).tokenizer,
        text_file.read_text(),
        prefix_tokens=(PREFIX,),
        continuation_tokens=CONTINUATION,
        texts=2,
        seed=0,
        context_tokens=256,
    )


@pytest.fixture(scope="module")
def prefix(model: EvalModel, windows: list[TextWindow]) -> PrefixKV:
    return model.prefill("text", windows[0].prefix(PREFIX), {}).prefix


@pytest.mark.parametrize("transform", [Transform.IDENTITY, Transform.HADAMARD, Transform.DEROPE])
def test_rounding_is_what_packing_and_unpacking_do(prefix: PrefixKV, tmp_path: Path, transform: Transform) -> None:
    path = tmp_path / "profile.yaml"
    path.write_text(
        "name: p\ntiers:\n  high: {keys: native, values: native}\n  low: {keys: int3_channel, values: native}\n"
        f"transform: {{keys: {transform.name.lower()}}}\n"
    )
    config = load_config(None, {}, {"profile": ("p", str(path)), "min_tokens": ("p", 0), "recent_tokens": ("p", 0)})
    moved = ProfileMethod(config.model_copy(update={"budget": 1e-9, "scorer": "position"}), "").move(prefix).buffers
    ours = round_cells(prefix, RoundedCells(0, Precision.INT3_CHANNEL, transform), 4)
    for layer in range(LAYERS):
        assert torch.equal(ours.k[layer], moved.k[layer])
        assert torch.equal(ours.v[layer], moved.v[layer])
        assert not torch.equal(ours.k[layer], prefix.view.buffers.k[layer])


def test_one_head_of_one_layer(prefix: PrefixKV) -> None:
    native = prefix.view.buffers
    ours = round_cells(prefix, RoundedCells(1, Precision.INT2, Transform.HADAMARD, layer=1, head=1), 4)
    changed = (ours.v[1] != native.v[1]).any(dim=-1)
    assert not changed[:4].any()
    assert not changed[:, 0].any()
    assert changed[4:, 1].all()
    assert ours.v[0] is native.v[0]
    assert all(mine is theirs for mine, theirs in zip(ours.k, native.k, strict=True))


def test_a_measurement(model: EvalModel, windows: list[TextWindow]) -> None:
    plan = MeasurementPlan(DEFAULT, LAYERS, KV_HEADS, heads=HeadCost.MEASURED)
    done: list[float] = []
    keys, values = measure(model, windows, PREFIX, plan, 4, done.append)
    assert sum(done) == measurement_work(windows, PREFIX, plan)
    for part in (keys, values):
        curve = list(part.curve.values())
        assert curve == sorted(curve, reverse=True)
        assert curve[-1] > 0
        assert part.heads is not None
        assert np.shape(part.heads) == (LAYERS, KV_HEADS)
        assert all(0.5 < share < 2 for share in part.additivity().values())
        coarser, finer = part.layers.values()
        assert sum(coarser) > sum(finer)
        for layer, heads in zip(finer, part.heads, strict=True):
            assert 0 < max(heads) < 1.5 * layer
    assert list(keys.layers) == ["int2_channel", "int3_channel"]
    assert values.transform == "hadamard"


def test_native_candidates_are_not_measured(model: EvalModel, windows: list[TextWindow]) -> None:
    few = choose(["int4_channel", "native"], ["int4"], "identity", "identity")
    plan = MeasurementPlan(few, LAYERS, KV_HEADS, heads=None)
    assert len(list(plan.cells())) == 2 + 2 * LAYERS
    keys, values = measure(model, windows[:1], PREFIX, plan, 4, lambda _: None)
    assert list(keys.curve) == ["int4_channel"]
    assert values.heads is None


def test_heads_by_how_far_back_they_attend(model: EvalModel, windows: list[TextWindow]) -> None:
    plan = MeasurementPlan(DEFAULT, LAYERS, KV_HEADS, heads=HeadCost.ATTENTION)
    assert len(list(plan.cells())) == len(list(MeasurementPlan(DEFAULT, LAYERS, KV_HEADS, heads=None).cells()))
    done: list[float] = []
    keys, values = measure(model, windows, PREFIX, plan, 4, done.append)
    assert sum(done) == measurement_work(windows, PREFIX, plan)
    assert keys.heads == values.heads == head_scores(model, windows, PREFIX)
    assert all(0 <= score <= 1 for layer in keys.heads or () for score in layer)
