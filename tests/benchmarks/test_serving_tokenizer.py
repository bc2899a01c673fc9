"""The tokenizer of servers with dummy weights: every token has a text of its own, so that the first one is seen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from serving_tokenizer import TokenizerError, serving_tokenizer, vocabulary_size, write_visible_tokenizer

VOCABULARY = 50


def model_folder(folder: Path, config: object) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def test_every_token_shows_and_is_read_back(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(write_visible_tokenizer(tmp_path / "tokenizer", VOCABULARY)))
    assert tokenizer.vocab_size == VOCABULARY
    texts = [tokenizer.decode([i], skip_special_tokens=True) for i in range(VOCABULARY)]
    assert all(texts)
    assert len(set(texts)) == VOCABULARY
    ids = list(range(VOCABULARY))
    assert tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False) == ids


def test_dummy_weights_get_one_made_for_them(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "model", {"vocab_size": VOCABULARY})
    chosen = serving_tokenizer(model, None, ["--load-format", "dummy"], tmp_path / "made")
    assert chosen == (tmp_path / "made").resolve()
    assert (chosen / "tokenizer.json").is_file()


def test_real_weights_keep_the_models_tokenizer(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "model", {"vocab_size": VOCABULARY})
    assert serving_tokenizer(model, None, [], tmp_path / "made") == model.resolve()
    assert not (tmp_path / "made").exists()


def test_the_one_asked_for_wins(tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    assert serving_tokenizer(tmp_path, asked, ["--load-format", "dummy"], tmp_path / "made") == asked.resolve()


@pytest.mark.parametrize("config", [{"vocab_size": VOCABULARY}, {"text_config": {"vocab_size": VOCABULARY}}])
def test_the_vocabulary_is_the_text_models(tmp_path: Path, config: object) -> None:
    assert vocabulary_size(model_folder(tmp_path / "model", config)) == VOCABULARY


def test_a_model_without_a_vocabulary_asks_for_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="--tokenizer"):
        vocabulary_size(model_folder(tmp_path / "model", {}))
