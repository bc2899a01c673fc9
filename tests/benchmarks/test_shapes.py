"""What the matrix of deployment shapes says of a run, and which error line of a server's log it shows."""

from __future__ import annotations

import json
from pathlib import Path

from shape_bench import error_line
from shape_cases import Models, make_tiny_mla, shapes
from shape_report import Answers, Row, write

RIGHT = Row("tp-2-1", "unequal", Answers(right=4, tie=1), {"tiered": {"tiered": 9}, "native": {"pool_exhausted": 1}})
WRONG = Row("x", "wrong", Answers(right=4, wrong=1, first="token 3 differs"), {"tiered": {"tiered": 5}, "native": {}})
SILENT = Row("x", "no answers at all", Answers())
DEAD = Row("x", "dead", not_started="decode: ValueError: no")


def test_a_shape_passes_only_if_every_answer_was_right_or_sglang_fails_too() -> None:
    assert RIGHT.passed
    for row in (WRONG, SILENT, DEAD, Row("x", "an error", Answers(right=4, error=1))):
        assert not row.passed
        assert Row(**{**vars(row), "sglang": "wrong too", "sglang_fails": True}).passed


def test_the_table_names_paths_reasons_and_errors(tmp_path: Path) -> None:
    table = write([RIGHT, WRONG, DEAD], tmp_path, {"sglang": "0.5.20"})
    assert "| tiered 9; native 1 (`pool_exhausted` 1) | 4 right, 1 tie |" in table
    assert "| tiered 5 | 4 right, 1 wrong | token 3 differs |" in table
    assert "| not started | decode: ValueError: no |" in table
    document = json.loads((tmp_path / "shapes.json").read_text())
    assert [row["passed"] for row in document["rows"]] == [True, False, False]
    assert (tmp_path / "shapes.md").read_text() == table + "\n"


def test_the_last_exception_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("ValueError: first\nTraceback\n  raise\nAssertionError: the | last\n[12:00 TP0] Received sigquit\n")
    assert error_line(log, "otherwise") == "AssertionError: the | last"
    log.write_text("nothing\n")
    assert error_line(log, "first\nnot healthy after 5 s") == "not healthy after 5 s"
    assert error_line(tmp_path / "none", "x" * 500) == "x" * 240 + " ..."


def test_the_tiny_mla_model_has_the_other_models_vocabulary(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({"vocab_size": 99, "eos_token_id": 3, "hidden_size": 7}))
    (other / "tokenizer.json").write_text("{}")
    made = make_tiny_mla(tmp_path / "mla", other)
    config = json.loads((made / "config.json").read_text())
    assert (config["vocab_size"], config["eos_token_id"], config["hidden_size"]) == (99, 3, 256)
    assert (made / "tokenizer.json").read_text() == "{}"


def test_every_shape_has_a_name_of_its_own_and_a_model(tmp_path: Path) -> None:
    models = Models(tmp_path, tmp_path, tmp_path)
    known = shapes(models)
    assert len({shape.name for shape in known}) == len(known)
    assert all(getattr(models, shape.model) for shape in known)
