"""The deployment shapes of `shapes.py`: which SGLang flags make each of them, on which model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

TINY_MLA = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 3,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "moe_layer_freq": 1,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
"""DeepSeek V2's attention at its real head sizes, three dense layers: SGLang fills it with its dummy weights."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


@dataclass(frozen=True)
class Models:
    """Directories of the models. ``window``: with sliding windows; None: not given, its shapes are reported so."""

    main: Path
    window: Path | None
    mla: Path


@dataclass(frozen=True)
class Shape:
    """One way to deploy a pair.

    Attributes:
        name: for ``--only`` and the table.
        what: in words.
        model: which of `Models`.
        both: flags of prefill and decode, and of the plain server whose answers are the right ones.
        prefill: flags of prefill alone.
        decode: flags of decode alone.
        pair: flags of prefill and decode alone.
        ranks: scheduler processes of prefill and of decode.
    """

    name: str
    what: str
    model: str = "main"
    both: tuple[str, ...] = ()
    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    pair: tuple[str, ...] = ()
    ranks: tuple[int, int] = (1, 1)


def shapes(models: Models) -> tuple[Shape, ...]:
    """All shapes, those with unequal TP sizes first."""
    two = ("--tp", "2")
    data_parallel = (*two, "--dp", "2", "--enable-dp-attention")
    draft = ("--speculative-draft-model-path", str(models.main.resolve()), "--speculative-num-steps", "2")
    draft += (
        "--speculative-algorithm",
        "STANDALONE",
        "--speculative-eagle-topk",
        "1",
        "--speculative-num-draft-tokens",
        "3",
    )
    return (
        Shape("tp-2-1", "TP 2 prefill, TP 1 decode", prefill=two, ranks=(2, 1)),
        Shape("tp-1-2", "TP 1 prefill, TP 2 decode", decode=two, ranks=(1, 2)),
        Shape("tp-2-2", "TP 2 on both sides", prefill=two, decode=two, ranks=(2, 2)),
        Shape("tp-2-1-one-head", "TP 2 prefill, TP 1 decode, one KV head", "window", prefill=two, ranks=(2, 1)),
        Shape("page-1", "pages of 1 token", both=("--page-size", "1")),
        Shape("page-16", "pages of 16 tokens", both=("--page-size", "16")),
        Shape("page-64", "pages of 64 tokens", both=("--page-size", "64")),
        Shape("chunked", "chunked prefill, 128 tokens", prefill=("--chunked-prefill-size", "128")),
        Shape("radix-both", "prefix cache on both sides", decode=("--disaggregation-decode-enable-radix-cache",)),
        Shape("pp-2", "pipeline parallel prefill, 2 stages", prefill=("--pp-size", "2"), ranks=(2, 1)),
        Shape("dp-attention", "TP 2 with DP attention 2 on both sides", pair=data_parallel, ranks=(2, 2)),
        Shape("fp8-kv", "FP8 KV pool", both=("--kv-cache-dtype", "fp8_e4m3")),
        Shape("window", "sliding window (Gemma 3)", "window"),
        Shape("mla", "MLA (DeepSeek V2's attention), dummy weights", "mla", ("--load-format", "dummy")),
        Shape("draft", "speculative decoding with a draft model", pair=draft),
    )  # fmt: skip


def make_tiny_mla(folder: Path, tokenizer_from: Path) -> Path:
    """A model directory without weights: `TINY_MLA` and the tokenizer of another model. Returns ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    theirs: Mapping[str, object] = json.loads((tokenizer_from / "config.json").read_text(encoding="utf-8"))
    vocabulary = {key: theirs[key] for key in ("vocab_size", "bos_token_id", "eos_token_id") if key in theirs}
    (folder / "config.json").write_text(json.dumps({**TINY_MLA, **vocabulary}, indent=1) + "\n", encoding="utf-8")
    for name in _TOKENIZER_FILES:
        if (tokenizer_from / name).is_file():
            shutil.copyfile(tokenizer_from / name, folder / name)
    return folder
