"""Tokenizers of the probe's tests: a chat model's and a base model's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spectrumkv_sglang.launch.model import fetch_model

BUILD_DIR = Path(__file__).parents[2] / "build"


@pytest.fixture(scope="session")
def chat_tokenizer() -> Any:
    """The demo model's: digits are single tokens, with a chat template."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(fetch_model(BUILD_DIR / "models"))


@pytest.fixture(scope="session")
def base_tokenizer() -> Any:
    """A base model's: one token a byte, no chat template, a token in front of every text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate(["<bos>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>")
