"""Rotary angles of the model that a server serves, read from SGLang's own caches whenever a payload needs them.

Both servers load the same model, so each reads its own table and payloads carry no angles; the handshake tells prefill
whether decode has found its table. What one rotates back the other rotates again, whatever the angles: that they are
those of the layer decides how well its keys quantise, not whether they arrive.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from spectrumkv_sglang import sglang_compat
from spectrumkv_sglang.config import SpectrumKVConfig
from spectrumkv_sglang.errors import SpectrumKVError
from spectrumkv_sglang.payload.errors import PayloadError
from spectrumkv_sglang.payload.geometry import KVGeometry
from spectrumkv_sglang.payload.key_rotation import KeyRotation, RotatedRows
from spectrumkv_sglang.transfer.pool_view import PoolView

# A cache in bfloat16 holds sines and cosines to 1/256; scalings change frequencies by far more.
_SAME_FREQUENCY = 0.02


class UnknownRotationError(SpectrumKVError):
    """The model turns its keys in a way that payloads cannot undo; the message says which layer and class."""


@dataclass(frozen=True)
class ServedRotation:
    """Angles in the rotary embeddings of a served model.

    Attributes:
        embeddings: SGLang's rotary embedding of each layer. Layers share modules; their ``cos_sin_cache`` [positions,
            rotated dims] is looked up at each use, since SGLang may put another tensor in its place.
        device: of the KV pool.
    """

    embeddings: tuple[Any, ...]
    device: torch.device

    def at(self, first_position: int, rows: int) -> RotatedRows:
        """Angles of ``rows`` tokens of a prompt from ``first_position`` on.

        Raises:
            PayloadError: some position is behind the model's longest sequence.
        """
        angles = {module: self._angles(module, first_position, rows) for module in dict.fromkeys(self.embeddings)}
        rotation = KeyRotation(tuple(angles[module] for module in self.embeddings))
        return RotatedRows(rotation, np.arange(rows, dtype=np.int64))

    def _angles(self, module: Any, first: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin float32 [rows, rotated dims], both halves of the dims alike."""
        cache = module.cos_sin_cache
        if first < 0 or first + rows > len(cache):
            raise PayloadError(
                f"key rotation: expected positions 0 to {len(cache) - 1}, got {first} to {first + rows - 1}; serve "
                "both sides with the same --context-length"
            )
        if cache.is_cuda:  # SGLang may drop the tensor while this thread's stream still reads it
            cache.record_stream(torch.cuda.current_stream(cache.device))
        halves = cache[first : first + rows].to(device=self.device, dtype=torch.float32)
        cos, sin = halves.chunk(2, dim=-1)
        return torch.cat([cos, cos], dim=-1), torch.cat([sin, sin], dim=-1)


def with_rotation(view: PoolView, model: Any) -> PoolView:
    """``view`` with the angles of ``model``, SGLang's module of the served model, or with the reason for none."""
    try:
        return replace(view, rotation=read_rotation(model, view.geometry, view.device))
    except UnknownRotationError as error:
        return replace(view, rotation=None, why_no_rotation=str(error))


def require_rotation(view: PoolView, config: SpectrumKVConfig) -> None:
    """Refuse a profile that this rank can neither pack nor unpack.

    Raises:
        UnknownRotationError: the configured profile rotates keys back, and the model's angles are not known.
    """
    if view.rotation is None and config.loaded_profile.table(view.geometry, config.allowed_tiers).needs_rotation:
        raise UnknownRotationError(
            f"profile {config.profile} rotates keys back by their position (transform: keys: derope), but the angles "
            f"of this model are not known: {view.why_no_rotation}. Use `keys: identity` in the profile, or another "
            "profile"
        )


def read_rotation(model: Any, geometry: KVGeometry, device: torch.device) -> ServedRotation:
    """Find the rotary embedding of every layer of ``model``.

    Raises:
        UnknownRotationError: not every layer of the pool has exactly one, of a kind that turns halves of a head as
            GPT-NeoX does, by one position for each token.
    """
    if model is None:
        raise UnknownRotationError("SGLang's scheduler keeps its model in a place that is not known")
    layers: dict[int, Any] = {}
    for layer, owner in _attention_layers(model):
        if layer in layers:
            raise UnknownRotationError(f"{_name(model)} has two attention modules for layer {layer}")
        layers[layer] = _rotary_embedding(layer, owner, geometry.head_dim)
    if sorted(layers) != list(range(geometry.layers)):
        raise UnknownRotationError(
            f"{_name(model)}: expected attention modules of layers 0 to {geometry.layers - 1}, found those of "
            f"{len(layers)} layers"
        )
    embeddings = tuple(layers[layer] for layer in range(geometry.layers))
    _check_outside(model, embeddings)
    return ServedRotation(embeddings, device)


def _attention_layers(model: Any) -> Iterator[tuple[int, Any]]:
    """Layer number and owning module of each of SGLang's attention layers in ``model``."""
    attention: Any = sglang_compat.attention_layer_type()
    for owner in model.modules():
        for child in owner.children():
            if isinstance(child, attention):
                yield int(child.layer_id), owner


def _rotary_embedding(layer: int, owner: Any, head_dim: int) -> Any:
    where = f"layer {layer} ({_name(owner)})"
    found = [child for child in owner.children() if sglang_compat.is_rotary(child)]
    if _name(owner) in sglang_compat.ATTENTION_WITH_OTHER_ANGLES:
        raise UnknownRotationError(f"{where} does not turn its keys by its rotary embedding in every layer")
    if len(found) != 1:
        kinds = Counter(_name(child) for child in found)
        listed = ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "none"
        raise UnknownRotationError(f"{where}: expected one rotary embedding, found {listed}")
    [module] = found
    if type(module) not in sglang_compat.rotary_types():
        raise UnknownRotationError(f"{where} has a {_name(module)}, whose angles do not follow from the position alone")
    if not module.is_neox_style:
        raise UnknownRotationError(f"{where} turns neighbouring dims (is_neox_style False), not halves of a head")
    if getattr(module, "position_start", 0):  # 0.5.23 on
        raise UnknownRotationError(f"{where}: its table starts at position {module.position_start}, expected 0")
    rotated = module.cos_sin_cache.shape[-1]
    if module.head_size != head_dim or rotated != module.rotary_dim or rotated % 2 or not 0 < rotated <= head_dim:
        raise UnknownRotationError(
            f"{where}: its rotary embedding turns {rotated} dims of heads of {module.head_size}, the KV pool's keys "
            f"have {head_dim}"
        )
    return module


def _check_outside(model: Any, embeddings: tuple[Any, ...]) -> None:
    """Refuse a model whose layers are given other angles from outside than their own embeddings hold."""
    outside = sglang_compat.outside_frequencies(model)
    for module in dict.fromkeys(embeddings) if outside else ():
        cos, sin = module.cos_sin_cache[1].float().chunk(2, dim=-1)
        own = torch.atan2(sin, cos)
        if not any(factor == 1.0 and _same_frequencies(own, given) for given, factor in outside):
            raise UnknownRotationError(
                f"{_name(model)} turns keys by angles that are computed outside its layers and differ from their own "
                "rotary embeddings (scaled RoPE)"
            )


def _same_frequencies(own: torch.Tensor, given: torch.Tensor) -> bool:
    return own.shape == given.shape and torch.allclose(own, given.to(own), rtol=_SAME_FREQUENCY, atol=0)


def _name(module: Any) -> str:
    return type(module).__name__
