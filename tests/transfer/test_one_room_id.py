"""Two requests under one room id: KV and first token of one never go to the other, whichever path they take."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from spectrumkv_sglang.transfer.handshake import append_handshake
from spectrumkv_sglang.transfer.messages import PROTOCOL_VERSION
from spectrumkv_sglang.transfer.request_identity import (
    UNKNOWN,
    decode_prompt,
    encode_prompt,
    may_be_same,
    prompt_digest,
)

HERE = Path(__file__).parent
CPU_SHIMS = HERE.parents[1] / "launch" / "cpu_shims"


def test_prompts_that_differ_have_different_digests() -> None:
    prompts = [[], [0], [0, 0], [1], [1, 0], [0, 1], [2**31 - 1], [2**63 - 1], list(range(5000))]
    digests = [prompt_digest(prompt) for prompt in prompts]
    assert len(set(digests)) == len(prompts)
    assert UNKNOWN not in digests
    assert all(0 < digest < 2**64 for digest in digests)
    assert prompt_digest(None) == UNKNOWN
    assert prompt_digest(range(5000)) == digests[-1]


def test_adapters_that_differ_have_different_digests() -> None:
    digests = [prompt_digest([1, 2], adapter) for adapter in ("", "a", "b", "ab", "a" * 65)]
    assert len({*digests, prompt_digest([1], "a"), prompt_digest([1, 2, ord("a")])}) == len(digests) + 2
    assert digests[0] == prompt_digest([1, 2])
    assert prompt_digest([1, 2], None) == UNKNOWN


def test_only_known_and_different_prompts_are_told_apart() -> None:
    assert [may_be_same(*pair) for pair in ((5, 5), (5, 6), (5, UNKNOWN), (UNKNOWN, 6))] == [True, False, True, True]


def test_a_digest_survives_the_trip_and_garbage_is_unknown() -> None:
    for digest in (1, 2**63, 2**64 - 1):
        assert decode_prompt(encode_prompt(digest)) == digest
    frame = encode_prompt(5)
    other_version = frame[:4] + (PROTOCOL_VERSION + 1).to_bytes(2, "little") + frame[6:]
    for garbage in (None, b"", frame[:-1], frame + b"\0", b"SKVH" + frame[4:], other_version):
        assert decode_prompt(garbage) == UNKNOWN
    assert len(append_handshake([b"7"], frame)) == 49


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What SGLang's classes do with our hooks, see `one_room_id.py`."""
    log = tmp_path_factory.mktemp("one_room_id") / "log"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SPECTRUMKV_", "MC_"))}
    # In front, for a process that looks for nothing beside its program.
    paths = [str(CPU_SHIMS), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment |= {"PYTHONPATH": os.pathsep.join(paths), "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
    with log.open("wb") as errors:
        command = [sys.executable, str(HERE / "one_room_id.py")]
        answer = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, stderr=errors, timeout=240, check=False
        )
    lines = [line for line in answer.stdout.decode().splitlines() if line.startswith("RESULT ")]
    assert lines, log.read_text()[-3000:]
    found: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    return found


@pytest.mark.timeout(300)
def test_kv_goes_to_the_pages_of_its_own_request(cases: dict[str, Any]) -> None:
    assert cases["own"] == {
        "kv": 0,
        "first token": 0,
        "prompts": [prompt_digest([1, 2, 3, 4, 5])],
        "failures": {},
        "banned": [],
    }


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", ["other's", "other's, once it is queued"])
def test_neither_kv_nor_the_first_token_goes_to_another_request(cases: dict[str, Any], case: str) -> None:
    """One count for each of the two calls; SGLang makes no second one after the first has failed."""
    refused = {"kv": -1, "first token": -1, "prompts": [], "failures": {"other_request": 2}, "banned": []}
    assert cases[case] == refused


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", ["other adapter", "base model"])
def test_one_prompt_under_another_adapter_is_another_request(cases: dict[str, Any], case: str) -> None:
    refused = {"kv": -1, "first token": -1, "prompts": [], "failures": {"other_request": 2}, "banned": []}
    assert cases[case] == refused


@pytest.mark.timeout(300)
def test_chunks_carry_the_limits_of_their_own_request(cases: dict[str, Any]) -> None:
    assert cases["limits"] == [0.0, 0.5]


@pytest.mark.timeout(300)
def test_one_adapter_may_have_another_id_on_each_server(cases: dict[str, Any]) -> None:
    assert (cases["same adapter"]["kv"], cases["same adapter"]["first token"]) == (0, 0)
    assert cases["same adapter"]["prompts"] == [prompt_digest([1, 2, 3, 4, 5], "law")]


@pytest.mark.timeout(300)
def test_adapters_share_no_pool_slots_and_so_no_importance(cases: dict[str, Any]) -> None:
    """Importance is kept by pool slot; SGLang's prefix cache gives none to a request of another adapter."""
    assert cases["cached"] == [[0, 1, 2, 3, 4], [], [], []]


@pytest.mark.timeout(300)
def test_a_room_that_the_other_request_has_ended_fails_and_the_scheduler_goes_on(cases: dict[str, Any]) -> None:
    for first, second, failed in cases["forgotten"]:
        assert first == second == failed


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", ["plain decode", "images", "unknown adapter"])
def test_where_one_side_does_not_know_the_prompt_nothing_is_refused(cases: dict[str, Any], case: str) -> None:
    assert (cases[case]["kv"], cases[case]["first token"], cases[case]["failures"]) == (0, 0, {})
