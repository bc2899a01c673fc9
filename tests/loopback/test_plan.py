"""Plan file, request tags and result lines of loopback mode."""

import math
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from spectrumkv_sglang.config import ConfigError
from spectrumkv_sglang.loopback.plan import (
    JudgedRecord,
    LoopbackError,
    LoopbackPlan,
    RequestTag,
    ResultLine,
    ResultWriter,
    load_policy,
    read_plan,
    read_results,
    read_tag,
    write_plan,
)


def test_a_plan_is_read_back(tmp_path: Path) -> None:
    plan = LoopbackPlan(base="b.yaml", policies="p", results="r.jsonl")
    write_plan(plan, tmp_path / "plan.json")
    assert read_plan({"SPECTRUMKV_LOOPBACK": str(tmp_path / "plan.json")}) == plan
    assert read_plan({}) is None
    assert read_plan({"SPECTRUMKV_LOOPBACK": ""}) is None


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b'{"base": 1, "policies": "", "results": ""}', b"\xff"])
def test_a_broken_plan_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(LoopbackError, match=r"plan\.json"):
        read_plan({"SPECTRUMKV_LOOPBACK": str(path)})
    path.unlink()
    with pytest.raises(LoopbackError, match=r"plan\.json"):
        read_plan({"SPECTRUMKV_LOOPBACK": str(path)})


def test_a_policy_is_read_when_it_is_named(tmp_path: Path) -> None:
    plan = LoopbackPlan(base="", policies=str(tmp_path), results="")
    with pytest.raises(LoopbackError, match=r"unknown policy 'p'.*p\.yaml"):
        load_policy(plan, "p")
    (tmp_path / "p.yaml").write_text("profile: int8\n")
    assert load_policy(plan, "p").profile == "int8"
    (tmp_path / "p.yaml").write_text("profile: int9\n")
    with pytest.raises(ConfigError, match="int9"):
        load_policy(plan, "p")


def test_a_tag_survives_custom_params() -> None:
    tag = RequestTag(id="j1", policy="low", judged_after=768, reference=True)
    assert read_tag(tag.as_custom_params()) == tag
    # SGLang adds an object of its own to the parameters of a request.
    assert read_tag({**tag.as_custom_params(), "__req__": object()}) == tag


@pytest.mark.parametrize("params", [None, {}, {"thinking_budget": 1}, 3])
def test_requests_without_a_tag_are_left_alone(params: object) -> None:
    assert read_tag(params) is None


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"id": 1}', '{"id": "a", "colour": "red"}', 7, "\ud800"])
def test_a_malformed_tag_is_refused(text: object) -> None:
    with pytest.raises(LoopbackError, match="malformed"):
        read_tag({"spectrumkv": text})


def test_only_complete_result_lines_are_read(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    assert read_results(path, 0) == ([], 0)
    writer = ResultWriter(str(path))
    writer.write(ResultLine(id="a"))
    whole = path.stat().st_size
    with path.open("ab") as file:
        file.write(b'{"id":"b"')
    lines, offset = read_results(path, 0)
    assert [line.id for line in lines] == ["a"]
    assert offset == whole
    with path.open("ab") as file:
        file.write(b"}\n")
    lines, _ = read_results(path, offset)
    assert [line.id for line in lines] == ["b"]


def test_scores_that_are_no_numbers_reach_the_probe_as_nan(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    ResultWriter(str(path)).write(ResultLine(id="a", judged=JudgedRecord(tokens=3, nll=math.nan, kl=math.inf, top1=0)))
    ((line,), _) = read_results(path, 0)
    assert line.judged is not None
    assert (line.judged.tokens, math.isnan(line.judged.nll), math.isnan(line.judged.kl)) == (3, True, True)


@pytest.mark.parametrize("line", [b"{", b"7", b'{"id": 1}', b'{"id": "a", "judged": {"tokens": null}}', b"\xff"])
def test_a_line_that_is_no_result_is_an_error_that_names_the_file(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "results.jsonl"
    path.write_bytes(line + b"\n")
    with pytest.raises(LoopbackError, match=r"results\.jsonl holds a line that is no result"):
        read_results(path, 0)


@pytest.mark.parametrize("name", ["../base", "", ".", "a/b", "a\0b", "p" * 300])
def test_a_policy_is_a_name_and_no_path(tmp_path: Path, name: str) -> None:
    (tmp_path / "base.yaml").write_text("profile: int8\n")
    (tmp_path / "policies").mkdir()
    with pytest.raises(LoopbackError, match="unknown policy"):
        load_policy(LoopbackPlan(base="", policies=str(tmp_path / "policies"), results=""), name)


def test_only_a_server_that_the_probe_itself_starts_takes_part(tmp_path: Path) -> None:
    """A server of somebody else, with the variable left in its environment, must not touch its requests' KV."""
    path = tmp_path / "plan.json"
    write_plan(LoopbackPlan(base="b", policies="p", results="r"), path)
    program = "from spectrumkv_sglang.loopback.plan import refuse_other_servers; refuse_other_servers()"
    command = [sys.executable, "-c", program]
    environment = {**os.environ, "SPECTRUMKV_LOOPBACK": str(path)}
    own = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert own.returncode == 0, own.stderr
    grandchild = ["/bin/sh", "-c", f"{shlex.join(command)}; exit $?"]
    other = subprocess.run(grandchild, env=environment, capture_output=True, text=True, check=False)
    assert other.returncode != 0
    assert "unset the variable" in other.stderr
