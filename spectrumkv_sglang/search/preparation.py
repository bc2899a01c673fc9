"""What a search needs before the weights are loaded; refuses what cannot be, before any work."""

from __future__ import annotations

import hashlib
import math
import os
from dataclasses import dataclass, field, fields
from pathlib import Path

from spectrumkv_sglang.evaluation.model import ModelFiles, read_model_files
from spectrumkv_sglang.evaluation.placement import AUTO, chosen_dtype, usable_device_type
from spectrumkv_sglang.evaluation.windows import TextWindow, cut_windows
from spectrumkv_sglang.launch_config import check_writable
from spectrumkv_sglang.probe.texts import load_judged_text
from spectrumkv_sglang.search.codec_speeds import CodecSpeeds, read_speeds
from spectrumkv_sglang.search.errors import TuneError
from spectrumkv_sglang.search.space import Space
from spectrumkv_sglang.verification.fingerprint import fingerprint_model

MOST_POINTS = 20_000
"""Every point's cost is looked at before each proposal."""


@dataclass(frozen=True, kw_only=True)
class TuneCommand:
    """The options of the command line, as they were given."""

    model_path: Path
    text: Path
    out: Path
    study: Path | None = None
    evaluations: int = 200
    patience: int = 40
    max_kl: float | None = None
    least_kl: float = 1e-5
    candidates: int = 8
    space: Space = field(default_factory=Space)
    texts: int = 4
    prefix_tokens: int = 1024
    continuation_tokens: int = 128
    chunk_tokens: int = 8192
    speeds: Path | None = None
    save_speeds: Path | None = None
    seed: int = 0
    device: str = "cpu"
    dtype: str = AUTO
    kv_dtype: str = AUTO
    threads: int | None = None

    @property
    def study_path(self) -> Path:
        """Where what was judged is kept."""
        return self.study if self.study is not None else self.out / "study.log"


@dataclass(frozen=True)
class Prepared:
    """What is known before the weights are loaded.

    Attributes:
        files: of the model.
        windows: to judge on.
        speeds: from a file; None: to be measured.
        dtype: that the model computes in.
        kv_dtype: of the pool.
        identity: what the results depend on, the speeds left out.
    """

    files: ModelFiles
    windows: list[TextWindow]
    speeds: CodecSpeeds | None
    dtype: str
    kv_dtype: str
    identity: dict[str, str]


def prepare(command: TuneCommand) -> Prepared:
    """Check the options and read what they name.

    Raises:
        SpectrumKVError: an option that cannot be.
    """
    _check_options(command)
    speeds = read_speeds(command.speeds) if command.speeds is not None else None
    device_type = usable_device_type(command.device)
    text = load_judged_text(command.text, required=True)
    files = read_model_files(command.model_path)
    layers = int(files.config.get_text_config().num_hidden_layers)
    command.space.check_layers(layers)
    kv_dtype = chosen_dtype(command.kv_dtype, "--kv-dtype", files.dtype)
    dtype = chosen_dtype(command.dtype, "--dtype", "float32" if device_type == "cpu" else files.dtype)
    windows = cut_windows(
        files.tokenizer,
        text,
        prefix_tokens=(command.prefix_tokens,),
        continuation_tokens=command.continuation_tokens,
        texts=command.texts,
        seed=command.seed,
        context_tokens=files.context_tokens,
    )
    _make_folders(command)
    fingerprint = fingerprint_model(command.model_path, quantization=None, dtype=kv_dtype)
    identity = {
        **{f"model {name}": str(value)[:23] for name, value in fingerprint.model_dump().items()},
        "text": hashlib.sha256(text.encode()).hexdigest()[:16],
        "windows": ",".join(window.name for window in windows),
        "--prefix-tokens": str(command.prefix_tokens),
        "--continuation-tokens": str(command.continuation_tokens),
        "--chunk-tokens": str(command.chunk_tokens),
        "--dtype": dtype,
        "--device": device_type,
        "--seed": str(command.seed),
        "--least-kl": f"{command.least_kl:g}",
        "--max-kl": "none" if command.max_kl is None else f"{command.max_kl:g}",
        **{
            f"--{axis.name.replace('_', '-')}": ",".join(map(str, getattr(command.space, axis.name)))
            for axis in fields(command.space)
        },
    }
    return Prepared(files, windows, speeds, dtype, kv_dtype, identity)


def _check_options(command: TuneCommand) -> None:
    if not (math.isfinite(command.least_kl) and 1e-9 <= command.least_kl <= 0.1):
        raise TuneError(f"--least-kl {command.least_kl:g}: expected nats a token from 1e-9 to 0.1")
    if command.max_kl is not None and not command.max_kl > command.least_kl:
        raise TuneError(f"--max-kl {command.max_kl:g}: expected more than --least-kl, {command.least_kl:g}")
    if command.space.size > MOST_POINTS:
        raise TuneError(
            f"the space has {command.space.size:,} points, a search looks at {MOST_POINTS:,} at most: give "
            "fewer choices"
        )
    if command.speeds is not None and command.save_speeds is not None:
        raise TuneError("--save-speeds writes what is measured, --speeds leaves nothing to measure: give one of them")
    if command.out.exists() and not command.out.is_dir():
        raise TuneError(f"--out {command.out}: a file, expected a folder")


def _make_folders(command: TuneCommand) -> None:
    try:
        (command.out / "profiles").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TuneError(f"--out {command.out}: {error.strerror or error}") from error
    taken = {os.path.realpath(command.text): "--text"}
    for option, path in (("--study", command.study_path), ("--save-speeds", command.save_speeds)):
        if path is None:
            continue
        if os.path.realpath(path) in taken:
            raise TuneError(f"{option} {path} is also the file of {taken[os.path.realpath(path)]}: give another name")
        taken[os.path.realpath(path)] = option
        if not path.exists():
            check_writable(path)
