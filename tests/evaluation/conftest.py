"""Small KV, and small models of several families with random weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from spectrumkv_sglang.evaluation.model import EvalModel, ModelFiles
from spectrumkv_sglang.evaluation.prefix import PrefixKV
from spectrumkv_sglang.importance.scores import SlotScores
from spectrumkv_sglang.payload.geometry import KVGeometry
from spectrumkv_sglang.payload.key_rotation import KeyRotation
from spectrumkv_sglang.payload.kv_buffers import KVBuffers
from spectrumkv_sglang.transfer.pool_view import PoolView

TOKENS = 300
LAYERS, KV_HEADS, HEAD_DIM = 3, 2, 64


@pytest.fixture
def prefix() -> PrefixKV:
    """300 random tokens whose keys have one large channel; the observed importance falls from position to position."""
    generator = torch.Generator().manual_seed(7)

    def random() -> torch.Tensor:
        return torch.randn(TOKENS, KV_HEADS, HEAD_DIM, generator=generator).bfloat16()

    k, v = [random() for _ in range(LAYERS)], [random() for _ in range(LAYERS)]
    for keys in k:
        keys[..., 5] += 20
    geometry = KVGeometry(LAYERS, KV_HEADS, HEAD_DIM, HEAD_DIM, 1, "bfloat16")
    scores = SlotScores(TOKENS, "cpu")
    scores.add(torch.arange(TOKENS), torch.linspace(1, 0.1, TOKENS), torch.full((TOKENS,), 2.0))
    scores.publish(torch.arange(TOKENS))
    angles = torch.outer(torch.arange(TOKENS).float(), 1.0 / 10000 ** (torch.arange(0, HEAD_DIM, 2) / HEAD_DIM))
    angles = torch.cat([angles, angles], dim=-1)
    rotation = KeyRotation(((angles.cos(), angles.sin()),) * LAYERS)
    view = PoolView(KVBuffers(k=k, v=v), geometry, torch.device("cpu"), TOKENS, rotation)
    return PrefixKV("text-0", view, {"window": scores})


SMALL = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}


class WordsOfNumbers:
    """Tokens as the numbers that they are, with spaces between them."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return " ".join(map(str, token_ids))


@pytest.fixture
def small_model(tmp_path: Path) -> Callable[..., EvalModel]:
    """Makes a model of a family with random float32 weights, loads and returns it."""

    def make(model_type: str, **more: Any) -> EvalModel:
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(3)
        config = AutoConfig.for_model(model_type, **SMALL, **more)
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
        files = ModelFiles(tmp_path, AutoConfig.from_pretrained(tmp_path), WordsOfNumbers())
        return EvalModel(files, "cpu", "float32", "float32")

    return make
