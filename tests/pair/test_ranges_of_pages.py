"""The right pages in every way that SGLang cuts a prompt: long pages, chunks, cached prefixes on either side."""

from __future__ import annotations

from pair_cluster import PairCluster

from spectrumkv_sglang.launch.client import Completion
from spectrumkv_sglang.launch.prompts import LONG_PROMPTS
from spectrumkv_sglang.launch.transfer_log_reader import request_transfer

PAGED = ("--page-size", "16")
# SGLang allocates long pages with a Triton kernel, which without a GPU runs only in Triton's interpreter.
INTERPRETED = {"TRITON_INTERPRET": "1"}
PROMPT = LONG_PROMPTS[0].text
FOLLOW_UP = " Her name was Ida Marren. She measured the depth from a rowing boat. The first harbour master was"
GO_ON = {"ignore_eos": True}


def test_chunked_prefill_with_partial_last_page_and_decode_radix_cache(cluster: PairCluster) -> None:
    """A prompt longer than the prefill chunk, twice: the second time decode holds its prefix already."""
    prefill = cluster.prefill(
        profile="native-packed", extra_args=(*PAGED, "--chunked-prefill-size", "256"), env=INTERPRETED
    )
    decode = cluster.decode(extra_args=(*PAGED, "--disaggregation-decode-enable-radix-cache"), env=INTERPRETED)
    plain = cluster.plain()
    cluster.wait_ready(prefill, decode)
    log = cluster.transfers(prefill)
    log.skip()
    first_expected = cluster.generate_alone(plain, PROMPT, sampling=GO_ON)
    first = cluster.generate(prefill, decode, PROMPT, sampling=GO_ON)
    records = log.next_request()
    assert first.output_ids == first_expected.output_ids
    assert first_expected.prompt_tokens % 16 != 0  # the last page is partial
    assert len(records) >= 3
    _check_all_pages_sent(first_expected, request_transfer(records).native_bytes)

    second_expected = cluster.generate_alone(plain, PROMPT + FOLLOW_UP, sampling=GO_ON)
    second = cluster.generate(prefill, decode, PROMPT + FOLLOW_UP, sampling=GO_ON, flush=False)
    again = request_transfer(log.next_request())
    assert second.output_ids == second_expected.output_ids
    assert again.path == "tiered"
    # Decode kept the first prompt's pages, so only the rest crosses the wire.
    assert again.native_bytes < 0.2 * request_transfer(records).native_bytes
    cluster.stop(prefill)
    cluster.stop(decode)


def _check_all_pages_sent(expected: Completion, native_bytes: int) -> None:
    bytes_per_token = 30 * 2 * 3 * 64 * 4
    pages = -(-expected.prompt_tokens // 16)
    assert native_bytes == pages * 16 * bytes_per_token
