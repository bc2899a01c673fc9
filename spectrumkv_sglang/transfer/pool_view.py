"""What the transfer needs of SGLang's KV pool, or the reason why this pool's KV travels natively.

The pool is inspected once, when SGLang has made its KV manager. Anything that is not plain MHA/GQA KV in one known
layout is left to SGLang's own path.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from spectrumkv_sglang.observability.reasons import Reason
from spectrumkv_sglang.payload.codec import KVBuffers
from spectrumkv_sglang.payload.errors import PayloadError
from spectrumkv_sglang.payload.geometry import KVGeometry
from spectrumkv_sglang.payload.key_rotation import RotatedRows
from spectrumkv_sglang.payload.precision_table import PrecisionTable
from spectrumkv_sglang.profiles.profile import Profile
from spectrumkv_sglang.profiles.tier import Tier
from spectrumkv_sglang.transfer.errors import GoNativeError

_MOST_PARTS = 64
_DTYPE_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


def _is_exactly(instance: Any, cls: type) -> bool:
    """Whether ``instance`` is of ``cls`` itself: a subclass may have another layout."""
    return type(instance) is cls


class Rotation(Protocol):
    """What a model turns its keys by."""

    def at(self, first_position: int, rows: int) -> RotatedRows:
        """The part for ``rows`` tokens of a prompt from ``first_position`` on."""


@dataclass(frozen=True)
class PoolView:
    """Tensors and geometry of a tierable pool, or of some of its KV heads (`of_heads`).

    ``buffers.k[layer]`` and ``buffers.v[layer]`` are [pool slots, kv heads, head dim], on ``device``. ``rotation`` is
    what the model turns its keys by, None where that is not known: ``why_no_rotation`` says why. ``first_head`` is that
    of the rank's ``heads_held`` (None: as many as ``geometry`` has) which comes first here.
    """

    buffers: KVBuffers
    geometry: KVGeometry
    device: torch.device
    pool_slots: int
    rotation: Rotation | None = None
    why_no_rotation: str = "nothing was said about the model's rotary embedding"
    first_head: int = 0
    heads_held: int | None = None
    _parts: dict[tuple[int, int], PoolView] = field(init=False, default_factory=dict, repr=False, compare=False)

    def of_heads(self, first: int, count: int) -> PoolView:
        """What packing and unpacking see when they may touch KV heads ``first`` to ``first + count - 1`` only.

        Raises:
            PayloadError: the pool does not have them.
        """
        if (first, count) == (0, self.geometry.kv_heads):
            return self
        part = self._parts.get((first, count))
        if part is None:
            part = replace(
                self,
                buffers=self.buffers.of_heads(first, count),
                geometry=replace(self.geometry, kv_heads=count),
                first_head=self.first_head + first,
                heads_held=self.heads_held or self.geometry.kv_heads,
            )
            if len(self._parts) < _MOST_PARTS:  # beyond any split: a peer that asks for more gets no memory for it
                part = self._parts.setdefault((first, count), part)
        return part

    def table(self, profile: Profile, allowed_tiers: Iterable[Tier] | None = None) -> PrecisionTable:
        """Precisions of ``profile`` for these heads. Head ids of a profile are those of the whole rank.

        Raises:
            ProfileError: it names layers or heads that the rank does not have.
        """
        whole = replace(self.geometry, kv_heads=self.heads_held or self.geometry.kv_heads)
        return profile.table(whole, allowed_tiers).of_heads(self.first_head, self.geometry.kv_heads)

    def rotated(self, table: PrecisionTable, first_position: int, rows: int) -> RotatedRows | None:
        """Angles of ``rows`` tokens from ``first_position`` of their prompt on; None where ``table`` needs none.

        Raises:
            PayloadError: it needs angles that are not known here.
        """
        if not table.needs_rotation:
            return None
        if self.rotation is None:
            raise PayloadError(
                f"the payload's keys are rotated back by their position, but the angles are not known here: "
                f"{self.why_no_rotation}"
            )
        return self.rotation.at(first_position, rows)


def view_pool(pool: Any, draft_pool: Any, kv_args: Any, *, is_mla: bool, plain_pool_type: type) -> PoolView:
    """Inspect SGLang's KV ``pool``.

    Args:
        pool: ``token_to_kv_pool`` of the rank.
        draft_pool: the speculative draft model's pool, or None.
        kv_args: SGLang's KVArgs of the rank.
        is_mla: whether SGLang treats the model as MLA.
        plain_pool_type: SGLang's MHATokenToKVPool; subclasses change the layout and are refused.

    Raises:
        GoNativeError: with the reason to count for every chunk of this rank.
    """
    if is_mla or getattr(kv_args, "is_hybrid_mla_backend", False):
        raise GoNativeError(Reason.MLA, "MLA latent KV has one shared head and is transferred natively")
    draft_entries: int = getattr(kv_args, "num_draft_entries", 0)  # absent in 0.5.16
    if draft_pool is not None or draft_entries:
        raise GoNativeError(Reason.DRAFT_KV, "a speculative draft model's KV shares the pointer list")
    if getattr(kv_args, "state_types", None):
        names = ", ".join(str(getattr(kind, "value", kind)) for kind in kv_args.state_types)
        raise GoNativeError(Reason.HYBRID_STATE, f"the model keeps state besides plain KV ({names})")
    if not _is_exactly(pool, plain_pool_type):
        raise GoNativeError(Reason.UNSUPPORTED_POOL, f"KV pool type {type(pool).__name__} has a layout of its own")
    k_buffers, v_buffers = list(pool.k_buffer), list(pool.v_buffer)
    dtype = k_buffers[0].dtype
    if dtype not in _DTYPE_NAMES or getattr(pool, "dtype", dtype) != dtype:
        raise GoNativeError(
            Reason.UNSUPPORTED_DTYPE,
            f"KV dtype {getattr(pool, 'dtype', dtype)} (stored as {dtype}) is not float32, float16 or bfloat16",
        )
    pointers = [buffer.data_ptr() for buffer in (*k_buffers, *v_buffers)]
    if pointers != list(kv_args.kv_data_ptrs):
        raise GoNativeError(Reason.UNSUPPORTED_POOL, "the pool's buffers are not the ones that SGLang transfers")
    for kind, buffers in (("K", k_buffers), ("V", v_buffers)):
        shape = buffers[0].shape
        if any(b.dim() != 3 or b.shape != shape or b.dtype != dtype or not b.is_contiguous() for b in buffers):
            raise GoNativeError(Reason.UNSUPPORTED_POOL, f"{kind} buffers are not equal [slots, heads, dim] tensors")
    slots, heads, head_dim = k_buffers[0].shape
    if v_buffers[0].shape[:2] != (slots, heads):
        raise GoNativeError(Reason.UNSUPPORTED_POOL, "K and V buffers differ in slots or heads")
    v_head_dim = v_buffers[0].shape[2]
    if head_dim % 8 or v_head_dim % 8:
        raise GoNativeError(Reason.UNSUPPORTED_POOL, f"head dims {head_dim}/{v_head_dim} are not multiples of 8")
    geometry = KVGeometry(
        layers=len(k_buffers),
        kv_heads=heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        page_size=int(kv_args.page_size),
        dtype=_DTYPE_NAMES[dtype],
    )
    return PoolView(KVBuffers(k=k_buffers, v=v_buffers), geometry, k_buffers[0].device, slots)
