"""Answers of a real pair against those of a plain server: same model, same prompts, greedy."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from pair_cluster import METRICS, PairCluster
from sglang_plugins import DROP_PAYLOAD, plugin_path

from spectrumkv_sglang.launch.client import Completion, flush_caches, post
from spectrumkv_sglang.launch.prompts import LONG_PROMPTS, SHORT_PROMPTS
from spectrumkv_sglang.launch.servers import SGLangServer
from spectrumkv_sglang.launch.transfer_log_reader import request_transfer

WATER = "Water boils at a lower temperature on a mountain because"
TEXTS = (
    "def fibonacci(n):",
    *(prompt.text for prompt in SHORT_PROMPTS),
    WATER,
    *(prompt.text for prompt in LONG_PROMPTS),
)
NEW_TOKENS = 32
NEAR_TIE = 0.02
"""Nats between two tokens that the plain server holds about equally likely."""
UNROTATED_KEYS = Path(__file__).with_name("unrotated_keys.yaml")
GO_ON = {"ignore_eos": True}  # a model that stops at once would leave nothing to compare


def agreement(ours: Completion, plain: Completion) -> tuple[int, int]:
    """Equal output tokens, position by position, and the number of tokens compared."""
    return sum(a == b for a, b in zip(ours.output_ids, plain.output_ids, strict=False)), len(plain.output_ids)


def plain_lead(plain: SGLangServer, text: str, place: int, token: int) -> float:
    """By how many nats the plain server prefers its own ``place``-th output token to ``token``."""
    sampling = {"temperature": 0.0, "max_new_tokens": place + 1, **GO_ON}
    content = {"text": text, "sampling_params": sampling, "return_logprob": True, "top_logprobs_num": 5}
    flush_caches([plain])
    answer = json.loads(post(f"{plain.url}/generate", content, namespace=plain.namespace))
    likely = {entry[1]: entry[0] for entry in answer["meta_info"]["output_top_logprobs"][place]}
    return max(likely.values()) - likely.get(token, -math.inf)


@pytest.fixture(scope="module")
def reference(cluster: PairCluster) -> dict[str, Completion]:
    """The plain server's answers; every server of this module starts while the first one is waited for."""
    plain = cluster.plain()
    cluster.decode()
    cluster.prefill(profile="native-packed")
    cluster.prefill(profile="int8")
    cluster.prefill(profile="spectrum", budget=0.55, extra_args=METRICS)  # test_paths.py reads its metrics
    return {text: cluster.generate_alone(plain, text, max_new_tokens=NEW_TOKENS, sampling=GO_ON) for text in TEXTS}


def test_native_packed_is_token_identical(
    cluster: PairCluster, reference: dict[str, Completion], figures: list[str]
) -> None:
    prefill, decode = cluster.prefill(profile="native-packed"), cluster.decode()
    cluster.transfers(prefill).skip()
    for text in TEXTS:
        answer = cluster.generate(prefill, decode, text, max_new_tokens=NEW_TOKENS, sampling=GO_ON)
        assert answer.output_ids == reference[text].output_ids, text[:40]
        sent = request_transfer(cluster.transfers(prefill).next_request())
        assert sent.path == "tiered"
        assert 1.0 < sent.achieved_b < 1.01
    assert len(TEXTS) >= 8
    lengths = sorted(reference[text].prompt_tokens for text in TEXTS)
    figures.append(f"native-packed: {len(TEXTS)} of {len(TEXTS)} prompts token-identical, {lengths} prompt tokens")
    assert min(lengths) <= 5
    assert max(lengths) >= 850


def test_a_shared_prefix_sent_twice_carries_the_right_pages(cluster: PairCluster) -> None:
    """The second prompt finds the first one's prefix in prefill's radix cache; decode has none of it."""
    plain, prefill, decode = cluster.plain(), cluster.prefill(profile="native-packed"), cluster.decode()
    shared = LONG_PROMPTS[0].text[:2000]
    for turn, ending in enumerate(("\nIn one sentence:", "\nThe name of the engineer is")):
        expected = cluster.generate_alone(
            plain, shared + ending, max_new_tokens=NEW_TOKENS, sampling=GO_ON, flush=turn == 0
        )
        answer = cluster.generate(
            prefill, decode, shared + ending, max_new_tokens=NEW_TOKENS, sampling=GO_ON, flush=turn == 0
        )
        assert answer.output_ids == expected.output_ids
    assert expected.cached_tokens > 300


