"""What a calibration needs before the weights are loaded; refuses what cannot be, before any work."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from spectrumkv_sglang.calibration.candidates import Candidates, choose
from spectrumkv_sglang.calibration.errors import CalibrationError
from spectrumkv_sglang.calibration.head_cost import HeadCost
from spectrumkv_sglang.calibration.sensitivity import MeasuredOn, Sensitivity, load_sensitivity
from spectrumkv_sglang.evaluation.model import ModelFiles, read_model_files
from spectrumkv_sglang.evaluation.placement import AUTO, chosen_dtype, usable_device_type
from spectrumkv_sglang.evaluation.windows import TextWindow, cut_windows
from spectrumkv_sglang.launch_config import check_writable
from spectrumkv_sglang.probe.texts import load_judged_text
from spectrumkv_sglang.verification.fingerprint import fingerprint_model


@dataclass(frozen=True, kw_only=True)
class CalibrationCommand:
    """The options of the command line, as they were given."""

    model_path: Path
    budget: float
    out: Path
    text: Path
    sensitivity: Path | None = None
    heads: HeadCost | None = None
    keys: Sequence[str] | None = None
    values: Sequence[str] | None = None
    key_transform: str = "identity"
    value_transform: str = "hadamard"
    texts: int = 2
    held_out_texts: int = 4
    prefix_tokens: int = 1792
    continuation_tokens: int = 320
    chunk_tokens: int = 8192
    seed: int = 0
    device: str = "cpu"
    dtype: str = AUTO
    kv_dtype: str = AUTO
    threads: int | None = None
    json: Path | None = None


@dataclass(frozen=True)
class Prepared:
    """What is known before the weights are loaded.

    Attributes:
        files: of the model.
        candidates: precisions to choose from.
        known: a measurement to reuse, of this model and these candidates; None: to be made.
        text_sha256: of the text.
        measured: windows to measure on; none if ``known``.
        held_out: windows to check on, none of them measured on.
        dtype: that the model computes in.
        kv_dtype: of the pool.
    """

    files: ModelFiles
    candidates: Candidates
    known: Sensitivity | None
    text_sha256: str
    measured: list[TextWindow]
    held_out: list[TextWindow]
    dtype: str
    kv_dtype: str


def prepare(command: CalibrationCommand) -> Prepared:
    """Check the options, and read and choose what they name.

    Raises:
        SpectrumKVError: an option that cannot be; nothing was written.
    """
    _check_outputs(command)
    if not 0 < command.budget <= 1:
        raise CalibrationError(f"--budget {command.budget:g}: expected wire / native bytes, such as 0.27")
    candidates = choose(command.keys, command.values, command.key_transform, command.value_transform)
    device_type = usable_device_type(command.device)
    text = load_judged_text(command.text, required=True)
    files = read_model_files(command.model_path)
    kv_dtype = chosen_dtype(command.kv_dtype, "--kv-dtype", files.dtype)
    digest = hashlib.sha256(text.encode()).hexdigest()
    known = None
    if command.sensitivity is not None and command.sensitivity.exists():
        known = load_sensitivity(command.sensitivity)
        source = f"--sensitivity {command.sensitivity}"
        known.require_model(fingerprint_model(command.model_path, quantization=None, dtype=kv_dtype), source)
        known.require_candidates(candidates, command.heads if known.geometry.kv_heads > 1 else None, source)
    measured, held_out = _windows(command, files, text, None if known is None else known.measured_on, digest)
    return Prepared(
        files=files,
        candidates=candidates,
        known=known,
        text_sha256=digest,
        measured=measured,
        held_out=held_out,
        dtype=chosen_dtype(command.dtype, "--dtype", "float32" if device_type == "cpu" else files.dtype),
        kv_dtype=kv_dtype,
    )


def _windows(
    command: CalibrationCommand, files: ModelFiles, text: str, known: MeasuredOn | None, digest: str
) -> tuple[list[TextWindow], list[TextWindow]]:
    """Windows to measure on (none where that is done) and others to check on."""
    same_text = known is not None and known.text_sha256 == digest
    if known is not None and same_text:
        lengths = (known.prefix_tokens, known.continuation_tokens)
        if lengths != (command.prefix_tokens, command.continuation_tokens):
            raise CalibrationError(
                f"--sensitivity {command.sensitivity} was measured on this text with --prefix-tokens {lengths[0]} "
                f"--continuation-tokens {lengths[1]}: give the same, or another text, so that the check has windows "
                "of its own"
            )

    def cut(texts: int) -> list[TextWindow]:
        return cut_windows(
            files.tokenizer,
            text,
            prefix_tokens=(command.prefix_tokens,),
            continuation_tokens=command.continuation_tokens,
            texts=texts,
            seed=known.seed if known is not None and same_text else command.seed,
            context_tokens=files.context_tokens,
        )

    if known is not None and not same_text:
        return [], cut(command.held_out_texts) if command.held_out_texts else []
    count = len(known.windows) if known is not None else command.texts
    measured = cut(count)
    seen = {window.name for window in measured}
    held_out = [window for window in cut(count + command.held_out_texts) if window.name not in seen]
    return [] if known is not None else measured, held_out


def _check_outputs(command: CalibrationCommand) -> None:
    if command.out.suffix not in (".yaml", ".yml"):
        raise CalibrationError(f"--out {command.out}: a profile is given by path if it ends in .yaml; name it so")
    taken = {os.path.realpath(command.text): "--text"}
    for option, path in (("--sensitivity", command.sensitivity), ("--out", command.out), ("--json", command.json)):
        if path is None:
            continue
        target = os.path.realpath(path)
        if target in taken:
            raise CalibrationError(f"{option} {path} is also the file of {taken[target]}: give it another name")
        taken[target] = option
        if option != "--sensitivity" or not path.exists():
            check_writable(path)
