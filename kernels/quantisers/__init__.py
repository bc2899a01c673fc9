"""One quantiser per precision; adding one is a file here and a line in the registry."""

from __future__ import annotations

from spectrumkv_sglang.kernels.precision import Precision
from spectrumkv_sglang.kernels.quantisers.base import Quantiser
from spectrumkv_sglang.kernels.quantisers.fp8 import Fp8E4M3Quantiser
from spectrumkv_sglang.kernels.quantisers.int4 import Int4Quantiser
from spectrumkv_sglang.kernels.quantisers.int4_channel import Int4ChannelQuantiser
from spectrumkv_sglang.kernels.quantisers.int8 import Int8Quantiser
from spectrumkv_sglang.kernels.quantisers.native import NativeQuantiser

_QUANTISERS: dict[Precision, Quantiser] = {
    Precision.NATIVE: NativeQuantiser(),
    Precision.INT8: Int8Quantiser(),
    Precision.FP8_E4M3: Fp8E4M3Quantiser(),
    Precision.INT4: Int4Quantiser(),
    Precision.INT4_CHANNEL: Int4ChannelQuantiser(),
}


def quantiser_for(precision: Precision) -> Quantiser:
    """Return the quantiser of a precision."""
    return _QUANTISERS[precision]


__all__ = [
    "Fp8E4M3Quantiser",
    "Int4ChannelQuantiser",
    "Int4Quantiser",
    "Int8Quantiser",
    "NativeQuantiser",
    "Quantiser",
    "quantiser_for",
]
