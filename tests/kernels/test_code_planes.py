"""Codes of n bits lie in bytes as the format says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spectrumkv_sglang.kernels.quantisers import code_planes


@pytest.mark.parametrize(
    ("bits", "codes", "packed"),
    [
        (2, [1, 2, 3, 0, 1, 2, 3, 0], [0b00_11_10_01, 0b00_11_10_01]),
        (3, [1, 6, 3, 0, 5, 2, 7, 4], [0b00_11_10_01, 0b00_11_10_01, 0b11010010]),
        (4, [0, 1, 2, 3, 12, 13, 14, 15], [0x10, 0x32, 0xDC, 0xFE]),
        (5, [1, 6, 11, 16, 21, 26, 31, 4], [0x61, 0x0B, 0xA5, 0x4F, 0b01111000]),
        (6, [1, 6, 11, 16, 21, 26, 31, 36], [0x61, 0x0B, 0xA5, 0x4F, 0b01_00_00_00, 0b10_01_01_01]),
        (8, [0, 1, 127, 128, 254, 255, 3, 9], [0, 1, 127, 128, 254, 255, 3, 9]),
    ],
)
def test_eight_codes_lie_in_these_bytes(bits: int, codes: list[int], packed: list[int]) -> None:
    assert code_planes.pack(torch.tensor(codes, dtype=torch.uint8), bits).tolist() == packed
    assert code_planes.unpack(torch.tensor(packed, dtype=torch.uint8), bits).tolist() == codes


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@given(octets=st.integers(1, 32), seed=st.integers(0, 2**31))
@settings(max_examples=20, deadline=None)
def test_planes_follow_one_another_each_little_end_first(bits: int, octets: int, seed: int) -> None:
    dim = octets * 8
    codes = torch.randint(0, 1 << bits, (3, 2, dim), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    packed = code_planes.pack(codes, bits)
    assert (packed.dtype, packed.shape) == (torch.uint8, (3, 2, dim * bits // 8))
    expected, shift = b"", 0
    for width in code_planes.plane_widths(bits):
        plane = sum(((code >> shift) & (1 << width) - 1) << j * width for j, code in enumerate(codes[1, 1].tolist()))
        expected += plane.to_bytes(dim * width // 8, "little")
        shift += width
    assert shift == bits
    assert bytes(packed[1, 1].tolist()) == expected
    assert torch.equal(code_planes.unpack(packed, bits), codes)


@pytest.mark.parametrize(("bits", "multiple"), [(2, 4), (3, 8), (4, 2), (5, 8), (6, 4), (8, 1)])
def test_the_narrowest_plane_decides_what_dimensions_fill_whole_bytes(bits: int, multiple: int) -> None:
    assert code_planes.dim_multiple(bits) == multiple
    codes = torch.full((1, multiple), (1 << bits) - 1, dtype=torch.uint8)
    assert torch.equal(code_planes.unpack(code_planes.pack(codes, bits), bits), codes)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_slices_pack_and_unpack_like_their_copies(bits: int) -> None:
    codes = torch.randint(0, 1 << bits, (4, 5, 48), dtype=torch.uint8)
    packed = code_planes.pack(codes, bits)
    assert torch.equal(code_planes.pack(codes[1:3, ::2], bits), packed[1:3, ::2])
    assert torch.equal(code_planes.unpack(packed[1:3, ::2], bits), codes[1:3, ::2])
