"""The command on a small real model and real text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from spectrumkv_sglang.cli import app
from spectrumkv_sglang.launch.model import fetch_model

MODEL = fetch_model(Path(__file__).parents[2] / "build" / "models")


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eval")
    arguments = ["eval", "--model-path", str(MODEL), "--prefix-tokens", "128", "--continuation-tokens", "32"]
    arguments += ["--texts", "1", "--generate", "2", "--threads", "1"]
    for profile in ("native-packed", "int8", "spectrum@0.7", "spectrum@0.7:random"):
        arguments += ["--profile", profile]
    for baseline in ("int4", "kivi-2-w32", "kvquant-4", "pdtrim"):
        arguments += ["--baseline", baseline]
    for option, name in (("--json", "r.json"), ("--markdown", "r.md"), ("--plot", "r.png")):
        arguments += [option, str(folder / name)]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return folder


@pytest.fixture(scope="module")
def results(outputs: Path) -> Any:
    return json.loads((outputs / "r.json").read_text())["results"]


def test_every_method_has_a_row_with_the_promised_fields(results: Any) -> None:
    assert list(results) == [
        *("native", "native-packed", "int8", "spectrum@0.7", "spectrum@0.7:random"),
        *("int4", "kivi-2-w32", "kvquant-4", "pdtrim@0.7"),
    ]
    for row in results.values():
        assert {"wire_ratio", "ppl", "dppl_pct", "kl", "top1", "texts"} <= set(row)
        assert len(row["texts"]) == 1


@pytest.mark.parametrize("label", ["native", "native-packed"])
def test_what_loses_nothing_scores_exactly_so(results: Any, label: str) -> None:
    row = results[label]
    assert (row["dppl_pct"], row["kl"], row["top1"]) == (0.0, 0.0, 1.0)
    assert 5 < row["ppl"] < 100
    assert row["generation"]["agreement"] == 1.0


def test_fewer_bits_lose_more(results: Any) -> None:
    assert 0 < results["int8"]["kl"] < results["int4"]["kl"] < results["kivi-2-w32"]["kl"]
    assert 0.51 < results["int8"]["wire_ratio"] < 0.54
    assert 0.27 < results["int4"]["wire_ratio"] < 0.31
    assert results["int4"]["kl"] < 0.2


def test_budgets_are_kept(results: Any) -> None:
    for label in ("spectrum@0.7", "spectrum@0.7:random", "pdtrim@0.7"):
        assert results[label]["budget"] == 0.7
        assert 0.65 < results[label]["wire_ratio"] <= 0.7
    assert sum(results["spectrum@0.7"]["tokens_by_tier"]) == 128


def test_tables_and_picture(outputs: Path) -> None:
    text = (outputs / "r.md").read_text()
    assert "| spectrum@0.7:random | 0." in text
    assert "- **kivi-2-w32**: KIVI: 2 bits" in text
    assert (outputs / "r.png").read_bytes().startswith(b"\x89PNG")
