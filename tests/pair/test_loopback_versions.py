"""Loopback mode on the oldest and the newest supported SGLang: the hooks of a probe are where it looks for them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pair_cluster import PairCluster

from spectrumkv_sglang.launch.client import flush_cache, generate, post
from spectrumkv_sglang.launch.prompts import LONG_PROMPTS
from spectrumkv_sglang.launch.servers import SGLangServer
from spectrumkv_sglang.loopback.plan import LoopbackPlan, RequestTag, ResultLine, read_results, write_plan

PREFIX_TOKENS = 256


def _judge(server: SGLangServer, token_ids: list[int], policy: str) -> None:
    flush_cache(server)
    prefix = RequestTag(id=f"{policy}-prefix", policy=policy)
    generate(server, token_ids[:PREFIX_TOKENS], max_new_tokens=1, sampling={"custom_params": prefix.as_custom_params()})
    tag = RequestTag(id=f"{policy}-judged", policy=policy, judged_after=PREFIX_TOKENS, reference=policy == "native")
    content = {
        "input_ids": token_ids,
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 1, "custom_params": tag.as_custom_params()},
        "return_logprob": True,
        "logprob_start_len": PREFIX_TOKENS,
    }
    json.loads(post(f"{server.url}/generate", content, namespace=server.namespace))


@pytest.mark.by_hand
@pytest.mark.versions
@pytest.mark.parametrize("version", ["0.5.16", "0.5.23"])
def test_requests_travel_in_place_and_are_judged(cluster: PairCluster, version: str, tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("profile: spectrum\n")
    (tmp_path / "policies").mkdir()
    (tmp_path / "policies" / "int8.yaml").write_text("profile: int8\nmin_tokens: 0\n")
    results = tmp_path / "results.jsonl"
    plan = LoopbackPlan(str(tmp_path / "base.yaml"), str(tmp_path / "policies"), str(results))
    write_plan(plan, tmp_path / "plan.json")
    server = cluster.plain(sglang=version, env={"SPECTRUMKV_LOOPBACK": str(tmp_path / "plan.json")})
    cluster.wait_ready(server)
    from transformers import AutoTokenizer

    token_ids = AutoTokenizer.from_pretrained(cluster.model).encode(LONG_PROMPTS[0].text)[: PREFIX_TOKENS + 128]
    for policy in ("native", "int8"):
        _judge(server, token_ids, policy)
    lines: dict[str, ResultLine] = {line.id: line for line in read_results(results, 0)[0]}
    cluster.stop(server)

    assert lines["server"].server is not None, lines["server"].error
    assert lines["server"].server.fingerprint is not None
    assert all(line.error is None for line in lines.values()), lines
    moved = lines["int8-prefix"].in_place
    assert moved is not None
    assert moved.tokens == PREFIX_TOKENS
    assert moved.tokens_by_tier == (PREFIX_TOKENS, 0, 0)
    judged = lines["int8-judged"].judged
    assert judged is not None
    assert judged.tokens == 127
    assert 0.0 < judged.kl < 0.01
    assert lines["native-judged"].judged is not None
    assert lines["native-judged"].judged.kl == 0.0
