"""What a lossless codec of payloads is, and which there are."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import Enum

import torch

from spectrumkv_sglang.errors import SpectrumKVError
from spectrumkv_sglang.observability.once import log_once
from spectrumkv_sglang.payload.errors import PayloadError

logger = logging.getLogger(__name__)


class CodecName(str, Enum):
    """A codec as configuration, handshake and COMMIT name it."""

    none = "none"
    zstd = "zstd"


class LosslessCodec(ABC):
    """Compresses vectors of bytes and brings them back. Threads may share one.

    Attributes:
        name: as in the handshake.
        on_device: whether it works on the pool's device; otherwise on host memory.
    """

    name: CodecName
    on_device: bool

    @abstractmethod
    def compress(self, source: torch.Tensor, out: torch.Tensor) -> int | None:
        """Compress ``source`` into the beginning of ``out``: uint8 vectors where the codec works, which may overlap.

        Returns:
            Bytes written; None: they would not fit, and ``out`` is as it was.
        """

    @abstractmethod
    def decompress(self, source: torch.Tensor, out: torch.Tensor) -> None:
        """Fill ``out`` with what ``source`` was made from.

        Raises:
            PayloadError: ``source`` does not hold exactly as much. What it claims beyond that is never allocated.
        """


_MODULES = {CodecName.zstd: "zstandard"}


def _zstd(element_bytes: int) -> LosslessCodec:
    from spectrumkv_sglang.lossless.zstd import ZstdCodec

    return ZstdCodec(element_bytes)


_MAKERS: dict[CodecName, Callable[[int], LosslessCodec]] = {CodecName.zstd: _zstd}


def make_codec(name: CodecName, element_bytes: int = 1) -> LosslessCodec | None:
    """The codec of that name; None for ``none``.

    Args:
        element_bytes: bytes of a native element of the KV pool, whose bytes of one place are alike.

    Raises:
        SpectrumKVError: its package is not installed.
    """
    if name is CodecName.none:
        return None
    try:
        return _MAKERS[name](element_bytes)
    except ImportError as error:
        raise SpectrumKVError(
            f"codec: {name.value} needs the Python package {_MODULES[name]} ({error}): "
            "pip install 'spectrumkv-sglang[codec]', or set codec: none"
        ) from error


def installed_codecs() -> dict[str, LosslessCodec]:
    """Every codec whose package can be imported, by name: what a decode rank can bring back."""
    found = {}
    for name in _MAKERS:
        try:
            codec = make_codec(name)
        except SpectrumKVError as error:
            log_once(logger, logging.INFO, f"no-codec-{name.value}", f"payloads of this codec are refused: {error}")
            continue
        if codec is not None:
            found[name.value] = codec
    return found


def require_same_size(name: CodecName, found: int, expected: int) -> None:
    """Raise PayloadError unless a compressed payload holds as much as was announced."""
    if found != expected:
        raise PayloadError(f"{name.value} payload: expected {expected} bytes inside, got {found}")
