"""What goes wrong before the weights are loaded ends at once, names what to do and changes no file."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from spectrumkv_sglang.cli import app
from spectrumkv_sglang.errors import SpectrumKVError
from spectrumkv_sglang.launch.model import fetch_model

OLD = "an earlier result"
MODEL = fetch_model(Path(__file__).parents[2] / "build" / "models")


def failure(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["eval", *map(str, arguments)])
    assert result.exit_code != 0, result.output
    assert isinstance(result.exception, (SpectrumKVError, SystemExit))
    return f"{result.output}{result.exception}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--profile", "int9"), "unknown profile 'int9'"),
        (("--profile", "balanced@0.1"), "(from --profile balanced@0.1, --seed)"),
        ((), "nothing to evaluate"),
        (("--profile", "int8", "--model-path", "{folder}/none"), "no such directory"),
        (("--profile", "int8", "--model-path", "{folder}"), "no config.json"),
        (("--profile", "int8", "--text", "{folder}/none.txt"), "none.txt"),
        (("--profile", "int8", "--text", "{folder}/short.txt"), "expected at least 2,000"),
        (("--profile", "int8", "--texts", "50"), "give a longer --text"),
        (("--profile", "int8", "--prefix-tokens", "8000", "--continuation-tokens", "300"), "context has 8192"),
        (("--profile", "int8", "--prefix-tokens", "many"), "512,1792,4096"),
        (("--profile", "int8", "--prefix-tokens", "0"), "at least 1"),
        (("--profile", "int8", "--prefix-tokens", "128", "--needles"), "has no room for a needle"),
        (("--profile", "int8", "--device", "cuda:99"), "--device cuda:99"),
        (("--profile", "int8", "--dtype", "int3"), "expected auto, float32"),
        (("--profile", "int8", "--scorer", "best"), "unknown; choose from window"),
        (("--profile", "int8", "--plot", "{folder}/p.gif"), ".png"),
        (("--profile", "int8", "--markdown", "{folder}/none/r.md"), "none"),
        (("--profile", "int8", "--markdown", "{folder}/out.json"), "would replace the file of --json"),
        (("--profile", "int8", "--text", "{folder}/t.md", "--markdown", "{folder}/t.md"), "file of --text"),
        (("--profile", "{folder}/p.yaml@0.4", "--markdown", "{folder}/p.yaml"), "file of --profile"),
    ],
)
def test_it_is_said_and_nothing_is_written(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    out = tmp_path / "out.json"
    out.write_text(OLD)
    (tmp_path / "short.txt").write_text("Too short.")
    files = set(tmp_path.iterdir())
    filled = [part.format(folder=tmp_path) for part in arguments]
    assert message in failure("--model-path", MODEL, "--json", out, *filled)
    assert out.read_text() == OLD
    assert set(tmp_path.iterdir()) == files


def test_an_unreadable_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer.json").write_text("{")
    assert "cannot be read" in failure("--model-path", tmp_path, "--profile", "int8")
