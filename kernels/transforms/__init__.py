"""One transform a file; adding one is a file here, a wire value in `Transform` and a line in the registry."""

from __future__ import annotations

from spectrumkv_sglang.kernels.transforms.base import Angles, HeadTransform, Transform
from spectrumkv_sglang.kernels.transforms.derope import DeropeTransform
from spectrumkv_sglang.kernels.transforms.hadamard import HadamardTransform
from spectrumkv_sglang.kernels.transforms.identity import IdentityTransform

_TRANSFORMS: dict[Transform, HeadTransform] = {
    Transform.IDENTITY: IdentityTransform(),
    Transform.HADAMARD: HadamardTransform(),
    Transform.DEROPE: DeropeTransform(),
}


def transform_for(transform: Transform) -> HeadTransform:
    """Return what a wire value stands for."""
    return _TRANSFORMS[transform]


__all__ = [
    "Angles",
    "DeropeTransform",
    "HadamardTransform",
    "HeadTransform",
    "IdentityTransform",
    "Transform",
    "transform_for",
]
