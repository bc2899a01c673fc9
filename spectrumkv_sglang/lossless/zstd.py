"""Zstandard on the host (RFC 8878), by the package ``zstandard``, which releases the interpreter's lock meanwhile.

A byte in front of the frame says in how many planes the payload was cut: the first bytes of all elements, then the
second ones, and so on. Exponents of native KV repeat and mantissas do not: cut apart, bfloat16 leaves two thirds
instead of four fifths (docs/results/quality.md).
"""

from __future__ import annotations

import threading

import torch
import zstandard

from spectrumkv_sglang.lossless.codec import CodecName, LosslessCodec, require_same_size
from spectrumkv_sglang.payload.errors import PayloadError

LEVEL = 1
"""Higher ones take off no more of payloads and are slower (`benchmarks/lossless.py`)."""
PLANES = (1, 2, 4)


class ZstdCodec(LosslessCodec):
    """One frame a payload, its content's size in the frame's header.

    Args:
        planes: that `compress` cuts payloads in: the bytes of a native element.
    """

    name = CodecName.zstd
    on_device = False

    def __init__(self, planes: int = 1) -> None:
        if planes not in PLANES:
            raise ValueError(f"zstd codec: expected one of {PLANES} planes, got {planes}")
        self._planes = planes
        self._per_thread = threading.local()

    def compress(self, source: torch.Tensor, out: torch.Tensor) -> int | None:
        packed = self._compressor().compress(_cut(source, self._planes).numpy().data)
        length = 1 + len(packed)
        if length > out.numel():
            return None
        out[0] = self._planes
        out[1:length] = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        return length

    def decompress(self, source: torch.Tensor, out: torch.Tensor) -> None:
        if not source.numel() or int(source[0]) not in PLANES:
            raise PayloadError(f"zstd payload: expected to begin with one of {PLANES}, got {source[:1].tolist()}")
        data = source[1:].numpy().data
        try:
            # Looked at first: the library allocates whatever the header says.
            inside = zstandard.get_frame_parameters(data).content_size
            if inside == zstandard.CONTENTSIZE_UNKNOWN:
                raise PayloadError("zstd payload: expected the content's size in the frame's header, got none")
            require_same_size(self.name, inside, out.numel())
            content = self._decompressor().decompress(data, max_output_size=out.numel(), allow_extra_data=False)
        except (zstandard.ZstdError, ValueError) as error:
            raise PayloadError(f"zstd payload: {error}") from error
        require_same_size(self.name, len(content), out.numel())
        if out.numel():
            _join(torch.frombuffer(bytearray(content), dtype=torch.uint8), int(source[0]), out)

    def _compressor(self) -> zstandard.ZstdCompressor:
        made = getattr(self._per_thread, "compressor", None)
        if made is None:
            made = self._per_thread.compressor = zstandard.ZstdCompressor(level=LEVEL)
        return made

    def _decompressor(self) -> zstandard.ZstdDecompressor:
        made = getattr(self._per_thread, "decompressor", None)
        if made is None:
            made = self._per_thread.decompressor = zstandard.ZstdDecompressor()
        return made


def _cut(data: torch.Tensor, planes: int) -> torch.Tensor:
    """``data`` plane by plane; what is left over behind whole elements stays at the end."""
    whole = data.numel() // planes * planes
    if planes == 1 or not whole:
        return data
    return torch.cat((data[:whole].view(-1, planes).t().reshape(-1), data[whole:]))


def _join(data: torch.Tensor, planes: int, out: torch.Tensor) -> None:
    """Undo `_cut` into ``out``."""
    whole = data.numel() // planes * planes
    out[:whole].view(-1, planes).copy_(data[:whole].view(planes, -1).t())
    out[whole:] = data[whole:]
