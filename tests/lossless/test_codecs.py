"""Lossless codecs: what goes in comes back, and nothing else is believed."""

from __future__ import annotations

import sys

import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from spectrumkv_sglang.errors import SpectrumKVError
from spectrumkv_sglang.lossless.codec import CodecName, LosslessCodec, installed_codecs, make_codec
from spectrumkv_sglang.payload.errors import PayloadError

EVERY = sorted(set(CodecName) - {CodecName.none})
ELEMENT_BYTES = (1, 2, 4)


def bytes_of(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def made(name: CodecName, element_bytes: int = 1) -> LosslessCodec:
    codec = make_codec(name, element_bytes)
    assert codec is not None
    return codec


@pytest.mark.parametrize("element_bytes", ELEMENT_BYTES)
@pytest.mark.parametrize("name", EVERY)
@given(data=st.binary(min_size=1, max_size=4096), repeated=st.integers(1, 40))
def test_what_goes_in_comes_back(name: CodecName, element_bytes: int, data: bytes, repeated: int) -> None:
    codec, source = made(name, element_bytes), bytes_of(data * repeated)
    out = torch.empty(source.numel() * 2 + 1024, dtype=torch.uint8)
    left = codec.compress(source, out)
    assert left is not None
    back = torch.empty_like(source)
    made(name).decompress(out[:left], back)  # the payload itself says how it was cut
    assert torch.equal(back, source)


@pytest.mark.parametrize("name", EVERY)
def test_a_payload_shrinks_in_its_own_place_or_stays_as_it_is(name: CodecName) -> None:
    codec = made(name)
    compressible = torch.arange(100_000, dtype=torch.int32).view(torch.uint8)
    before = compressible.clone()
    left = codec.compress(compressible, compressible)
    assert left is not None
    assert left < 0.7 * before.numel()
    back = torch.empty_like(before)
    codec.decompress(compressible[:left].clone(), back)
    assert torch.equal(back, before)

    noise = torch.randint(0, 256, (100_000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    kept = noise.clone()
    assert codec.compress(noise, noise) is None
    assert torch.equal(noise, kept)


@pytest.mark.parametrize("name", EVERY)
@given(data=st.binary(max_size=300), cut=st.integers(0, 300), flipped=st.integers(0, 2**16))
def test_damaged_data_is_refused_or_has_the_announced_length(
    name: CodecName, data: bytes, cut: int, flipped: int
) -> None:
    """What a flipped bit does inside the right length is the checksum's to find."""
    codec, source = made(name), bytes_of(bytes(range(250)) * 4)
    whole = torch.empty(4096, dtype=torch.uint8)
    left = codec.compress(source, whole)
    assert left is not None
    good = whole[:left].clone()
    flips = good.clone()
    flips[flipped % left] ^= 1 << (flipped % 8)
    for damaged in (bytes_of(data), good[:cut], flips, torch.cat((good, bytes_of(b"x")))):
        out = torch.zeros(source.numel(), dtype=torch.uint8)
        try:
            codec.decompress(damaged, out)
        except PayloadError:
            assert not out.any()  # refused before anything was written
    for length in (source.numel() - 1, source.numel() + 1):
        with pytest.raises(PayloadError, match=f"expected {length} bytes inside, got {source.numel()}"):
            codec.decompress(good, torch.empty(length, dtype=torch.uint8))


def test_native_kv_shrinks_more_with_its_bytes_cut_apart() -> None:
    rows = torch.randn(1 << 16, generator=torch.Generator().manual_seed(1)).bfloat16().view(torch.uint8)
    out = torch.empty(rows.numel(), dtype=torch.uint8)
    whole, cut = (made(CodecName.zstd, planes).compress(rows, out) for planes in (1, 2))
    assert whole is not None
    assert cut is not None
    assert cut < whole < 0.8 * rows.numel()
    with pytest.raises(PayloadError, match=r"expected to begin with one of \(1, 2, 4\), got \[3\]"):
        made(CodecName.zstd).decompress(bytes_of(b"\x03" + bytes(20)), torch.empty(64, dtype=torch.uint8))
    with pytest.raises(ValueError, match="got 8"):
        make_codec(CodecName.zstd, 8)


def test_a_zstd_frame_that_claims_more_is_refused_before_anything_is_allocated() -> None:
    claims_a_terabyte = b"\x28\xb5\x2f\xfd" + bytes([0xE0]) + (2**40).to_bytes(8, "little") + b"\x01\x00\x00"
    assert zstandard.get_frame_parameters(claims_a_terabyte).content_size == 2**40
    with pytest.raises(PayloadError, match=f"expected 64 bytes inside, got {2**40}"):
        made(CodecName.zstd).decompress(bytes_of(b"\x01" + claims_a_terabyte), torch.empty(64, dtype=torch.uint8))


ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
SIZE = 64 * 1024
FRAME = zstandard.ZstdCompressor().compress(bytes(SIZE))
RLE_BLOCKS = ((1 << 1) | (128 * 1024) << 3).to_bytes(3, "little") + b"A"
HOSTILE_FRAMES = {
    "no size": (zstandard.ZstdCompressor(write_content_size=False).compress(bytes(SIZE)), "size in the frame's header"),
    "a dictionary": (ZSTD_MAGIC + b"\xe3" + (77).to_bytes(4, "little") + SIZE.to_bytes(8, "little"), "zstd payload: "),
    "skipped": (b"\x50\x2a\x4d\x18" + SIZE.to_bytes(4, "little") + bytes(SIZE), "zstd payload: "),
    "skipped first": (b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + bytes(4) + FRAME, "got 4"),
    "empty first": (zstandard.ZstdCompressor().compress(b"") + FRAME, "got 0"),
    "twice": (FRAME + FRAME, "unused data"),
    "a window of 2 TiB": (ZSTD_MAGIC + b"\xc0\xf8" + SIZE.to_bytes(8, "little"), "zstd payload: "),
    "a bomb": (ZSTD_MAGIC + b"\xe0" + SIZE.to_bytes(8, "little") + RLE_BLOCKS * 8000, "zstd payload: "),
    "nothing": (b"", "zstd payload: "),
}


@pytest.mark.parametrize("what", HOSTILE_FRAMES)
def test_a_zstd_frame_that_no_codec_of_ours_makes_is_refused(what: str) -> None:
    frame, said = HOSTILE_FRAMES[what]
    for planes in ELEMENT_BYTES:
        out = torch.zeros(SIZE, dtype=torch.uint8)
        with pytest.raises(PayloadError, match=said):
            made(CodecName.zstd).decompress(bytes_of(bytes([planes]) + frame), out)
        assert not out.any()


def test_a_codec_without_its_package_is_named_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    assert make_codec(CodecName.none) is None
    assert "zstd" in installed_codecs()
    monkeypatch.setitem(sys.modules, "zstandard", None)
    monkeypatch.delitem(sys.modules, "spectrumkv_sglang.lossless.zstd", raising=False)
    assert installed_codecs() == {}
    with pytest.raises(SpectrumKVError, match=r"zstd needs the Python package zstandard .*: pip install .*\[codec\]"):
        make_codec(CodecName.zstd)
