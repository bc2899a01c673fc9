"""The frontier over result files: who beats whom, and what is said of each profile."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from spectrumkv_sglang.evaluation.result import (
    RESULT_FORMAT,
    EvaluationResult,
    Intervals,
    Kind,
    Row,
    TextScores,
    encode_result,
)

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def benchmarks_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """benchmarks/ is no package; its kernels.py must not be found before the package of that name."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(BENCHMARKS)])


def row(wire_ratio: float, *kl: float) -> Row:
    texts = [TextScores(f"text-{i}", 1.0, 2.7, 0.1, value, 0.9, wire_ratio) for i, value in enumerate(kl)]
    intervals = Intervals((2.7, 2.7), (0.1, 0.1), (min(kl), max(kl)), (0.9, 0.9))
    return Row(wire_ratio, 2.7, 0.1, sum(kl) / len(kl), 0.9, intervals, None, True, None, texts)


NATIVE = row(1.0, 0.0, 0.0, 0.0)
Rows = dict[str, tuple[Kind, Row]]
ROWS: Rows = {
    "native": ("native", NATIVE),
    "good@0.3": ("profile", row(0.300, 0.010, 0.020, 0.030)),
    "good@0.3:random": ("profile", row(0.3001, 0.015, 0.030, 0.045)),
    "better-by-luck": ("profile", row(0.310, 0.011, 0.021, 0.031)),
    "costly": ("profile", row(0.5, 0.020, 0.040, 0.060)),
    "kivi-4": ("baseline", row(0.36, 0.001, 0.002, 0.003)),
    "noisy": ("baseline", row(0.301, 0.030, 0.010, 0.0195)),
}


def result(
    rows: dict[str, tuple[Kind, Row]], *, model: str = "models/Small-1", text: str = "t.txt"
) -> EvaluationResult:
    found = {label: row for label, (_, row) in rows.items()}
    return EvaluationResult(
        format=RESULT_FORMAT,
        model=model,
        text=text,
        prefix_tokens=[512],
        continuation_tokens=32,
        texts=3,
        seed=0,
        scorer="window",
        device="cpu",
        dtype="float32",
        kv_dtype="bfloat16",
        native_bytes_per_token=1024,
        methods=dict.fromkeys(rows, "a method"),
        kinds={label: kind for label, (kind, _) in rows.items()},
        results=found,
        by_prefix_tokens={"512": found},
        growth={},
        seconds=1.0,
        date="",
        versions={},
    )


def written(folder: Path, results: Sequence[EvaluationResult]) -> list[str]:
    paths = [folder / f"{number}.json" for number in range(len(results))]
    for path, one in zip(paths, results, strict=True):
        path.write_bytes(encode_result(one))
    return list(map(str, paths))


def test_the_frontier_is_what_none_beats() -> None:
    from quality_points import panels_of

    (panel,) = panels_of([result(ROWS)], None)
    assert [point.label for point in panel.frontier()] == ["noisy", "kivi-4"]
    assert [point.label for point in panel.our_line()] == ["good@0.3"]
    assert "native" not in {point.label for point in panel.points}


def test_each_profile_is_told_its_place() -> None:
    from quality_frontier import verdict
    from quality_points import panels_of

    (panel,) = panels_of([result(ROWS)], None)
    said = {point.label: verdict(panel, point) for point in panel.points}
    assert said["kivi-4"].endswith("on the frontier")
    assert "tied with the frontier: noisy (b 0.301" in said["good@0.3"]
    assert "beaten by kivi-4 (b 0.360, KL 0.0020, 20.00x [20.00, 20.00])" in said["costly"]
    assert "beaten by good@0.3 (b 0.300" in said["good@0.3:random"]


def test_a_profile_with_another_scorer_is_a_control() -> None:
    from quality_points import panels_of

    (panel,) = panels_of([result(ROWS)], None)
    assert {point.label for point in panel.points if point.ours} == {"good@0.3", "better-by-luck", "costly"}


def test_files_of_the_same_windows_are_one_panel(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from quality_frontier import main

    first = {label: ROWS[label] for label in ("native", "good@0.3")}
    others = {label: ROWS[label] for label in ("native", "kivi-4", "costly")}
    files = written(
        tmp_path, [result(first), result(others), result(others, text="u.txt"), result(first, model="models/Other-1")]
    )
    plot, table = tmp_path / "f.png", tmp_path / "f.md"
    assert main([*files, "--plot", str(plot), "--markdown", str(table)]) == 0
    assert plot.read_bytes().startswith(b"\x89PNG")
    text = table.read_text()
    assert text.count("\n## ") == 1 + 3
    assert "## Small-1, t, 3 windows, 512 tokens" in text
    assert (
        "| **good@0.3** | 0.300 | +0.10 [+0.10, +0.10] | 0.0200 [0.0100, 0.0300] | 0.900 [0.900, 0.900] | yes |" in text
    )
    assert "  - Other-1, t, 3 windows, 512 tokens: b 0.300, KL 0.0200: on the frontier" in text
    assert "costly: b 0.500, KL 0.0400: beaten by kivi-4" in capsys.readouterr().out


def test_unusable_files_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from quality_frontier import main

    (tmp_path / "old.json").write_text('{"format": 1}')
    (tmp_path / "other.json").write_text("[]")
    (good,) = written(tmp_path, [result(ROWS)])
    for arguments, message in (
        ([str(tmp_path / "none.json")], "none.json: No such file"),
        ([str(tmp_path / "old.json")], "has format 1, expected 2: evaluate again"),
        ([str(tmp_path / "other.json")], "is no result of spectrumkv eval"),
        ([good, "--prefix-tokens", "4096"], "evaluated at prefixes of [512] tokens, not of 4096"),
    ):
        assert main(arguments) == 1
        assert message in capsys.readouterr().err
