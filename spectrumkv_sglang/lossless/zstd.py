"""Zstandard on the host (RFC 8878), by the package ``zstandard``, which releases the interpreter's lock meanwhile."""

from __future__ import annotations

import threading

import torch
import zstandard

from spectrumkv_sglang.lossless.codec import CodecName, LosslessCodec, require_same_size
from spectrumkv_sglang.payload.errors import PayloadError

LEVEL = 1
"""Higher ones take off no more of payloads and are slower (`benchmarks/lossless.py`)."""


class ZstdCodec(LosslessCodec):
    """One frame a payload, its content's size in the frame's header."""

    name = CodecName.zstd
    on_device = False

    def __init__(self) -> None:
        self._per_thread = threading.local()

    def compress(self, source: torch.Tensor, out: torch.Tensor) -> int | None:
        packed = self._compressor().compress(source.numpy().data)
        if len(packed) > out.numel():
            return None
        out[: len(packed)] = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        return len(packed)

    def decompress(self, source: torch.Tensor, out: torch.Tensor) -> None:
        data = source.numpy().data
        try:
            # Looked at first: the library allocates whatever the header says.
            require_same_size(self.name, zstandard.get_frame_parameters(data).content_size, out.numel())
            content = self._decompressor().decompress(data, max_output_size=out.numel(), allow_extra_data=False)
        except (zstandard.ZstdError, ValueError) as error:
            raise PayloadError(f"zstd payload: {error}") from error
        require_same_size(self.name, len(content), out.numel())
        out.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))

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
