"""The controller in a real prefill server: what a request asks for reaches the decision for its room."""

from __future__ import annotations

from typing import Any

from pair_cluster import PairCluster

from spectrumkv_sglang.launch.prompts import LONG_PROMPTS
from spectrumkv_sglang.observability.transfer_log import ChunkRecord

PROMPT = LONG_PROMPTS[0].text
CONTROLLED = {
    "SPECTRUMKV_REQUIRE_PROBE": "false",
    "SPECTRUMKV_CONTROLLER_ENABLED": "true",
    "SPECTRUMKV_CONTROLLER_EXPLORE": "0",
}


def test_requests_with_limits_of_their_own(cluster: PairCluster, figures: list[str]) -> None:
    prefill, decode = cluster.prefill(profile="near-lossless", budget=0.5, env=CONTROLLED), cluster.decode()
    cluster.wait_ready(prefill, decode)
    cluster.transfers(prefill).skip()

    def send(parameters: Any) -> ChunkRecord:
        custom = {"custom_params": {"spectrumkv": parameters}} if parameters is not None else {}
        answer = cluster.generate(prefill, decode, PROMPT, max_new_tokens=4, sampling={"ignore_eos": True, **custom})
        assert len(answer.output_ids) == 4
        record = cluster.transfers(prefill).next_request()[-1]
        decision = record.decision.value if record.decision else None
        figures.append(f"controller, {parameters}: {record.candidate} ({decision}), {record.transfer_seconds:.3f} s")
        return record

    first = send(None)
    assert (first.candidate, first.decision) == ("near-lossless@0.5", "no_sample")
    exact = send({"max_kl": 0})
    assert exact.candidate in ("native", "native-packed@1")
    unclear = send({"max_kl": "small"})
    assert (unclear.candidate, unclear.decision) == ("near-lossless@0.5", "bad_request")
    late = send({"ttft_target_s": 0.001})
    assert late.decision == "slo"
    assert send(None).decision not in ("no_sample", "bad_request", "slo")
    log = prefill.log_path.read_text()
    assert "was not understood: max_kl is 'small'" in log
    cluster.stop(prefill)
