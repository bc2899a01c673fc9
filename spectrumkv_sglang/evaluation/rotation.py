"""The rotary embedding of a model, read off while it runs."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch

# Families whose attention turns the two halves of a head (or of its first part) by cos and sin, as GPT-NeoX does.
# Others turn neighbouring elements, or nothing at all in some layers.
_LLAMA_LIKE = ("granite", "llama", "mistral", "mixtral", "olmo2", "phi", "phi3", "stablelm")
_HALVES = frozenset(
    {*_LLAMA_LIKE, "gemma", "gemma2", "gemma3_text", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"},
)


class RotationTap:
    """Keeps the (cos, sin) that each attention layer is given, while the context is entered.

    Args:
        model: a transformers model whose decoder layers pass ``position_embeddings`` to their attention.
        model_type: ``model_type`` of its text configuration.
    """

    def __init__(self, model: torch.nn.Module, model_type: str) -> None:
        self._attentions = [
            module for module in model.modules() if hasattr(module, "layer_idx") and hasattr(module, "k_proj")
        ]
        if not self._attentions:  # one projection for q, k and v
            self._attentions = [
                module for module in model.modules() if hasattr(module, "layer_idx") and hasattr(module, "qkv_proj")
            ]
        self._known = model_type in _HALVES
        self._seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._hooks: list[Any] = []

    def __enter__(self) -> RotationTap:
        self._seen = {}
        self._hooks = [
            attention.register_forward_pre_hook(self._see, with_kwargs=True) for attention in self._attentions
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()

    def of_layers(self, layers: int) -> tuple[tuple[torch.Tensor, torch.Tensor], ...] | None:
        """cos and sin, float32 [tokens, rotated dims], of each layer; None unless they are known to turn halves."""
        if not self._known or set(self._seen) != set(range(layers)):
            return None
        return tuple(self._seen[layer] for layer in range(layers))

    def _see(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        embeddings = kwargs.get("position_embeddings")
        if embeddings is not None:
            cos, sin = embeddings
            self._seen[module.layer_idx] = (cos[0].float(), sin[0].float())
