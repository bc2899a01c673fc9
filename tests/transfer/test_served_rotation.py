"""The angles that a rank reads are those by which SGLang's own rotary embeddings turn keys; others are refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from decode_peer import GEOMETRY

from spectrumkv_sglang.config import SpectrumKVConfig
from spectrumkv_sglang.payload.codec import KVBuffers
from spectrumkv_sglang.transfer.pool_view import PoolView
from spectrumkv_sglang.transfer.served_rotation import UnknownRotationError, require_rotation, with_rotation

HERE = Path(__file__).parent
ROUNDING = 4e-6  # float32, keys of up to 5


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What `rotary_scenarios.py` found in the SGLang that is installed."""
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1] / "launch" / "cpu_shims"), "HF_HUB_OFFLINE": "1"}
    finished = subprocess.run(
        [sys.executable, str(HERE / "rotary_scenarios.py")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    lines = [line for line in finished.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, finished.stderr[-4000:]
    return json.loads(lines[-1].removeprefix("RESULT "))


def undone(distance: dict[str, float]) -> bool:
    """Whether SGLang turned the key visibly, we turned it back to what it was, and forth again to SGLang's."""
    return distance["moved"] > 1 and distance["back"] < ROUNDING and distance["again"] < ROUNDING


@pytest.mark.parametrize(
    "kind",
    ["default", "llama3", "yarn", "partial", "linear", "dynamic ntk", "bfloat16 cache", "bfloat16 yarn cache"],
)
def test_a_key_that_sglang_rotated_is_rotated_back(found: dict[str, Any], kind: str) -> None:
    assert undone(found["read"][kind])


def test_angles_reach_to_the_last_position_of_the_table(found: dict[str, Any]) -> None:
    assert undone(found["last position"])
    assert "expected positions 0 to 2047, got 2047 to 2048" in found["refused"]["behind the table"]


def test_every_layer_has_the_angles_of_its_own_embedding(found: dict[str, Any]) -> None:
    layers = found["per layer"]
    assert undone(layers["local"])
    assert undone(layers["global"])
    assert (layers["shared"], layers["differs"]) == (True, True)


def test_a_table_that_sglang_replaces_later_is_the_one_in_use(found: dict[str, Any]) -> None:
    replaced = found["replaced"]
    assert "expected positions 0 to 127, got 120 to 159" in replaced["short"]
    assert undone(replaced["lengthened"])
    assert undone(replaced["cast"])


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("interleaved", "layer 0 (SomeAttention) turns neighbouring dims"),
        ("mrope", "has a MRotaryEmbedding, whose angles do not follow from the position alone"),
        ("longrope", "has a Phi3LongRoPEScaledRotaryEmbedding, whose angles"),
        ("dual chunk", "has a DualChunkRotaryEmbedding, whose angles"),
        ("other head dim", "turns 64 dims of heads of 128, the KV pool's keys have 64"),
        ("no embedding", "expected one rotary embedding, found none"),
        ("two embeddings", "expected one rotary embedding, found 2 RotaryEmbedding"),
        (
            "some layers only",
            "layer 0 (Exaone4Attention) does not turn its keys by its rotary embedding in every layer",
        ),
        ("missing layer", "expected attention modules of layers 0 to 1, found those of 1 layers"),
        ("layer twice", "two attention modules for layer 0"),
        ("no model", "keeps its model in a place that is not known"),
    ],
)
def test_unknown_rotations_are_refused_with_the_class(found: dict[str, Any], what: str, why: str) -> None:
    assert why in found["refused"][what]


def test_gemma3_is_read_unless_its_layers_turn_by_scaled_angles_from_outside(found: dict[str, Any]) -> None:
    assert found["gemma3"]["1.0"] == ""
    assert "computed outside its layers" in found["gemma3"]["8.0"]


@pytest.mark.parametrize(("keys", "starts"), [("derope", False), ("identity", True)])
def test_a_server_of_a_model_without_known_angles_starts_only_with_another_profile(
    tmp_path: Path, keys: str, starts: bool
) -> None:
    profile = tmp_path / "profile.yaml"
    profile.write_text(f"name: some\ntransform: {{keys: {keys}}}\ntiers:\n  high: {{keys: int8, values: int8}}\n")
    pools = [[torch.zeros(4, GEOMETRY.kv_heads, dim)] * GEOMETRY.layers for dim in (GEOMETRY.head_dim, 32)]
    view = with_rotation(PoolView(KVBuffers(*pools), GEOMETRY, torch.device("cpu"), 4), None)
    config = SpectrumKVConfig(profile=str(profile))
    if starts:
        require_rotation(view, config)
        return
    with pytest.raises(UnknownRotationError, match="keeps its model in a place that is not known") as refused:
        require_rotation(view, config)
    assert "Use `keys: identity` in the profile, or another profile" in str(refused.value)
