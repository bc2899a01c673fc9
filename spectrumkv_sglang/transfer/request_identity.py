"""Which KV a room is for, where its room id does not say: a digest of what made it, which both sides know.

SGLang tells transfers apart by their room id alone. When an id is used again while the former request lives on (its
client has left, SGLang goes on for seconds), prefill finds the new request's pages under the id, and the former one's
KV and first token would go there. KV of an equal prompt under an equal LoRA adapter is equal, so their digest is all
that has to agree. Adapters count by the name that clients call them by: SGLang's own ids hold the path that a server
read the adapter from, or are random, and so differ between prefill and decode. SGLang's ``extra_key`` and
``cache_salt`` keep prefix caches apart but change no KV; they are not in it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from spectrumkv_sglang.transfer.errors import ControlMessageError
from spectrumkv_sglang.transfer.messages import open_envelope, seal_envelope

MAGIC = b"SKVR"
UNKNOWN = 0
_BYTES = 8


def prompt_digest(token_ids: Sequence[int] | None, adapter: str | None = "") -> int:
    """64-bit digest of a prompt under a LoRA adapter, never `UNKNOWN`; `UNKNOWN` where either is None.

    Args:
        adapter: its name; "": the base model.
    """
    if token_ids is None or adapter is None:
        return UNKNOWN
    raw = np.asarray(token_ids, dtype="<i8").tobytes()
    key = hashlib.blake2b(adapter.encode()).digest() if adapter else b""
    return int.from_bytes(hashlib.blake2b(raw, digest_size=_BYTES, key=key).digest(), "little") or 1


def may_be_same(ours: int, theirs: int) -> bool:
    """False for digests of different prompts; one that is `UNKNOWN` may be any."""
    return UNKNOWN in (ours, theirs) or ours == theirs


def encode_prompt(digest: int) -> bytes:
    """The frame that decode adds to SGLang's message about a room's pages."""
    return seal_envelope(MAGIC, digest.to_bytes(_BYTES, "little"))


def decode_prompt(frame: bytes | None) -> int:
    """The digest in ``frame``; `UNKNOWN` for none and for one of another version, whose handshake says so already."""
    if frame is None:
        return UNKNOWN
    try:
        body = open_envelope(frame, MAGIC, "prompt digest")
    except ControlMessageError:
        return UNKNOWN
    return int.from_bytes(body, "little") if len(body) == _BYTES else UNKNOWN
