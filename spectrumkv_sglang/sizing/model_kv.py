"""What a model's ``config.json`` says of its KV and of the work of a prefill. Reads that file only; no network."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spectrumkv_sglang.doctor.model import geometry_of, judge_model, text_config
from spectrumkv_sglang.payload.errors import PayloadError
from spectrumkv_sglang.payload.geometry import KVGeometry
from spectrumkv_sglang.sizing.errors import SizingError


@dataclass(frozen=True)
class PrefillWork:
    """Floating-point operations of a prefill.

    Attributes:
        per_token: of the linear layers: two for each weight that a token goes through.
        per_token_squared: of causal attention: 2 layers x heads x head size, half of the products.
    """

    per_token: float
    per_token_squared: float

    def operations(self, tokens: int) -> float:
        """Of a prompt of ``tokens`` from its beginning."""
        return self.per_token * tokens + self.per_token_squared * tokens**2


@dataclass(frozen=True)
class ModelKV:
    """One model as it would be served.

    Attributes:
        name: architecture, or the model's type.
        native_reason: label that its native chunks would carry in the metrics; None: its KV is tiered.
        native_detail: the same in words; how its KV is built where it is tiered.
        remedy: what an operator can do about a native transfer.
        rank: KV geometry of one tensor-parallel rank; None where the KV is not plain.
        tp: tensor-parallel size.
        work: of a prefill, all ranks together; None where the config does not tell.
    """

    name: str
    native_reason: str | None
    native_detail: str
    remedy: str
    rank: KVGeometry | None
    tp: int
    work: PrefillWork | None

    @property
    def bytes_per_token(self) -> int:
        """Native KV bytes of a token, all ranks together; heads that ranks hold twice count twice. 0 if not known."""
        return 0 if self.rank is None else self.rank.native_bytes_per_token * self.tp


def read_model(directory: Path, *, tp: int = 1, dtype: str = "auto") -> ModelKV:
    """The model in ``directory``, split over ``tp`` ranks; ``dtype`` of its KV: auto, float32, float16 or bfloat16.

    Raises:
        SizingError: no readable config.json, or heads that cannot be split so.
    """
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SizingError(f"{path}: {error}; give --model-path the local directory that holds config.json") from error
    if not isinstance(config, dict):
        raise SizingError(f"{path}: expected an object, got {type(config).__name__}")
    verdict = judge_model(config)
    name = ", ".join(config.get("architectures") or []) or str(config.get("model_type", "unknown"))
    reason = None if verdict.tiered else verdict.reason.value
    try:
        whole = geometry_of(config)
    except PayloadError as error:
        if verdict.tiered:
            raise SizingError(f"{path} does not tell the KV's geometry: {error}") from error
        return ModelKV(name, reason, verdict.detail, verdict.remedy, None, tp, None)
    if not verdict.tiered and reason in ("mla", "hybrid_state"):
        return ModelKV(name, reason, verdict.detail, verdict.remedy, None, tp, None)
    if dtype != "auto":
        try:
            whole = replace(whole, dtype=dtype)
        except PayloadError as error:
            raise SizingError(f"--dtype: {error}") from error
    return ModelKV(name, reason, verdict.detail, verdict.remedy, _one_rank(whole, tp), tp, _work(config, whole))


def _one_rank(whole: KVGeometry, tp: int) -> KVGeometry:
    """SGLang splits KV heads over ranks; with more ranks than heads, several ranks hold the same one."""
    if max(whole.kv_heads, tp) % min(whole.kv_heads, tp):
        raise SizingError(f"--tp {tp} does not divide {whole.kv_heads} KV heads, nor do they divide it")
    return replace(whole, kv_heads=max(1, whole.kv_heads // tp))


def _work(config: dict[str, Any], geometry: KVGeometry) -> PrefillWork | None:
    text = text_config(config)
    hidden, heads = text.get("hidden_size"), text.get("num_attention_heads")
    experts = text.get("num_experts_per_tok")
    wide = text.get("moe_intermediate_size") if experts else None
    intermediate = (wide or text.get("intermediate_size") or 0) * (experts or 1)
    if not (isinstance(hidden, int) and isinstance(heads, int) and isinstance(intermediate, int) and intermediate):
        return None
    queries = heads * geometry.head_dim
    projections = hidden * (2 * queries + geometry.kv_heads * (geometry.head_dim + geometry.v_head_dim))
    weights = geometry.layers * (projections + 3 * hidden * intermediate)
    return PrefillWork(per_token=2.0 * weights, per_token_squared=2.0 * geometry.layers * queries)
