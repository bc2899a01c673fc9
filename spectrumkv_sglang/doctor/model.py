"""Will the KV of a model be tiered, and what does it weigh?

Reads `config.json` only: no weights, no SGLang. The server decides from the real KV pool when it starts; this tells an
operator before.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spectrumkv_sglang.config import SpectrumKVConfig
from spectrumkv_sglang.doctor.findings import Section
from spectrumkv_sglang.kernels.precision import Precision
from spectrumkv_sglang.observability.reasons import Reason
from spectrumkv_sglang.payload.errors import PayloadError
from spectrumkv_sglang.payload.geometry import HEAD_DIM_MULTIPLE, KVGeometry
from spectrumkv_sglang.payload.layout import bytes_per_row
from spectrumkv_sglang.profiles.errors import ProfileError

ModelConfig = dict[str, Any]

# Architectures for which SGLang 0.5.16 to 0.5.23 keeps sliding-window layers in a pool of their own
# (configs/model_config.py, is_hybrid_swa_model); other models with sliding windows use one plain pool.
SPLIT_SLIDING_WINDOW = (
    "DeepseekV4", "DiffusionGemma", "Dots3", "EmbeddingGemma2", "Gemma4", "GptOss", "GraniteMoeSWA", "GraniteSWA",
    "IQuestQ1", "Inkling", "Laguna", "Llama4", "Mellum", "MiMoV2", "MuseGlimmer", "Spark2_5", "Step3p5", "Step3p7",
    "UnlimitedOCR",
)  # fmt: skip
# Keys that only models with recurrent, linear-attention or convolution layers have.
RECURRENT_KEYS = (
    "attn_layer_period", "attn_type_list", "block_types", "conv_L_cache", "full_attention_interval",
    "hybrid_override_pattern", "layers_block_type", "linear_attn_config", "linear_num_value_heads", "mamba_d_ssm",
    "mamba_d_state", "ssm_state_size", "state_size", "time_step_rank",
)  # fmt: skip
ATTENTION_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
# Families whose keys have outlier channels that per-token INT4 loses (KIVI, KVQuant, KVTuner; Qwen2's k_proj bias).
FRAGILE_KEYS = ("qwen2", "gemma3")


@dataclass(frozen=True)
class Verdict:
    """Whether a model's KV is tiered. `reason` is the label that its native chunks would carry in the metrics."""

    reason: Reason
    detail: str
    remedy: str = ""

    @property
    def tiered(self) -> bool:
        """True when the KV travels in tiers."""
        return self.reason is Reason.TIERED


def check_model(directory: Path, config: SpectrumKVConfig | None) -> Section:
    """What of the model in `directory` will be tiered, and what `config` makes of it (None: configuration unusable)."""
    section = Section("model")
    path = directory / "config.json"
    try:
        model = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(model, dict):
            raise ValueError(f"expected an object, got {type(model).__name__}")
    except (OSError, ValueError) as error:
        section.problem("model", f"{path}: {error}", "give --model-path the local directory that holds config.json")
        return section
    verdict = judge_model(model)
    name = ", ".join(model.get("architectures") or []) or str(model.get("model_type", "unknown"))
    if not verdict.tiered:
        section.warning(
            "model", f"{name}: native transfer, reason {verdict.reason.value}: {verdict.detail}", verdict.remedy
        )
        return section
    try:
        geometry = geometry_of(model)
    except PayloadError as error:
        section.warning(
            "model",
            f"{name}: {verdict.detail}, but config.json does not tell its geometry: {error}",
            "start the server: its log says whether the KV is tiered",
        )
        return section
    section.ok("model", f"{name}: KV is tiered: {verdict.detail}")
    _note_quantised_weights(section, model)
    _describe_geometry(section, geometry)
    if config is not None:
        _describe_budget(section, geometry, config)
        _warn_fragile_keys(section, model, config)
    return section


def judge_model(model: ModelConfig) -> Verdict:
    """Decides from a parsed `config.json`."""
    parts = list(_parts(model))
    architectures = [str(name) for name in model.get("architectures") or []]
    if any(part.get("kv_lora_rank") for part in parts) and not any(part.get("use_mla") is False for part in parts):
        return Verdict(Reason.MLA, "latent (MLA) attention", "nothing to do: SGLang moves this KV itself")
    recurrent = sorted({key for part in parts for key in RECURRENT_KEYS if part.get(key)})
    layer_types = {str(kind) for part in parts for kind in part.get("layer_types") or []}
    other_layers = sorted(layer_types - ATTENTION_LAYER_TYPES)
    if recurrent or other_layers:
        found = ", ".join(other_layers or recurrent)
        return Verdict(
            Reason.HYBRID_STATE,
            f"layers with state beside KV ({found})",
            "nothing to do: SGLang moves this state itself",
        )
    if any(name.startswith(SPLIT_SLIDING_WINDOW) for name in architectures) or any(
        part.get("is_hybrid_swa") for part in parts
    ):
        return Verdict(
            Reason.HYBRID_STATE,
            "sliding-window layers live in a pool of their own",
            "start both servers with --disable-hybrid-swa-memory to keep all layers in one pool",
        )
    text = text_config(model)
    if any(isinstance(text.get(key), list) for key in ("num_key_value_heads", "num_kv_heads", "num_attention_heads")):
        return Verdict(Reason.UNSUPPORTED_POOL, "layers have different numbers of KV heads", "nothing to do")
    odd_sizes = [text[key] for key in ("head_dim", "v_head_dim") if text.get(key, 0) % HEAD_DIM_MULTIPLE]
    if odd_sizes:
        return Verdict(
            Reason.UNSUPPORTED_POOL, f"head size {odd_sizes[0]} is no multiple of {HEAD_DIM_MULTIPLE}", "nothing to do"
        )
    kv_dtype = _checkpoint_kv_dtype(model)
    if kv_dtype:
        return Verdict(
            Reason.UNSUPPORTED_DTYPE,
            f"the checkpoint asks for a quantised KV cache ({kv_dtype})",
            "start both servers with --kv-cache-dtype bf16 to use tiers",
        )
    if "sliding_attention" in layer_types or text.get("sliding_window_pattern"):
        return Verdict(Reason.TIERED, "grouped-query attention; sliding-window layers share the plain pool")
    return Verdict(Reason.TIERED, "multi-head or grouped-query attention")


