"""One quantiser per precision; adding one is a file here and a line in the registry."""

from __future__ import annotations

from spectrumkv_sglang.kernels.precision import Precision
from spectrumkv_sglang.kernels.quantisers.affine_channel import AffineChannelQuantiser
from spectrumkv_sglang.kernels.quantisers.affine_row import AffineRowQuantiser
from spectrumkv_sglang.kernels.quantisers.base import Quantiser
from spectrumkv_sglang.kernels.quantisers.fp8 import Fp8E4M3Quantiser
from spectrumkv_sglang.kernels.quantisers.int8 import Int8Quantiser
from spectrumkv_sglang.kernels.quantisers.native import NativeQuantiser

_QUANTISERS: dict[Precision, Quantiser] = {
    Precision.NATIVE: NativeQuantiser(),
    Precision.INT8: Int8Quantiser(),
    Precision.FP8_E4M3: Fp8E4M3Quantiser(),
    Precision.INT2: AffineRowQuantiser(2),
    Precision.INT3: AffineRowQuantiser(3),
    Precision.INT4: AffineRowQuantiser(4),
    Precision.INT5: AffineRowQuantiser(5),
    Precision.INT6: AffineRowQuantiser(6),
    Precision.INT2_CHANNEL: AffineChannelQuantiser(2),
    Precision.INT3_CHANNEL: AffineChannelQuantiser(3),
    Precision.INT4_CHANNEL: AffineChannelQuantiser(4),
    Precision.INT5_CHANNEL: AffineChannelQuantiser(5),
    Precision.INT6_CHANNEL: AffineChannelQuantiser(6),
    Precision.INT8_CHANNEL: AffineChannelQuantiser(8),
}


def quantiser_for(precision: Precision) -> Quantiser:
    """Return the quantiser of a precision."""
    return _QUANTISERS[precision]


__all__ = [
    "AffineChannelQuantiser",
    "AffineRowQuantiser",
    "Fp8E4M3Quantiser",
    "Int8Quantiser",
    "NativeQuantiser",
    "Quantiser",
    "quantiser_for",
]
