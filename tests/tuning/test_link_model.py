"""The link model as a specification: limits, monotony, and where compression stops paying."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spectrumkv_sglang.tuning.fixed_cost import MeasuredTransfer, fit_fixed_cost, without_host_time
from spectrumkv_sglang.tuning.link_model import (
    Codec,
    FixedCost,
    LinkModelError,
    Transfer,
    break_even,
    bytes_per_second,
    native_seconds,
    pipelined_break_even,
    pipelined_seconds,
    sequential_seconds,
)

BANDWIDTHS = st.floats(1e6, 1e12)
HOST_SECONDS = st.one_of(st.just(0.0), st.floats(1e-6, 1e-2))


@st.composite
def codecs(draw: st.DrawFn, most_b: float = 0.95) -> Codec:
    speeds = st.floats(1e8, 1e13)
    return Codec(draw(st.floats(0.05, most_b)), draw(speeds), draw(speeds), draw(HOST_SECONDS), draw(HOST_SECONDS))


@st.composite
def transfers(draw: st.DrawFn) -> Transfer:
    chunks = draw(st.integers(1, 8))
    return Transfer(draw(st.floats(1e4, 1e11)), chunks, chunks * draw(st.integers(1, 200)))


FIXED = st.builds(FixedCost, HOST_SECONDS, HOST_SECONDS)


def test_the_published_formula() -> None:
    """KVServe: T = V / S + V / (B cr), and B* = (1 - 1 / cr) S."""
    codec = Codec(b=0.25, pack_bytes_per_second=200e9, unpack_bytes_per_second=200e9)
    assert codec.speed == pytest.approx(100e9)
    assert break_even(codec) == pytest.approx(75e9)
    one_gigabyte = Transfer(1e9)
    assert sequential_seconds(one_gigabyte, 10e9, codec) == pytest.approx(1e9 / 100e9 + 1e9 * 0.25 / 10e9)


def test_a_pipeline_of_four_payloads_by_hand() -> None:
    codec = Codec(b=0.5, pack_bytes_per_second=1e9, unpack_bytes_per_second=2e9, pack_host_seconds=0.001)
    transfer = Transfer(4e6, payloads=4)
    # A payload: pack 1 ms + 1 ms of the host, write .5 MB at 100 MB/s = 5 ms, unpack .5 ms.
    assert pipelined_seconds(transfer, 100e6, codec) == pytest.approx(0.002 + 4 * 0.005 + 0.0005)
    # On a link of 1 GB/s packing holds it up: 2 ms each.
    assert pipelined_seconds(transfer, 1e9, codec) == pytest.approx(4 * 0.002 + 0.0005 + 0.0005)
    with_costs = pipelined_seconds(transfer, 1e9, codec, FixedCost(chunk_seconds=0.01, payload_seconds=0.001))
    assert with_costs == pytest.approx(0.009 + 0.01 + 4 * 0.001)


@given(transfers(), BANDWIDTHS, codecs(), FIXED)
def test_overlap_never_costs_time(transfer: Transfer, bandwidth: float, codec: Codec, fixed: FixedCost) -> None:
    pipelined = pipelined_seconds(transfer, bandwidth, codec, fixed)
    assert pipelined <= sequential_seconds(transfer, bandwidth, codec, fixed) * (1 + 1e-9)
    # No stage can be left out, and the link must carry every byte.
    assert pipelined >= transfer.native_bytes * codec.b / bandwidth * (1 - 1e-9)
    assert pipelined >= transfer.native_bytes / codec.pack_bytes_per_second * (1 - 1e-9)


@given(transfers(), BANDWIDTHS, st.floats(1.001, 100), codecs(), FIXED)
def test_a_faster_link_is_never_slower(
    transfer: Transfer, bandwidth: float, factor: float, codec: Codec, fixed: FixedCost
) -> None:
    for seconds in (sequential_seconds, pipelined_seconds):
        assert seconds(transfer, bandwidth * factor, codec, fixed) <= seconds(transfer, bandwidth, codec, fixed)
    size = transfer.native_bytes
    assert native_seconds(size, bandwidth * factor) < native_seconds(size, bandwidth)


@given(transfers(), codecs(), FIXED)
def test_both_are_equal_at_the_break_even(transfer: Transfer, codec: Codec, fixed: FixedCost) -> None:
    limit = pipelined_break_even(transfer, codec, fixed)
    size = transfer.native_bytes
    assert pipelined_seconds(transfer, limit, codec, fixed) == pytest.approx(native_seconds(size, limit), rel=1e-6)
    assert pipelined_seconds(transfer, limit * 0.9, codec, fixed) < native_seconds(size, limit * 0.9)
    assert pipelined_seconds(transfer, limit * 1.1, codec, fixed) > native_seconds(size, limit * 1.1)


@given(st.floats(1e4, 1e11), codecs())
def test_one_payload_without_fixed_costs_breaks_even_as_a_sequential_transfer(size: float, codec: Codec) -> None:
    kernels = without_host_time(codec)
    assert pipelined_break_even(Transfer(size), kernels) == pytest.approx(break_even(kernels))


@given(transfers(), codecs(), FIXED)
def test_on_a_slow_link_only_bytes_count(transfer: Transfer, codec: Codec, fixed: FixedCost) -> None:
    everything_else = sequential_seconds(transfer, 1e300, codec, fixed)
    bandwidth = transfer.native_bytes / (everything_else * 1e6)  # the native transfer takes a million times as long
    ratio = pipelined_seconds(transfer, bandwidth, codec, fixed) / native_seconds(transfer.native_bytes, bandwidth)
    assert ratio == pytest.approx(codec.b, rel=1e-3)


def test_compression_that_compresses_nothing_never_pays() -> None:
    packed = Codec(b=1.001, pack_bytes_per_second=1e12, unpack_bytes_per_second=1e12)
    assert break_even(packed) == 0
    assert pipelined_break_even(Transfer(1e9, payloads=60), packed) == 0


def test_fragments_cost_the_native_transfer() -> None:
    """Every block costs about 20 us over TCP; 8,192 scattered rows of 64 buffers make half a million of them."""
    assert native_seconds(1e9, 1e9, blocks=8192 * 64, block_seconds=20e-6) == pytest.approx(1 + 10.48576)


@pytest.mark.parametrize(
    ("native_bytes", "b", "chunks", "payloads"),
    [(64e6, 0.5, 1, 2), (65e6, 0.5, 1, 2), (70e6, 0.5, 1, 3), (64e6, 0.5, 4, 4), (1, 0.5, 1, 1)],
)
def test_a_transfer_is_cut_into_slots(native_bytes: float, b: float, chunks: int, payloads: int) -> None:
    transfer = Transfer.in_slots(native_bytes, b, chunks=chunks)
    assert (transfer.chunks, transfer.payloads) == (chunks, payloads)


@given(st.floats(0, 0.1), st.floats(0, 0.001), st.lists(transfers(), min_size=2, max_size=12), codecs())
def test_a_cost_that_is_in_the_points_is_found(
    chunk_seconds: float, payload_seconds: float, moved: list[Transfer], codec: Codec
) -> None:
    true = FixedCost(chunk_seconds, payload_seconds)
    points = [MeasuredTransfer(t, 1e9, codec, pipelined_seconds(t, 1e9, codec, true)) for t in moved]
    found = fit_fixed_cost(points)
    for point in points:
        assert point.predicted(found) == pytest.approx(point.seconds, rel=1e-3)


def test_a_cost_is_never_negative() -> None:
    codec = Codec(0.5, 1e9, 1e9)
    sooner = [MeasuredTransfer(Transfer(1e9), 1e9, codec, 0.5), MeasuredTransfer(Transfer(2e9), 1e9, codec, 1.1)]
    assert fit_fixed_cost(sooner) == FixedCost(0.0, 0.0)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_nonsense_is_refused(value: float) -> None:
    codec = Codec(0.5, 1e12, 1e12)
    attempts = [
        ("b", lambda: Codec(value, 1.0, 1.0)),
        ("pack_bytes_per_second", lambda: Codec(0.5, value, 1.0)),
        ("unpack_bytes_per_second", lambda: Codec(0.5, 1.0, value)),
        ("native_bytes", lambda: Transfer(value)),
        ("native_bytes", lambda: native_seconds(value, 1.0)),
        ("bandwidth", lambda: native_seconds(1.0, value)),
        ("bandwidth", lambda: pipelined_seconds(Transfer(1.0), value, codec)),
        ("bandwidth", lambda: sequential_seconds(Transfer(1.0), value, codec)),
        ("payload_bytes", lambda: Transfer.in_slots(1.0, 0.5, payload_bytes=value)),
        ("gigabits_per_second", lambda: bytes_per_second(value)),
    ]
    for name, attempt in attempts:
        with pytest.raises(LinkModelError, match=f"{name} is .*expected a finite number above 0"):
            attempt()


def test_nonsense_counts_and_costs_are_refused() -> None:
    for chunks, payloads in ((0, 1), (2, 1), (-1, 5)):
        with pytest.raises(LinkModelError, match="expected a chunk"):
            Transfer(1.0, chunks, payloads)
    with pytest.raises(LinkModelError, match="chunk_seconds is -1"):
        FixedCost(chunk_seconds=-1.0)
    with pytest.raises(LinkModelError, match="pack_host_seconds is -1"):
        Codec(0.5, 1.0, 1.0, pack_host_seconds=-1.0)
    with pytest.raises(LinkModelError, match="block_seconds is nan"):
        native_seconds(1.0, 1.0, blocks=1, block_seconds=math.nan)
    with pytest.raises(LinkModelError, match="no measured transfer"):
        fit_fixed_cost([])
