"""Commands of the docs that need no server, no GPU and no minutes are run as they stand there."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from spectrumkv_sglang.cli import app

ROOT = Path(__file__).parents[1]
PAGES = [
    " ".join(page.read_text().replace("\\\n", " ").split())
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("**/*.md"))
]
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32, "torch_dtype": "bfloat16",
}  # fmt: skip
"""Llama-3.1-8B's, which `spectrumkv size` reads and nothing else."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder of the commands, with what they name."""
    model = tmp_path / "DIR"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    (tmp_path / "launch.yaml").write_text((ROOT / "examples" / "launch.yaml").read_text())
    (tmp_path / "requests.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,4096,16\n.5,8192,16\n1,8192,16\n")
    (tmp_path / "link.csv").write_text("from_s,gbps\n0,10\n1,2\n")
    quality = json.loads((ROOT / "docs" / "results" / "quality.json").read_text())
    (tmp_path / "RESULT.json").write_text(json.dumps({**quality, "evaluations": quality["evaluations"][-1:]}))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("spectrumkv profiles", ["near-lossless", "native-packed", "aggressive"]),
        (
            "spectrumkv size --model-path DIR --gbps 10 --prompt-tokens 8192",
            ["131,072", "8,192 tokens: yes: balanced (the default, after a probe) 0.53", "without a probe int8"],
        ),
        (
            "spectrumkv size --model-path DIR --gbps 10 --prompt-tokens 8192 --config launch.yaml "
            "--speeds docs/results/gpu.json --json size.json",
            ["gpu.json", "size.json:estimates"],
        ),
        ("spectrumkv simulate", ["controller", "native", "balanced@0.3"]),
        (
            "spectrumkv simulate --gbps 25 --per-second 2 --prefill-ranks 4 --kv-bytes 131072 --codec-gbs 40 "
            "--chunk-ms 17",
            ["controller", "25 Gb/s"],
        ),
        (
            "spectrumkv simulate --config launch.yaml --requests requests.csv --bandwidth link.csv --json result.json",
            ["controller", "result.json:results"],
        ),
        ("spectrumkv report RESULT.json --out report.html", ["report.html: 1 sections"]),
    ],
)
def test_what_the_docs_say_to_type_runs(folder: Path, line: str, expected: list[str]) -> None:
    """``expected`` is printed; ``FILE:KEY`` is in a JSON file that the command writes."""
    assert any(line in page for page in PAGES), "no page says this any more"
    done = CliRunner().invoke(app, shlex.split(line)[1:], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    for text in expected:
        file, _, key = text.partition(":")
        if file.endswith(".json") and key:
            assert json.loads((folder / file).read_text())[key]
        else:
            assert text in done.output
