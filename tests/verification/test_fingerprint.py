"""A model's fingerprint notices what changes its answers, and not where it lies or when it was copied."""

from __future__ import annotations

import json
import os
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from spectrumkv_sglang.verification import fingerprint as module
from spectrumkv_sglang.verification.fingerprint import (
    SAMPLE_BYTES,
    FingerprintError,
    ModelFingerprint,
    fingerprint_model,
)

Header = dict[str, dict[str, object]]
HEADER: Header = {
    "model.embed.weight": {"dtype": "BF16", "shape": [4, 1000], "data_offsets": [0, 8000]},
    "model.layers.0.weight": {"dtype": "F32", "shape": [500, 250], "data_offsets": [8000, 508000]},
}
DATA = bytes(range(256)) * 1985


def write_safetensors(path: Path, header: Header, data: bytes) -> None:
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    for shard in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"):
        write_safetensors(directory / shard, HEADER, DATA)
    (directory / "config.json").write_text('{"hidden_size": 64, "model_type": "llama"}')
    (directory / "tokenizer.json").write_text('{"model": {}}')
    (directory / "tokenizer_config.json").write_text("{}")
    (directory / "README.md").write_text("a model")
    return directory


def fingerprint(directory: Path, quantization: str | None = None) -> ModelFingerprint:
    return fingerprint_model(directory, quantization=quantization, dtype="bfloat16")


def changed(before: ModelFingerprint, directory: Path) -> list[str]:
    return [difference.partition(":")[0] for difference in before.differences(fingerprint(directory))]


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def with_tensor(**changes: object) -> Header:
    return {**HEADER, "model.layers.0.weight": {**HEADER["model.layers.0.weight"], **changes}}


