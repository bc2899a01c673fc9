"""The real pair on each supported SGLang release, one command: ``make test-versions``.

`make test` runs the oldest and the newest: all its other tests run on the one between them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from pair_cluster import PairCluster

from spectrumkv_sglang.launch.prompts import LONG_PROMPTS, SHORT_PROMPTS
from spectrumkv_sglang.launch.transfer_log_reader import request_transfer

UNROTATED_KEYS = Path(__file__).with_name("unrotated_keys.yaml")
TIERED_TEXT = LONG_PROMPTS[0].text
EXACT_TEXTS = (SHORT_PROMPTS[0].text, SHORT_PROMPTS[1].text, LONG_PROMPTS[1].text[:1300])
MIN_TOKENS = 700
"""Between the longest exact prompt and the one in tiers: shorter ones travel packed at native precision."""
GO_ON = {"ignore_eos": True}


@pytest.mark.versions
@pytest.mark.parametrize("version", ["0.5.16", pytest.param("0.5.20", marks=pytest.mark.by_hand), "0.5.23"])
def test_pair_answers_like_a_plain_server(cluster: PairCluster, version: str, figures: list[str]) -> None:
    plain = cluster.plain(sglang=version)
    decode = cluster.decode(sglang=version)
    settings = {"SPECTRUMKV_MIN_TOKENS": str(MIN_TOKENS)}
    prefill = cluster.prefill(profile=str(UNROTATED_KEYS), budget=0.53, env=settings, sglang=version)
    cluster.wait_ready(plain, decode, prefill)
    cluster.transfers(prefill).skip()
    lengths = []
    for text in EXACT_TEXTS:
        expected = cluster.generate_alone(plain, text, max_new_tokens=24, sampling=GO_ON)
        answer = cluster.generate(prefill, decode, text, max_new_tokens=24, sampling=GO_ON)
        assert answer.output_ids == expected.output_ids
        sent = request_transfer(cluster.transfers(prefill).next_request())
        assert sent.path == "tiered"
        assert 1.0 < sent.achieved_b < 1.01
        lengths.append(expected.prompt_tokens)
    assert MIN_TOKENS // 2 < max(lengths) < MIN_TOKENS  # more than one sub-chunk
    expected = cluster.generate_alone(plain, TIERED_TEXT, max_new_tokens=24, sampling=GO_ON)
    answer = cluster.generate(prefill, decode, TIERED_TEXT, max_new_tokens=24, sampling=GO_ON)
    sent = request_transfer(cluster.transfers(prefill).next_request())
    assert sent.path == "tiered"
    assert sent.achieved_b <= 0.53
    equal = sum(a == b for a, b in zip(answer.output_ids, expected.output_ids, strict=False))
    figures.append(
        f"SGLang {version}: packed at native precision, identical on {len(EXACT_TEXTS)} prompts of {lengths} tokens; "
        f"both transforms, b {sent.achieved_b:.4f}, {equal} of {len(expected.output_ids)} tokens equal"
    )
    assert equal >= 0.75 * len(expected.output_ids)
    for server in (plain, decode, prefill):
        cluster.stop(server)
