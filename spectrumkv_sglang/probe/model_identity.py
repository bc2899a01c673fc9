"""Which model a probe judges: the same one from before it is loaded to the end."""

from __future__ import annotations

from spectrumkv_sglang.loopback.plan import ServerRecord
from spectrumkv_sglang.probe.errors import ProbeError
from spectrumkv_sglang.probe.options import ProbeOptions
from spectrumkv_sglang.sglang_compat import ServedModel
from spectrumkv_sglang.verification.fingerprint import ModelFingerprint
from spectrumkv_sglang.verification.served import served_fingerprint


def loaded_fingerprint(server: ServerRecord) -> ModelFingerprint:
    """Fingerprint that the server took of the model it has loaded. Raises ProbeError where it could not."""
    if server.fingerprint is None:
        raise ProbeError(f"the model cannot be told from others: {server.fingerprint_error}")
    return ModelFingerprint(**server.fingerprint)


def fingerprint_on_disk(options: ProbeOptions) -> ModelFingerprint | None:
    """Of the model before it is loaded; None where it is not on this machine yet."""
    revision, folder = options.flags.get("revision"), options.flags.get("download-dir")
    model = ServedModel(
        path=options.model,
        quantization=None,
        revision=str(revision) if revision else None,
        download_dir=str(folder) if folder else None,
    )
    return served_fingerprint(model, "") if model.local_path() is not None else None


def require_unchanged(before: ModelFingerprint | None, loaded: ModelFingerprint) -> None:
    """Refuse a model whose files were replaced while it was loaded: nobody could say which one was probed."""
    if before is None:
        return
    same_settings = before.model_copy(update={"quantization": loaded.quantization, "dtype": loaded.dtype})
    if changed := same_settings.differences(loaded):
        fields = ", ".join(text.partition(":")[0] for text in changed)
        raise ProbeError(
            f"the model's files changed while it was loaded ({fields}): probe again once they are complete"
        )
