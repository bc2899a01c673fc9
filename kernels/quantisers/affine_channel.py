"""Asymmetric integers of n bits with one scale and one zero per (block of 128 rows, head, channel)."""

from __future__ import annotations

import torch

from spectrumkv_sglang.kernels.precision import CHANNEL_BLOCK_ROWS
from spectrumkv_sglang.kernels.quantisers import affine, code_planes
from spectrumkv_sglang.kernels.quantisers.base import Quantiser
from spectrumkv_sglang.kernels.quantisers.cut_ranges import least_error_range

_DISTORTION = {2: 0.1213, 3: 4.58e-2, 4: 1.0e-2, 5: 2.33e-3, 6: 5.64e-4, 8: 3.45e-5}


class AffineChannelQuantiser(Quantiser):
    """`affine.encode` along the rows of each block: the per-channel quantisation of KIVI (arXiv 2402.02750).

    Keys have channels that are large in every token; a scale of their own leaves the other channels their resolution.
    The rows are cut into blocks of 128 from the first on, the last block may be shorter. A row does not decode without
    the others of its block, and one outlier costs its channel of the block: rows that must arrive whatever lies beside
    them travel in another precision. Parameters [blocks, heads, 2, dim]: scales of all channels, then zeros. Codes lie
    in `code_planes`. Codes of 2 bits cut the ends of a channel's range (`cut_ranges.least_error_range`).

    Args:
        bits: of a code: 2, 3, 4, 5, 6 or 8.
    """

    block_rows = CHANNEL_BLOCK_ROWS

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.dim_multiple = code_planes.dim_multiple(bits)
        self.relative_distortion = _DISTORTION[bits]
        self._rule: affine.ParameterRule = least_error_range if bits == 2 else affine.full_range

    def code_width(self, head_dim: int, native_itemsize: int) -> int:
        return head_dim * self.bits // 8

    def param_shape(self, rows: int, heads: int, head_dim: int) -> tuple[int, ...]:
        return -(-rows // self.block_rows), heads, 2, head_dim

    def quantise(self, x: torch.Tensor, near_normal: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        self.check_dim(x.shape[-1])
        codes = x.new_empty((*x.shape[:2], self.code_width(x.shape[2], x.itemsize)), dtype=torch.uint8)
        params = x.new_empty(self.param_shape(*x.shape), dtype=torch.float16)
        for rows, blocks in self._parts(x.shape[0]):
            part, parameters = affine.encode(self._by_block(x[rows]), 1, self.bits, self._rule)
            codes[rows] = code_planes.pack(part, self.bits).flatten(0, 1)
            params[blocks, :, 0], params[blocks, :, 1] = (parameter.squeeze(1) for parameter in parameters)
        return codes, params

    def dequantise(self, codes: torch.Tensor, params: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        values = codes.new_empty((*codes.shape[:2], codes.shape[2] * 8 // self.bits), dtype=dtype)
        for rows, blocks in self._parts(codes.shape[0]):
            parameters = affine.Parameters(params[blocks, None, :, 0], params[blocks, None, :, 1])
            part = code_planes.unpack(self._by_block(codes[rows]), self.bits)
            values[rows] = affine.decode(part, parameters, dtype).flatten(0, 1)
        return values

    def error_bound(self, x: torch.Tensor, near_normal: bool = False) -> torch.Tensor:
        bound = torch.empty_like(x, dtype=torch.float32)
        for rows, _ in self._parts(x.shape[0]):
            blocks = self._by_block(x[rows])
            if self._rule is affine.full_range:
                part = affine.error_bound(blocks, 1, self.bits)
            else:
                part = affine.cut_error_bound(blocks, 1, self.bits, self._rule)
            bound[rows] = part.expand_as(blocks).flatten(0, 1)
        return bound

    def _parts(self, rows: int) -> list[tuple[slice, slice]]:
        """Rows and blocks of all full blocks together, and of the shorter one that may follow."""
        blocks = rows // self.block_rows
        full = blocks * self.block_rows
        parts = [(slice(full), slice(blocks))] if full else []
        return parts + ([(slice(full, rows), slice(blocks, blocks + 1))] if full < rows else [])

    def _by_block(self, part: torch.Tensor) -> torch.Tensor:
        """[blocks, rows of a block, heads, dim] of the rows of one part."""
        return part.unflatten(0, (-1, min(self.block_rows, part.shape[0])))
