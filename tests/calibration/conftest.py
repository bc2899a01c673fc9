"""A small model with random weights whose tokens are letters, and a text for it."""

from __future__ import annotations

import string
from pathlib import Path

import numpy as np
import pytest
import torch

from spectrumkv_sglang.calibration.candidates import DEFAULT
from spectrumkv_sglang.calibration.sensitivity import SENSITIVITY_FORMAT, MeasuredOn, PartSensitivity, Sensitivity
from spectrumkv_sglang.kernels.precision import Precision
from spectrumkv_sglang.payload.geometry import KVGeometry

LAYERS, KV_HEADS, HEAD_DIM = 3, 2, 16
LETTERS = string.ascii_lowercase + " .\n"


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 3 layers with 2 KV heads of 16."""
    from tokenizers import Regex, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(5)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=len(LETTERS),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=256,
        initializer_range=0.2,  # large enough that the model says something and errors show
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer = Tokenizer(WordLevel({letter: place for place, letter in enumerate(LETTERS)}, unk_token="."))
    tokenizer.pre_tokenizer = Split(Regex("[\\s\\S]"), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=".").save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4,000 letters."""
    drawn = np.random.default_rng(1).choice(list(LETTERS[:-1]), size=4000)
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(drawn))
    return path


def _curve(precisions: tuple[Precision, ...], first: float) -> dict[str, float]:
    return {precision.name.lower(): first / 4.5**place for place, precision in enumerate(precisions)}


@pytest.fixture
def sensitivity() -> Sensitivity:
    """4 layers of 3 KV heads of 64 whose costs differ by layer and head."""
    geometry = KVGeometry(4, 3, 64, 64, 1, "bfloat16")
    generator = np.random.default_rng(3)

    def part(kv: int, first: float) -> PartSensitivity:
        candidates = DEFAULT.of(kv)
        heads = generator.lognormal(-8, 1.5, size=(geometry.layers, geometry.kv_heads))
        return PartSensitivity(
            transform=candidates.transform.name.lower(),
            curve=_curve(candidates.precisions, first),
            layers={
                coarse.name.lower(): (heads.sum(axis=1) * generator.uniform(1, 2, size=geometry.layers)).tolist()
                for coarse in candidates.coarse
            },
            heads=heads.tolist(),
        )

    return Sensitivity(
        format=SENSITIVITY_FORMAT,
        model="m",
        fingerprint=dict.fromkeys(("weights", "config", "tokenizer", "quantization", "dtype"), "x"),
        geometry=geometry,
        measured_on=MeasuredOn("t.txt", "0", ["text-1"], 64, 16, 0, 4),
        keys=part(0, 0.2),
        values=part(1, 0.02),
        versions={},
        date="",
    )
