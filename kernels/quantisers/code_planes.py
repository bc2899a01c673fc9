"""How codes of n bits lie in bytes.

A code is cut, from its least significant bits up, into planes of 4, 2 and 1 bits in that order, as n needs: 3 = 2 + 1,
5 = 4 + 1, 6 = 4 + 2; codes of 8 bits are bytes. The planes of the codes of one (row, head) follow one another, each of
``dim * width / 8`` bytes; element j of a plane starts at bit ``(j * width) % 8`` of byte ``j * width // 8``, the least
significant bit counting as 0.
"""

from __future__ import annotations

import torch

_WIDTHS = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (8,)}
# A word takes as many codes, one a byte, as lie in one byte of a plane.
_WORDS = {4: torch.int16, 2: torch.int32, 1: torch.int64}
_LOW_BITS = {4: 0x0F0F, 2: 0x03030303, 1: 0x0101010101010101}


def plane_widths(bits: int) -> tuple[int, ...]:
    """Bits of the planes of codes of ``bits`` (2, 3, 4, 5, 6 or 8) bits, in their order."""
    return _WIDTHS[bits]


def dim_multiple(bits: int) -> int:
    """What a head dimension must be a multiple of, so that each plane is whole bytes."""
    return 8 // min(_WIDTHS[bits])


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack uint8 codes below ``2^bits``, [..., dim], into the bytes of their planes, uint8 [..., dim * bits / 8]."""
    codes = codes.contiguous()
    widths = _WIDTHS[bits]
    if len(widths) == 1:
        return _pack_plane(codes, bits)
    low, high = widths
    return torch.cat((_pack_plane(codes & (1 << low) - 1, low), _pack_plane(codes >> low, high)), dim=-1)


def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Undo `pack`; returns uint8 codes [..., dim]."""
    widths = _WIDTHS[bits]
    if len(widths) == 1:
        return _unpack_plane(packed, bits)
    low, high = widths
    split = packed.shape[-1] * low // bits
    codes = _unpack_plane(packed[..., split:], high)
    return (codes << low).bitwise_or_(_unpack_plane(packed[..., :split], low))


def _pack_plane(codes: torch.Tensor, width: int) -> torch.Tensor:
    if width == 8:
        return codes
    words = codes.view(_WORDS[width])
    # Each step brings the codes of the upper half of a word beside those of the lower half, for all halves at once.
    shift, steps = 8 - width, (8 // width).bit_length() - 1
    for step in range(steps):
        words = words | words >> (shift << step)
    return words.to(torch.int8).view(torch.uint8)


def _unpack_plane(packed: torch.Tensor, width: int) -> torch.Tensor:
    if width == 8:
        return packed
    words = packed.to(_WORDS[width]).contiguous()
    shift, steps = 8 - width, (8 // width).bit_length() - 1
    for step in reversed(range(steps)):
        words = (words << (shift << step)).bitwise_or_(words)
    return words.bitwise_and_(_LOW_BITS[width]).view(torch.uint8)
