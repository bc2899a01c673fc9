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
        (("--model-path", "{model}/nothing/here", "--calibrate", "{folder}/t.txt"), "needs a local model directory"),
        (("--model-path", "{model}", "--calibrate", "{folder}/none.txt"), "nothing was probed"),
        (("--model-path", "{model}", "--calibrate", "{folder}/t.txt", "--profile", "int8"), "leave --profile out"),
        (("--model-path", "{folder}"), "no config.json"),
        (("--model-path", "{model}"), "tokenizer"),
        (("--model-path", "{model}", "--profile", "int9"), "unknown profile 'int9'"),
        (("--model-path", "{model}", "--budget", "0.1"), "(from --budget)"),
        (("--model-path", "{model}", "--config", "{folder}/none.yaml"), "cannot read"),
        (("--model-path", "{model}", "--config", "{folder}/corrupt.yaml"), "not valid YAML"),
        (("--model-path", "{model}", "--config", "{folder}/tiers.yaml"), "lowest"),
        (("--model-path", "{model}", "--max-kl", "nan"), "--max-kl = 'nan'"),
        (("--model-path", "{model}", "--min-top1", "90"), "at most 1"),
        (("--model-path", "{model}", "--plot", "{folder}/p.gif"), ".png"),
        (("--model-path", "{model}", "--depths", "high"), "0.1,0.5,0.9"),
        (("--model-path", "{model}", "--depths", "0.5,1.5"), "depth 1.5"),
        (("--model-path", "{model}", "--depths", "nan"), "depth nan"),
        (("--model-path", "{model}", "--length", "300"), "at least 512"),
        (("--model-path", "{model}", "--max-kl", "nan"), "nan"),
        (("--model-path", "{model}", "--trials", "0"), "trials"),
        (("--model-path", "{model}", "--", "--model-path", "/models/other"), "named once"),
        (("--model-path", "{model}", "--speculative-algo", "EAGLE"), "draft"),
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


@pytest.mark.parametrize(
    ("arguments", "replaced"),
    [
        (("--json", "{folder}/launch.yaml"), "--out"),
        (("--json", "{folder}/link.yaml"), "--out"),
        (("--json", "{folder}/p.png", "--plot", "{folder}/./p.png"), "--json"),
        (("--json", "{folder}/launch.yaml.log"), "the log"),
        (("--haystack", "{folder}/launch.yaml"), "--haystack"),
        (("--text", "{folder}/t.txt", "--json", "{folder}/t.txt"), "--text"),
        (("--profile", "{folder}/launch.yaml"), "--profile"),
        (("--config", "{folder}/c.yaml", "--json", "{folder}/c.yaml"), "--config"),
    ],
)
def test_a_file_that_would_replace_another_of_this_run_is_refused(
    tmp_path: Path, model: Path, arguments: tuple[str, ...], replaced: str
) -> None:
    (tmp_path / "launch.yaml").write_text(OLD)
    (tmp_path / "c.yaml").write_text("budget: .5\n")
    (tmp_path / "link.yaml").symlink_to("launch.yaml")
    filled = [part.format(folder=tmp_path) for part in arguments]
    failure = _failure("--model-path", model, "--out", tmp_path / "launch.yaml", *filled)
    assert f"would replace the file of {replaced}" in failure
    assert (tmp_path / "launch.yaml").read_text() == OLD


def test_an_earlier_launch_config_may_be_judged_again_in_place(tmp_path: Path, model: Path) -> None:
    out = tmp_path / "launch.yaml"
    out.write_text("spectrumkv: {budget: 0.5}\n")
    assert "tokenizer" in _failure("--model-path", model, "--config", out, "--out", out)
