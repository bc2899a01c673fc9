"""What goes wrong before a server starts ends at once, names what to do and changes no file."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from spectrumkv_sglang.cli import app
from spectrumkv_sglang.errors import SpectrumKVError

OLD = "format: 1\n# an earlier probe's\n"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Enough of a model for what is checked before SGLang starts; its tokenizer is broken."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text('{"model_type": "llama"}')
    (directory / "tokenizer.json").write_text("{")
    return directory


def _failure(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["probe", *map(str, arguments)])
    assert result.exit_code not in (0, 10, 11), result.output
    # The console script turns our errors into messages; typer's own are printed already.
    assert result.exception is None or isinstance(result.exception, (SpectrumKVError, SystemExit))
    return f"{result.output}{result.exception}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model-path", "{model}/nothing/here"), "no model directory"),
        (("--model-path", "{folder}"), "no config.json"),
        (("--model-path", "{model}"), "tokenizer"),
        (("--model-path", "{model}", "--profile", "int9"), "unknown profile 'int9'"),
        (("--model-path", "{model}", "--budget", "0.1"), "0.1"),
        (("--model-path", "{model}", "--config", "{folder}/none.yaml"), "cannot read"),
        (("--model-path", "{model}", "--config", "{folder}/corrupt.yaml"), "not valid YAML"),
        (("--model-path", "{model}", "--config", "{folder}/tiers.yaml"), "lowest"),
        (("--model-path", "{model}", "--plot", "{folder}/p.gif"), ".png"),
        (("--model-path", "{model}", "--depths", "high"), "0.1,0.5,0.9"),
        (("--model-path", "{model}", "--trials", "0"), "trials"),
        (("--model-path", "{model}", "--backend", "nixl"), "spectrumkv_tcp"),
        (("--model-path", "{model}", "--haystack", "{folder}/none.txt"), "none.txt"),
        (("--model-path", "{model}", "--disaggregation-mode", "prefill"), "disaggregation-mode"),
        (("--model-path", "{model}", "stray"), "stray"),
        ((), "--model-path"),
        (("--compare", "{folder}/corrupt.yaml", "{folder}/tiers.yaml"), "no probe result"),
    ],
)
def test_it_is_said_and_nothing_is_written(
    tmp_path: Path, model: Path, arguments: tuple[str, ...], message: str
) -> None:
    out = tmp_path / "launch.yaml"
    out.write_text(OLD)
    (tmp_path / "corrupt.yaml").write_text("a: [")
    (tmp_path / "tiers.yaml").write_text("allowed_tiers: [high, lowest]")
    filled = [part.format(model=model, folder=tmp_path) for part in arguments]
    assert message in _failure("--out", out, "--json", tmp_path / "r.json", *filled)
    assert out.read_text() == OLD
    assert not (tmp_path / "r.json").exists()


def test_outputs_that_cannot_be_written_are_found_first(tmp_path: Path, model: Path) -> None:
    missing = tmp_path / "missing" / "launch.yaml"
    assert "missing" in _failure("--model-path", model, "--out", missing)
    assert str(tmp_path) in _failure("--model-path", model, "--out", tmp_path)
    assert "missing" in _failure("--model-path", model, "--out", tmp_path / "l.yaml", "--json", missing)
    assert not (tmp_path / "l.yaml").exists()
