"""Plan file, request tags and result lines of loopback mode."""

from pathlib import Path

import pytest

from spectrumkv_sglang.config import ConfigError
from spectrumkv_sglang.loopback.plan import (
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


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"id": 1}', '{"id": "a", "colour": "red"}', 7])
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
