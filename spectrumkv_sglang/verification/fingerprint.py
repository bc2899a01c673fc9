"""Fingerprint of a model: what was probed is what is served.

It notices another tensor name, shape, dtype or order (each safetensors header is hashed whole), a weight file that was
renamed, added, removed or changed its size, another config or tokenizer, another quantisation or KV dtype, and any
byte that lies in a sampled place. Files up to ``SAMPLES`` x ``SAMPLE_BYTES`` (64 MiB) in all are read whole.

It does not notice a change that keeps every size and touches only bytes between the samples (a few weights patched in
place; fine-tuning changes nearly all of them), what is loaded besides (LoRA adapters, a tokenizer from elsewhere,
Python code of the repository), or another SGLang, attention backend or GPU. It guards against mistakes, not forgers.

Paths, times and owners of files do not matter: a copy has the same fingerprint.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from spectrumkv_sglang.errors import SpectrumKVError

SAMPLE_BYTES = 64 * 1024
SAMPLES = 1024
"""Samples of all weight files together, as far as each gets its ``LEAST_SAMPLES``."""
LEAST_SAMPLES = 8

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_TOKENIZER_FILES = (
    "added_tokens.json", "chat_template.jinja", "chat_template.json", "merges.txt", "special_tokens_map.json",
    "spiece.model", "tekken.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json",
    "vocab.txt",
)  # fmt: skip
_TOKENIZER_ENDINGS = (".tiktoken",)
_CONFIG_FILES = ("config.json", "hf_quant_config.json", "params.json")
# What saving a model again changes without changing the model.
_NOT_CONFIG = ("_name_or_path", "transformers_version")
_NONE = "none"
_SHOWN_DIGITS = 12


class FingerprintError(SpectrumKVError):
    """A model cannot be fingerprinted: its directory or its weights are missing or unreadable."""


class ModelFingerprint(BaseModel):
    """What identifies a model to the probe; equal fingerprints: the same model as far as this module can tell.

    Attributes:
        weights: ``sha256:<hex>`` over names, sizes, headers and samples of the weight files.
        config: the same over ``config.json`` (also ``params.json`` and ``hf_quant_config.json``), independent of key
            order; "none" without one.
        tokenizer: the same over the tokenizer's files; "none" without one.
        quantization: method that the checkpoint states, else the one that SGLang applies when it loads, or "none".
        dtype: of the KV pool, such as "bfloat16".
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    weights: str
    config: str
    tokenizer: str
    quantization: str
    dtype: str

    def differences(self, other: ModelFingerprint) -> list[str]:
        """What ``other``, the served model, has different from this one, the probed; one readable text a field."""
        return [
            f"{name}: probed {_shortened(probed)}, served {_shortened(served)}"
            for name in type(self).model_fields
            if (probed := getattr(self, name)) != (served := getattr(other, name))
        ]


def fingerprint_model(directory: Path, *, quantization: str | None, dtype: str) -> ModelFingerprint:
    """Fingerprint of the model in ``directory`` (or of one weight file, such as a .gguf).

    Args:
        quantization: SGLang's ``--quantization``; counts where the checkpoint states none, since SGLang itself
            replaces the flag by the checkpoint's own method or a kernel's name for it.
        dtype: of the KV pool, such as "bfloat16".

    Raises:
        FingerprintError: no such directory, no weights in it, or files that cannot be read.
    """
    files = {path.name: path for path in _files(directory)}
    weights = [path for name, path in sorted(files.items()) if name.endswith(_WEIGHTS)]
    if not weights:
        raise FingerprintError(
            f"no weights in {directory}: expected files that end in {', '.join(_WEIGHTS)}; give the directory of a "
            "downloaded model"
        )
    tokenizer = [
        path for name, path in sorted(files.items()) if name in _TOKENIZER_FILES or name.endswith(_TOKENIZER_ENDINGS)
    ]
    try:
        configs = {name: _read_config(files[name]) for name in _CONFIG_FILES if name in files}
        return ModelFingerprint(
            weights=_digest(_weight_parts(weights)),
            config=_digest([json.dumps(configs, sort_keys=True).encode()]) if configs else _NONE,
            tokenizer=_digest(_whole_parts(tokenizer)) if tokenizer else _NONE,
            quantization=(_stated_quantization(configs, weights) or quantization or _NONE).lower(),
            dtype=dtype,
        )
    except OSError as error:
        raise FingerprintError(f"cannot read the model in {directory}: {error}") from error


def _files(directory: Path) -> list[Path]:
    if directory.is_file():
        return [directory]
    try:
        return [path for path in directory.iterdir() if path.is_file()]
    except OSError as error:
        raise FingerprintError(f"no model directory {directory}: {error.strerror}") from error


def _weight_parts(files: list[Path]) -> Iterator[bytes]:
    samples = max(LEAST_SAMPLES, SAMPLES // len(files))
    for path in files:
        size = path.stat().st_size
        yield f"{path.name}\0{size}\0".encode()
        with path.open("rb", buffering=0) as file:
            begin = 0
            if path.suffix == ".safetensors":
                header = _safetensors_header(file.fileno(), path, size)
                begin = len(header)
                yield header
            for offset in _sampled_offsets(begin, size, samples):
                yield os.pread(file.fileno(), SAMPLE_BYTES, offset)


def _safetensors_header(descriptor: int, path: Path, size: int) -> bytes:
    """Length field and JSON of a safetensors header, which names every tensor with its shape, dtype and place."""
    length_field = os.pread(descriptor, 8, 0)
    length = struct.unpack("<Q", length_field)[0] if len(length_field) == 8 else size
    if 8 + length > size:
        raise FingerprintError(f"{path} is no safetensors file: its header does not fit its {size} bytes")
    return length_field + os.pread(descriptor, length, 8)


def _sampled_offsets(begin: int, size: int, samples: int) -> Iterable[int]:
    """Where samples of bytes ``begin`` to ``size`` start: everything if they suffice, else evenly, both ends among
    them."""
    if size - begin <= samples * SAMPLE_BYTES:
        return range(begin, size, SAMPLE_BYTES)
    last = size - SAMPLE_BYTES
    return [begin + (last - begin) * index // (samples - 1) for index in range(samples)]


def _whole_parts(files: list[Path]) -> Iterator[bytes]:
    for path in files:
        content = path.read_bytes()
        yield f"{path.name}\0{len(content)}\0".encode()
        yield content


def _read_config(path: Path) -> Any:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise FingerprintError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise FingerprintError(f"{path}: expected a JSON object, got {type(config).__name__}")
    return {key: value for key, value in config.items() if key not in _NOT_CONFIG}


def _stated_quantization(configs: dict[str, Any], weights: list[Path]) -> str | None:
    section = configs.get("config.json", {}).get("quantization_config")
    method = section.get("quant_method") if isinstance(section, dict) else None
    if method:
        return str(method)
    if "hf_quant_config.json" in configs:
        return "modelopt"
    return "gguf" if all(path.suffix == ".gguf" for path in weights) else None


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return f"sha256:{digest.hexdigest()}"


def _shortened(value: str) -> str:
    kind, separator, digits = value.partition(":")
    return f"{kind}:{digits[:_SHOWN_DIGITS]}…" if separator and len(digits) > _SHOWN_DIGITS else value