@pytest.mark.parametrize(("profile", "budget", "flags"), [("int8", None, ()), ("spectrum", 0.55, METRICS)])
def test_lossy_profiles_agree_on_95_percent_of_tokens(
    cluster: PairCluster,
    reference: dict[str, Completion],
    profile: str,
    budget: float | None,
    flags: tuple[str, ...],
    figures: list[str],
) -> None:
    prefill, decode = cluster.prefill(profile=profile, budget=budget, extra_args=flags), cluster.decode()
    cluster.transfers(prefill).skip()
    equal = compared = 0
    for text in TEXTS:
        answer = cluster.generate(prefill, decode, text, max_new_tokens=NEW_TOKENS, sampling=GO_ON)
        same, tokens = agreement(answer, reference[text])
        equal, compared = equal + same, compared + tokens
        sent = request_transfer(cluster.transfers(prefill).next_request())
        if reference[text].prompt_tokens >= 64:  # shorter ones travel at native precision (min_tokens)
            assert sent.achieved_b <= (budget or 0.55)
    figures.append(f"{profile}, budget {budget or 0.55}: {equal} of {compared} output tokens as the plain server's")
    assert compared >= 200
    assert equal / compared >= 0.95, f"{equal} of {compared}"


def test_reported_wire_bytes_are_the_bytes_on_the_interface(cluster: PairCluster, figures: list[str]) -> None:
    prefill, decode = cluster.prefill(profile="int8"), cluster.decode()
    cluster.wait_ready(prefill, decode)
    if cluster.namespace is None:
        pytest.fail("counting interface bytes needs root and pyroute2: run the tests as root")
    cluster.generate(prefill, decode, LONG_PROMPTS[0].text, max_new_tokens=1)  # connections exist from here on
    cluster.transfers(prefill).skip()
    before = cluster.loopback_bytes()
    cluster.generate(prefill, decode, LONG_PROMPTS[0].text, max_new_tokens=1)
    counted = cluster.loopback_bytes() - before
    sent = request_transfer(cluster.transfers(prefill).next_request())
    figures.append(f"int8: {sent.wire_bytes} wire bytes reported, {counted} bytes counted on the interface")
    assert sent.wire_bytes == pytest.approx(counted, rel=0.03)
    cluster.stop(prefill)


def test_transformed_kv_keeps_the_budget_and_answers_stay_sensible(
    cluster: PairCluster, reference: dict[str, Completion], figures: list[str]
) -> None:
    prefill, decode = cluster.prefill(profile=str(UNROTATED_KEYS), budget=0.53), cluster.decode()
    cluster.wait_ready(prefill)
    cluster.transfers(prefill).skip()
    equal = compared = 0
    for text in (prompt.text for prompt in LONG_PROMPTS):
        answer = cluster.generate(prefill, decode, text, max_new_tokens=NEW_TOKENS, sampling=GO_ON)
        same, tokens = agreement(answer, reference[text])
        parted = next(
            (i for i, (a, b) in enumerate(zip(answer.output_ids, reference[text].output_ids, strict=True)) if a != b),
            None,
        )
        if parted is not None:
            lead = plain_lead(cluster.plain(), text, parted, answer.output_ids[parted])
            figures.append(
                f"{UNROTATED_KEYS.stem}: parts from the plain answer at token {parted + 1}, {lead:.4f} nats apart there"
            )
            if lead < NEAR_TIE:  # which of the two comes first depends on the machine
                same, tokens = parted, parted
        equal, compared = equal + same, compared + tokens
        sent = request_transfer(cluster.transfers(prefill).next_request())
        figures.append(
            f"{UNROTATED_KEYS.stem}, budget .53: achieved {sent.achieved_b:.4f}, {sent.tokens_by_tier}, {answer.text!r}"
        )
        assert sent.achieved_b <= 0.53
        assert all(sent.tokens_by_tier[tier] > 0 for tier in ("high", "mid"))
        assert len(set(answer.output_ids)) > 8  # not one token over and over
    figures.append(f"{UNROTATED_KEYS.stem}, budget .53: {equal} of {compared} output tokens as the plain server's")
    assert compared > NEW_TOKENS  # ties leave more than one whole answer to compare
    assert equal / compared >= 0.75, f"{equal} of {compared}"
    cluster.stop(prefill)  # makes room: those that stay are used again


def test_the_comparison_notices_missing_kv(
    cluster: PairCluster, reference: dict[str, Completion], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Negative control: with metadata sent but no KV the answers must be wrong."""
    path = plugin_path(tmp_path_factory.mktemp("plugins"), "drop_payload", DROP_PAYLOAD)
    prefill = cluster.prefill(profile="native-packed", env={"PYTHONPATH": path})
    answers = [
        cluster.generate(prefill, cluster.decode(), text, max_new_tokens=16, sampling=GO_ON) for text in TEXTS[-3:]
    ]
    expected = [reference[text].output_ids[:16] for text in TEXTS[-3:]]
    assert all(answer.output_ids != ids for answer, ids in zip(answers, expected, strict=True))
    cluster.stop(prefill)