FIRST = "model-00001-of-00002.safetensors"
CHANGES: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "a byte of the weights": (lambda d: flip(d / FIRST, 300_000), ["weights"]),
    "the last byte": (lambda d: flip(d / FIRST, -1), ["weights"]),
    "another dtype": (lambda d: write_safetensors(d / FIRST, with_tensor(dtype="I32"), DATA), ["weights"]),
    "another shape": (lambda d: write_safetensors(d / FIRST, with_tensor(shape=[250, 500]), DATA), ["weights"]),
    "another tensor name": (
        lambda d: write_safetensors(
            d / FIRST, {name.replace("embed", "emBed"): entry for name, entry in HEADER.items()}, DATA
        ),
        ["weights"],
    ),
    "another size": (lambda d: write_safetensors(d / FIRST, HEADER, DATA + b"\0"), ["weights"]),
    "a renamed file": (lambda d: (d / FIRST).rename(d / "model.safetensors"), ["weights"]),
    "an added file": (lambda d: shutil.copy(d / FIRST, d / "model-00003.safetensors"), ["weights"]),
    "an added file of another format": (lambda d: (d / "pytorch_model.bin").write_bytes(b"x"), ["weights"]),
    "a removed file": (lambda d: (d / FIRST).unlink(), ["weights"]),
    "swapped shards": (
        lambda d: (flip(d / FIRST, -1), (d / FIRST).rename(d / "x"), [p.rename(d / FIRST) for p in d.glob("*2.saf*")]),
        ["weights"],
    ),
    "the config": (lambda d: (d / "config.json").write_text('{"hidden_size": 65}'), ["config"]),
    "no config": (lambda d: (d / "config.json").unlink(), ["config"]),
    "the tokenizer": (lambda d: (d / "tokenizer.json").write_text('{"model": []}'), ["tokenizer"]),
    "a chat template": (lambda d: (d / "chat_template.jinja").write_text("{{ messages }}"), ["tokenizer"]),
    "quantised weights": (
        lambda d: (d / "config.json").write_text('{"quantization_config": {"quant_method": "awq"}}'),
        ["config", "quantization"],
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_noticed_and_named(model: Path, change: str) -> None:
    before = fingerprint(model)
    make, fields = CHANGES[change]
    make(model)
    assert changed(before, model) == fields


UNCHANGED: dict[str, Callable[[Path], object]] = {
    "file times": lambda d: [os.utime(path, (1, 1)) for path in d.iterdir()],
    "other files": lambda d: ((d / "README.md").write_text("else"), (d / "original").mkdir()),
    "the config's key order and layout": lambda d: (d / "config.json").write_text(
        '{\n  "model_type": "llama",\n  "hidden_size": 64}'
    ),
    "who saved the config": lambda d: (d / "config.json").write_text(
        '{"hidden_size": 64, "model_type": "llama", "_name_or_path": "elsewhere/x", "transformers_version": "5"}'
    ),
}


@pytest.mark.parametrize("change", UNCHANGED)
def test_what_does_not_change_the_model_is_not_noticed(model: Path, change: str) -> None:
    before = fingerprint(model)
    UNCHANGED[change](model)
    assert fingerprint(model) == before


def test_a_copy_and_links_as_in_the_hubs_cache_are_the_same_model(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "copy")
    linked = tmp_path / "linked"
    linked.mkdir()
    for path in model.iterdir():
        (linked / path.name).symlink_to(path)
    assert fingerprint(tmp_path / "copy") == fingerprint(linked) == fingerprint(model)


def test_large_files_are_sampled_at_both_ends_and_evenly(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SAMPLES", 16)  # 8 a file
    size = 4 << 20
    write_safetensors(model / FIRST, HEADER, bytes(size))
    header = (model / FIRST).stat().st_size - size
    before = fingerprint(model)
    noticed = []
    step = SAMPLE_BYTES // 2
    for offset in [header, *range(header + step // 2, header + size, step), header + size - 1]:
        flip(model / FIRST, offset)
        noticed.append(bool(changed(before, model)))
        flip(model / FIRST, offset)
    assert noticed[0]
    assert noticed[-1]
    found = sum(noticed[1:-1])
    assert 2 * 8 <= found + 2 <= 2 * 8 + 4  # each sample holds two of the evenly spread bytes
    longest_gap = max(len(run) for run in "".join("x" if hit else "." for hit in noticed).split("x"))
    assert longest_gap <= len(noticed) // 7


def test_a_large_model_takes_little_time(model: Path) -> None:
    with (model / FIRST).open("r+b") as file:
        file.truncate(20 << 30)  # a hole: time goes into the samples alone
    started = time.perf_counter()
    fingerprint(model)
    assert time.perf_counter() - started < 2


@pytest.mark.parametrize(
    ("stated", "flag", "quantization"),
    [
        ({}, None, "none"),
        ({}, "FP8", "fp8"),
        ({"quantization_config": {"quant_method": "gptq"}}, None, "gptq"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq_marlin", "gptq"),
    ],
)
def test_the_checkpoints_own_quantisation_counts_before_the_flag(
    model: Path, stated: dict[str, object], flag: str | None, quantization: str
) -> None:
    (model / "config.json").write_text(json.dumps(stated))
    assert fingerprint(model, flag).quantization == quantization


def test_a_single_gguf_file(model: Path) -> None:
    path = model / "model-q4.gguf"
    path.write_bytes(b"GGUF" + DATA)
    found = fingerprint(path)
    assert (found.config, found.tokenizer, found.quantization) == ("none", "none", "gguf")
    flip(path, 1000)
    assert changed(found, path) == ["weights"]


def test_differences_read_well() -> None:
    probed = ModelFingerprint(weights="sha256:" + "ab" * 32, config="c", tokenizer="t", quantization="none", dtype="f")
    served = probed.model_copy(update={"weights": "sha256:" + "cd" * 32, "dtype": "g"})
    assert probed.differences(served) == [
        "weights: probed sha256:abababababab…, served sha256:cdcdcdcdcdcd…",
        "dtype: probed f, served g",
    ]
    assert probed.differences(probed) == []


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (shutil.rmtree, "no model directory"),
        (lambda d: [path.unlink() for path in d.glob("*.safetensors")], "no weights in"),
        (lambda d: (d / FIRST).write_bytes(b"<html>not found</html>"), "no safetensors file"),
        (lambda d: (d / FIRST).write_bytes(b""), "no safetensors file"),
        (lambda d: (d / "config.json").write_text("{"), "not valid JSON"),
        (lambda d: (d / "config.json").write_text("[]"), "expected a JSON object"),
    ],
)
def test_what_is_no_model_is_refused(model: Path, spoil: Callable[[Path], object], message: str) -> None:
    spoil(model)
    with pytest.raises(FingerprintError, match=message) as caught:
        fingerprint(model)
    assert str(model) in str(caught.value)
