"""When the lossless stage compresses: by link, by what a sample of the payload says, by what whole payloads took."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spectrumkv_sglang.lossless.codec import CodecName, LosslessCodec, make_codec
from spectrumkv_sglang.lossless.worth import JUDGED_BETWEEN_SAMPLES, Estimate, Worth, measure
from spectrumkv_sglang.observability.reasons import CodecOutcome
from spectrumkv_sglang.tuning.peer_links import MAX_AGE_SECONDS, PeerLinks

NOISE = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
ORDER = torch.arange(1 << 18, dtype=torch.int32).view(torch.uint8)
SLOW, FAST = 10.0, 1e12


class Counting(LosslessCodec):
    """The real codec; counts how often it was tried."""

    name = CodecName.zstd
    on_device = False

    def __init__(self) -> None:
        made = make_codec(CodecName.zstd)
        assert made is not None
        self._codec, self.tried = made, 0

    def compress(self, source: torch.Tensor, out: torch.Tensor) -> int | None:
        self.tried += 1
        return self._codec.compress(source, out)

    def decompress(self, source: torch.Tensor, out: torch.Tensor) -> None:
        self._codec.decompress(source, out)


def test_verdicts() -> None:
    worth = Worth(Counting())
    assert worth.judge(1, ORDER, None) is CodecOutcome.LINK_UNKNOWN
    assert worth.judge(1, ORDER, SLOW) is None
    assert worth.judge(1, ORDER, FAST) is CodecOutcome.LINK_FAST
    assert worth.judge(2, NOISE, SLOW) is CodecOutcome.NO_GAIN


def test_a_sample_leaves_the_payload_alone_and_serves_for_a_while() -> None:
    codec, payload = Counting(), ORDER.clone()
    worth = Worth(codec)
    for _ in range(1 + JUDGED_BETWEEN_SAMPLES):
        assert worth.judge(1, payload, SLOW) is None
    assert codec.tried == 1
    worth.judge(1, payload, SLOW)
    assert codec.tried == 2
    worth.judge(2, payload, SLOW)  # another kind
    assert codec.tried == 3
    assert torch.equal(payload, ORDER)


def test_whole_payloads_correct_the_sample() -> None:
    worth = Worth(Counting())
    worth.judge(1, ORDER, SLOW)
    for _ in range(30):  # it looked compressible at four places only
        worth.compressed(1, 1000, 1000, 1e-3)
    estimate = worth.estimate(1)
    assert estimate is not None
    assert estimate.ratio == pytest.approx(1.0, abs=1e-3)
    assert estimate.compress == pytest.approx(1e6, rel=0.01)
    assert worth.judge(1, ORDER, SLOW) is CodecOutcome.NO_GAIN
    worth.compressed(9, 1000, 1, 1e-3)  # of a kind that nobody judged
    assert worth.estimate(9) is None


@given(
    ratio=st.floats(0.01, 1.5),
    compress=st.floats(1e3, 1e12),
    decompress=st.floats(1e3, 1e12),
    link=st.floats(1, 1e12),
)
def test_break_even_is_where_both_ways_take_equally_long(
    ratio: float, compress: float, decompress: float, link: float
) -> None:
    estimate = Estimate(ratio, compress, decompress)
    plain, compressed = 1 / link, ratio / link + 1 / compress + 1 / decompress
    if not math.isclose(plain, compressed, rel_tol=1e-9):
        assert (link < estimate.break_even()) == (compressed < plain)


@pytest.mark.parametrize("size", [1, 100, 64 * 1024, 64 * 1024 + 1, 300_000])
def test_payloads_of_any_size_can_be_sampled(size: int) -> None:
    codec = make_codec(CodecName.zstd)
    assert codec is not None
    estimate = measure(codec, NOISE[:size])
    assert estimate.ratio > 0.9
    assert estimate.compress > 0
    assert estimate.decompress > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("extra", [0, 256, 512])
def test_a_sample_says_what_the_whole_payload_comes_to(dtype: torch.dtype, extra: int) -> None:
    rows = torch.randn((1 << 22) // dtype.itemsize, generator=torch.Generator().manual_seed(2)).to(dtype)
    payload = torch.cat((rows.view(torch.uint8), torch.zeros(extra, dtype=torch.uint8)))
    codec = make_codec(CodecName.zstd, dtype.itemsize)
    assert codec is not None
    left = codec.compress(payload, torch.empty_like(payload))
    assert left is not None
    assert measure(codec, payload).ratio == pytest.approx(left / payload.numel(), abs=0.05)


def test_links_by_peer_age_and_forget() -> None:
    now = 100.0
    links = PeerLinks(lambda: now)
    assert links.estimate("a") is None
    links.sample("a", 2e6, 0.5, False)
    links.sample("b", 2e6, 0.1, True)  # SGLang's own path
    assert links.estimate("a") == pytest.approx(4e6)
    assert links.estimate("b") is None
    now += MAX_AGE_SECONDS + 1
    assert links.estimate("a") is None