def text_config(model: ModelConfig) -> ModelConfig:
    """The part of a config that describes the language model (multimodal configs nest it)."""
    return next((part for part in _parts(model) if "num_hidden_layers" in part), model)


def geometry_of(model: ModelConfig) -> KVGeometry:
    """KV geometry of the whole model (tensor-parallel size 1, page size 1). PayloadError when it cannot be read."""
    text = text_config(model)
    heads = _integer(text, "num_attention_heads")
    head_dim = _integer(text, "head_dim") if text.get("head_dim") else _integer(text, "hidden_size") // max(heads, 1)
    kv_heads = (
        1
        if text.get("multi_query")
        else next(
            (
                _integer(text, key)
                for key in ("num_key_value_heads", "num_kv_heads", "multi_query_group_num")
                if text.get(key)
            ),
            heads,
        )
    )
    dtype = str(text.get("dtype") or text.get("torch_dtype") or model.get("dtype") or model.get("torch_dtype") or "")
    return KVGeometry(
        layers=_integer(text, "num_hidden_layers"),
        kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=_integer(text, "v_head_dim") if text.get("v_head_dim") else head_dim,
        page_size=1,
        # --dtype auto serves float32 checkpoints in 16 bits.
        dtype="bfloat16" if dtype.removeprefix("torch.") != "float16" else "float16",
    )


def _parts(model: ModelConfig) -> Iterator[ModelConfig]:
    """The config and the configs nested in it, outermost first."""
    yield model
    for key, value in model.items():
        if isinstance(value, dict) and key.endswith(("text_config", "llm_config", "language_config", "thinker_config")):
            yield from _parts(value)


def _integer(config: ModelConfig, key: str) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int):
        raise PayloadError(f"{key} must be an integer, got {value!r}")
    return value


def _checkpoint_kv_dtype(model: ModelConfig) -> str | None:
    for part in _parts(model):
        quantisation = part.get("quantization_config") or {}
        scheme = quantisation.get("kv_cache_scheme") or quantisation.get("kv_cache_quant_algo")
        if isinstance(scheme, dict):
            return f"{scheme.get('type', '')}{scheme.get('num_bits', '')}" or "unknown"
        if scheme:
            return str(scheme)
    return None


def _note_quantised_weights(section: Section, model: ModelConfig) -> None:
    methods = {str((part.get("quantization_config") or {}).get("quant_method", "")) for part in _parts(model)} - {""}
    if methods:
        section.info("weights", f"quantised ({', '.join(sorted(methods))}): no matter, KV stays in 16 bits")


def _describe_geometry(section: Section, geometry: KVGeometry) -> None:
    section.ok(
        "geometry",
        f"{geometry.layers} layers x {geometry.kv_heads} KV heads x {geometry.head_dim}, {geometry.dtype}: "
        f"{geometry.native_bytes_per_token:,} bytes a token, {geometry.native_bytes_per_token * 8192 / 2**20:,.0f} MiB "
        "for 8,192 tokens (all tensor-parallel ranks together)",
    )


def _describe_budget(section: Section, geometry: KVGeometry, config: SpectrumKVConfig) -> None:
    try:
        table = config.loaded_profile.table(geometry, config.allowed_tiers)
    except ProfileError as error:
        section.problem("profile", str(error), "correct the profile's overrides or choose another profile")
        return
    costs = bytes_per_row(geometry, table)
    usable = config.loaded_profile.usable_tiers(config.allowed_tiers)
    native = geometry.native_bytes_per_token
    tiers = ", ".join(f"{tier.label} {costs[tier] / native:.3f}" for tier in usable)
    least = min(float(costs[tier]) for tier in usable) / native
    if config.budget < least:
        section.warning(
            "budget",
            f"{config.budget:g} cannot be reached on this model: tiers cost {tiers} of native",
            f"set budget to at least {least + 0.01:.2f}, allow lower tiers or choose another profile",
        )
    else:
        section.ok("budget", f"{config.budget:g} of native; tiers of profile {config.profile} cost {tiers}")


def _warn_fragile_keys(section: Section, model: ModelConfig, config: SpectrumKVConfig) -> None:
    families = {str(part.get("model_type", "")) for part in _parts(model)}
    fragile = sorted(family for family in families if family.startswith(FRAGILE_KEYS))
    profile = config.loaded_profile
    tiers = [
        tier.label for tier in profile.usable_tiers(config.allowed_tiers) if profile.tiers[tier].keys is Precision.INT4
    ]
    if fragile and tiers:
        section.warning(
            "keys",
            f"{fragile[0]} models lose much quality with INT4 keys (profile {config.profile}, tier {', '.join(tiers)})",
            "choose profile balanced, k8v4 or spectrum-safe, or measure your own texts first",
        )
