"""GGUF weights of the evaluation models as a bfloat16 Hugging Face directory that SGLang loads.

The tensors are read directly: dequantised, renamed, cast. Three things differ from a plain renaming.

- Gemma: llama.cpp stores 1 + w for every norm's weight w, while transformers keeps w and adds the 1 when it runs.
- Qwen2.5 ties its embeddings, and this GGUF file holds the matrix twice, with few bits as ``token_embd`` and with more
  as ``output``. The better copy is used for both.
- The configuration carries the names of transformers 4.x, which 5.x reads as well: SGLang releases pin different ones.

Neither architecture needs its query and key rows reordered: GGUF keeps both in the order of transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.progress import track

from spectrumkv_sglang.launch.model import LAYER_TENSORS
from spectrumkv_sglang.launch.packaged_models import ModelError

if TYPE_CHECKING:
    import torch

_LAYER_TENSORS = {
    "qwen2": LAYER_TENSORS,
    "gemma3": {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}
_WHOLE_TENSORS = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_GEMMA_SLIDING_WINDOW_PATTERN = 6  # every sixth layer attends to everything; llama.cpp keeps it in its code
_GEMMA_LOCAL_ROPE_BASE = 10_000.0  # of the other layers; likewise


def huggingface_name(architecture: str, gguf_name: str) -> str:
    """Return the Hugging Face name of a tensor.

    Args:
        architecture: "qwen2" or "gemma3".
        gguf_name: such as "blk.3.attn_k.bias".

    Raises:
        ModelError: the architecture has no such tensor.
    """
    if gguf_name in _WHOLE_TENSORS:
        return _WHOLE_TENSORS[gguf_name]
    names = _LAYER_TENSORS[architecture]
    parts = gguf_name.split(".")
    if len(parts) != 4 or parts[0] != "blk" or parts[2] not in names or parts[3] not in ("weight", "bias"):
        raise ModelError(f"GGUF tensor {gguf_name!r} is not one that a {architecture} model is known to have")
    return f"model.layers.{parts[1]}.{names[parts[2]]}.{parts[3]}"


def read_weights(architecture: str, tensors: list[Any], console: Console) -> dict[str, torch.Tensor]:
    """Return all weights in bfloat16 under their Hugging Face names; the embeddings stand for the output head too.

    Args:
        architecture: "qwen2" or "gemma3".
        tensors: the tensors of a ``gguf.GGUFReader``.
        console: where progress is shown.

    Raises:
        ModelError: a tensor is not known.
    """
    import torch
    from gguf import dequantize

    names = {tensor.name for tensor in tensors}
    weights: dict[str, torch.Tensor] = {}
    for tensor in track(tensors, "model: converting", console=console, transient=True):
        source = tensor.name
        if source == "token_embd.weight" and "output.weight" in names:
            continue
        if source == "output.weight":
            source = "token_embd.weight"
        shape = tuple(int(size) for size in reversed(tensor.shape))
        values = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32).reshape(shape)
        if architecture == "gemma3" and source.endswith("norm.weight"):
            values = values - 1.0
        weights[huggingface_name(architecture, source)] = torch.from_numpy(values).to(torch.bfloat16)
    return weights


def model_config(fields: dict[str, Any]) -> dict[str, Any]:
    """Return ``config.json`` for the model that the GGUF fields describe.

    Raises:
        ModelError: an architecture other than qwen2 and gemma3.
    """
    architecture = fields["general.architecture"]
    if architecture not in _LAYER_TENSORS:
        raise ModelError(f"GGUF architecture is {architecture!r}, expected one of {', '.join(_LAYER_TENSORS)}")

    def number(name: str) -> int:
        return int(fields[f"{architecture}.{name}"])

    hidden, heads, layers = number("embedding_length"), number("attention.head_count"), number("block_count")
    config = {
        "attention_dropout": 0.0,
        "bos_token_id": int(fields["tokenizer.ggml.bos_token_id"]),
        "eos_token_id": int(fields["tokenizer.ggml.eos_token_id"]),
        "pad_token_id": int(fields["tokenizer.ggml.padding_token_id"]),
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": number("feed_forward_length"),
        "max_position_embeddings": number("context_length"),
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": number("attention.head_count_kv"),
        # Stored as float32; the shortest decimal form is the value that was meant.
        "rms_norm_eps": float(str(np.float32(fields[f"{architecture}.attention.layer_norm_rms_epsilon"]))),
        "rope_scaling": None,
        "rope_theta": float(fields[f"{architecture}.rope.freq_base"]),
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        # The form of this file. Without it transformers 5 takes the tokenizer for a Mistral one with a known defect.
        "transformers_version": "4.57.0",
        "use_cache": True,
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
    }
    if architecture == "qwen2":
        return config | {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "hidden_act": "silu",
            "max_window_layers": layers,
            "sliding_window": None,
            "use_sliding_window": False,
        }
    key_length = number("attention.key_length")
    return config | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "head_dim": key_length,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": key_length,
        "rope_local_base_freq": _GEMMA_LOCAL_ROPE_BASE,
        "sliding_window": number("attention.sliding_window"),
        "sliding_window_pattern": _GEMMA_SLIDING_WINDOW_PATTERN,
        "layer_types": [
            "full_attention" if (layer + 1) % _GEMMA_SLIDING_WINDOW_PATTERN == 0 else "sliding_attention"
            for layer in range(layers)
        ],
    }


def convert(gguf: Path, out_dir: Path, console: Console) -> None:
    """Write ``model.safetensors``, the configurations and the tokenizer into the existing folder ``out_dir``.

    Raises:
        ModelError: a package for the conversion is missing, or the file is not a model of a known kind.
    """
    try:
        from gguf import GGUFReader
        from safetensors.torch import save_file
    except ImportError as error:
        raise ModelError(f"converting the model needs {error.name}: run `make setup`, or pip install it") from error
    from gguf_tokenizer import write_json, write_tokenizer

    reader = GGUFReader(gguf)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = model_config(fields)
    weights = read_weights(fields["general.architecture"], reader.tensors, console)
    save_file(weights, out_dir / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(fields, out_dir)
    ids = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(out_dir / "generation_config.json", ids)
    write_json(out_dir / "config.json", config)
