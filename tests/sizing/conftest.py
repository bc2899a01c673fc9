"""Model configs as they lie on disk, and the size command."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from spectrumkv_sglang.cli import app

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def model_of(tmp_path: Path) -> Callable[..., Path]:
    """Write a config.json: Llama-3.1-8B's with changes, or one of its own."""

    def write(changes: dict[str, Any] | None = None, base: dict[str, Any] = LLAMA_8B) -> Path:
        (tmp_path / "config.json").write_text(json.dumps({**base, **(changes or {})}))
        return tmp_path

    return write


@pytest.fixture
def size() -> Callable[..., Result]:
    """Run `spectrumkv size` with these arguments."""

    def run(*arguments: object) -> Result:
        return CliRunner().invoke(app, ["size", *map(str, arguments)], env={"COLUMNS": "160"})

    return run
