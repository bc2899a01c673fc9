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
TEXTS = (SHORT_PROMPTS[0].text, SHORT_PROMPTS[1].text, LONG_PROMPTS[0].text)


@pytest.mark.versions
@pytest.mark.parametrize("version", ["0.5.16", pytest.param("0.5.20", marks=pytest.mark.by_hand), "0.5.23"])
def test_pair_answers_like_a_plain_server(cluster: PairCluster, version: str, figures: list[str]) -> None:
    plain = cluster.plain(sglang=version)
    decode = cluster.decode(sglang=version)
    packed = cluster.prefill(profile="native-packed", sglang=version)
    tiered = cluster.prefill(profile=str(UNROTATED_KEYS), budget=0.53, sglang=version)
    cluster.wait_ready(plain, decode, packed, tiered)
    cluster.transfers(packed).skip()
    cluster.transfers(tiered).skip()
    for text in TEXTS:
        expected = cluster.generate_alone(plain, text, max_new_tokens=24, sampling={"ignore_eos": True})
        answer = cluster.generate(packed, decode, text, max_new_tokens=24, sampling={"ignore_eos": True})
        assert answer.output_ids == expected.output_ids
        assert request_transfer(cluster.transfers(packed).next_request()).path == "tiered"
    answer = cluster.generate(tiered, decode, TEXTS[-1], max_new_tokens=24, sampling={"ignore_eos": True})
    sent = request_transfer(cluster.transfers(tiered).next_request())
    assert sent.path == "tiered"
    assert sent.achieved_b <= 0.53
    equal = sum(a == b for a, b in zip(answer.output_ids, expected.output_ids, strict=False))
    figures.append(
        f"SGLang {version}: native-packed identical on {len(TEXTS)} prompts; both transforms, "
        f"b {sent.achieved_b:.4f}, {equal} of {len(expected.output_ids)} tokens equal"
    )
    assert equal >= 0.75 * len(expected.output_ids)
    for server in (plain, decode, packed, tiered):
        cluster.stop(server)
