"""Fingerprint of the model that a server serves."""

from __future__ import annotations

from spectrumkv_sglang.sglang_compat import ServedModel
from spectrumkv_sglang.verification.fingerprint import FingerprintError, ModelFingerprint, fingerprint_model


def served_fingerprint(model: ServedModel, dtype: str) -> ModelFingerprint:
    """Fingerprint of ``model`` as it lies on this machine; ``dtype`` is that of the KV pool.

    Raises:
        FingerprintError: it is not on this machine, or cannot be read.
    """
    path = model.local_path()
    if path is None:
        raise FingerprintError(f"{model.path} is not on this machine, neither as a directory nor in the hub's cache")
    return fingerprint_model(path, quantization=model.quantization, dtype=dtype)
