"""Angles read from SGLang's own rotary embeddings, in a process of its own: SGLang decides at import that it runs on a
CPU. Prints one JSON object with what every scenario found."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"  # before SGLang is imported

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.rotary_embedding.factory import get_rope
from sglang.srt.layers.rotary_embedding.rope_variant import DualChunkRotaryEmbedding
from torch import nn
from transformers import Gemma3TextConfig

from spectrumkv_sglang.kernels.transforms.derope import rotate, rotate_back
from spectrumkv_sglang.payload.errors import PayloadError
from spectrumkv_sglang.payload.geometry import KVGeometry
from spectrumkv_sglang.transfer.served_rotation import ServedRotation, UnknownRotationError, read_rotation

DIM, HEADS, POSITIONS = 64, 2, 2048
CPU = torch.device("cpu")

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * (DIM // 2),
    "long_factor": [2.0] * (DIM // 2),
    "original_max_position_embeddings": 512,
}
MROPE = {"rope_type": "default", "mrope_section": [8, 12, 12]}

READ: dict[str, dict[str, Any]] = {
    "default": {},
    "llama3": {"rope_scaling": LLAMA3},
    "yarn": {"rope_scaling": YARN},
    "partial": {"partial_rotary_factor": 0.25},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "dynamic ntk": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "bfloat16 cache": {"dtype": torch.bfloat16},
    "bfloat16 yarn cache": {"dtype": torch.bfloat16, "rope_scaling": YARN},
}
REFUSED: dict[str, dict[str, Any]] = {
    "interleaved": {"is_neox_style": False},
    "mrope": {"rope_scaling": MROPE},
    "longrope": {"rope_scaling": LONGROPE},
    "other head dim": {"head_size": 2 * DIM, "rotary_dim": DIM},
}


def rotary(**changes: Any) -> Any:
    arguments: dict[str, Any] = {
        "head_size": DIM,
        "rotary_dim": DIM,
        "max_position": POSITIONS,
        "base": 10000,
        "dtype": torch.float32,
        **changes,
    }
    return get_rope(**arguments)


def dual_chunk() -> nn.Module:
    """Without its tables, which SGLang computes on a GPU only."""
    module = DualChunkRotaryEmbedding.__new__(DualChunkRotaryEmbedding)
    nn.Module.__init__(module)
    return module


class SomeAttention(nn.Module):
    """As SGLang's models build their attention."""

    def __init__(self, layer: int, *embeddings: Any) -> None:
        super().__init__()
        for number, embedding in enumerate(embeddings):
            setattr(self, f"rotary_emb{number or ''}", embedding)
        self.attn = RadixAttention(HEADS, DIM, 1.0, HEADS, layer_id=layer)


class Exaone4Attention(SomeAttention):
    """Named as a class of SGLang that rotates in some layers only."""


def model_of(*layers: nn.Module) -> nn.Module:
    model = nn.Module()
    model.layers = nn.ModuleList(layers)
    return model


def read(*layers: nn.Module, of_layers: int | None = None) -> ServedRotation:
    geometry = KVGeometry(of_layers or len(layers), HEADS, DIM, DIM, 1, "float32")
    return read_rotation(model_of(*layers), geometry, CPU)


def distance(rotation: ServedRotation, layer: int, module: Any, first: int, rows: int = 40) -> dict[str, float]:
    """How far a key is from itself after SGLang rotated it and we rotated it back, and after forth and back again."""
    key = torch.randn(rows, HEADS, DIM, generator=torch.Generator().manual_seed(rows))
    positions = torch.arange(first, first + rows)
    turned = module.forward_native(positions, key.clone(), key.clone())[1]
    cos, sin = rotation.at(first, rows).of(layer, 0, rows)
    back = rotate_back(turned, cos, sin)
    return {
        "moved": float((turned - key).abs().max()),
        "back": float((back - key).abs().max()),
        "again": float((rotate(back, cos, sin) - turned).abs().max()),
    }


def reason(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except (UnknownRotationError, PayloadError) as error:
        return str(error)
    return ""


def per_layer() -> dict[str, Any]:
    """Layers that share an embedding, as Gemma 3's local ones do, around one with its own."""
    local, other = rotary(base=1000), rotary(base=1000000)
    rotation = read(SomeAttention(0, local), SomeAttention(1, other), SomeAttention(2, local))
    angles = rotation.at(5, 10).rotation.layers
    return {
        "local": distance(rotation, 2, local, 100),
        "global": distance(rotation, 1, other, 100),
        "shared": angles[0][0] is angles[2][0],
        "differs": not torch.equal(angles[0][0], angles[1][0]),
    }


def replaced() -> dict[str, Any]:
    """SGLang puts a longer table, then one of another dtype, in the place of the one that was there at first."""
    module = rotary(base=777, max_position=128)
    rotation = read(SomeAttention(0, module))
    short = reason(lambda: rotation.at(120, 40))
    module._ensure_cos_sin_cache_length(999)
    lengthened = distance(rotation, 0, module, 900)
    module.cos_sin_cache = module.cos_sin_cache.to(torch.bfloat16)
    return {"short": short, "lengthened": lengthened, "cast": distance(rotation, 0, module, 900)}


def gemma3(factor: float) -> str:
    """Why a Gemma 3 is refused whose model hands its layers angles scaled by ``factor``."""
    from sglang.srt.models.gemma3_causal import Gemma3RotaryEmbedding

    config = Gemma3TextConfig(head_dim=DIM, num_attention_heads=HEADS)
    scaled = {"rope_type": "linear", "factor": factor} if factor != 1.0 else {"rope_type": "default"}
    config.rope_parameters = {**scaled, "rope_theta": 1000000.0}
    model = model_of(SomeAttention(0, rotary(base=1000000)))
    model.rotary_emb = Gemma3RotaryEmbedding(config)
    return reason(lambda: read_rotation(model, KVGeometry(1, HEADS, DIM, DIM, 1, "float32"), CPU))


def main() -> None:
    torch.set_num_threads(1)
    plain = rotary()
    attempts: dict[str, Callable[[], object]] = {
        "no embedding": lambda: read(SomeAttention(0)),
        "two embeddings": lambda: read(SomeAttention(0, plain, rotary(base=3))),
        "some layers only": lambda: read(Exaone4Attention(0, plain)),
        "dual chunk": lambda: read(SomeAttention(0, dual_chunk())),
        "missing layer": lambda: read(SomeAttention(0, plain), of_layers=2),
        "layer twice": lambda: read(SomeAttention(0, plain), SomeAttention(0, plain)),
        "no model": lambda: read_rotation(None, KVGeometry(1, HEADS, DIM, DIM, 1, "float32"), CPU),
        "behind the table": lambda: read(SomeAttention(0, plain)).at(POSITIONS - 1, 2),
        **{
            name: lambda changes=changes: read(SomeAttention(0, rotary(**changes))) for name, changes in REFUSED.items()
        },
    }
    found: dict[str, Any] = {
        "read": {
            name: distance(read(SomeAttention(0, rotary(**changes))), 0, rotary(**changes), 1500)
            for name, changes in READ.items()
        },
        "last position": distance(read(SomeAttention(0, plain)), 0, plain, POSITIONS - 40),
        "per layer": per_layer(),
        "replaced": replaced(),
        "refused": {name: reason(attempt) for name, attempt in attempts.items()},
        "gemma3": {str(factor): gemma3(factor) for factor in (1.0, 8.0)},
    }
    print("RESULT " + json.dumps(found))


if __name__ == "__main__":
    main()
