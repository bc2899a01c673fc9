"""Asymmetric INT4 with one scale and one zero per (block of 128 rows, head, channel)."""

from __future__ import annotations

import torch

from spectrumkv_sglang.kernels.precision import CHANNEL_BLOCK_ROWS
from spectrumkv_sglang.kernels.quantisers import affine_int4
from spectrumkv_sglang.kernels.quantisers.base import Quantiser


class Int4ChannelQuantiser(Quantiser):
    """`affine_int4.encode` along the rows of each block: the per-channel quantisation of KIVI (arXiv 2402.02750).

    Keys have channels that are large in every token; a scale of their own leaves the other channels their resolution.
    The rows are cut into blocks of 128 from the first on, the last block may be shorter. A row does not decode without
    the others of its block, and one outlier costs its channel of the block: rows that must arrive whatever lies beside
    them travel in another precision. Parameters [blocks, heads, 2, dim]: scales of all channels, then zeros.
    """

    block_rows = CHANNEL_BLOCK_ROWS
    relative_distortion = 1.0e-2

    def code_width(self, head_dim: int, native_itemsize: int) -> int:
        return head_dim // 2

    def param_shape(self, rows: int, heads: int, head_dim: int) -> tuple[int, ...]:
        return -(-rows // self.block_rows), heads, 2, head_dim

    def quantise(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        codes = x.new_empty((*x.shape[:2], x.shape[2] // 2), dtype=torch.uint8)
        params = x.new_empty(self.param_shape(*x.shape), dtype=torch.float16)
        for rows, blocks in self._parts(x.shape[0]):
            part, scale, zero = affine_int4.encode(self._by_block(x[rows]), 1)
            codes[rows] = part.flatten(0, 1)
            params[blocks, :, 0], params[blocks, :, 1] = scale.squeeze(1), zero.squeeze(1)
        return codes, params

    def dequantise(self, codes: torch.Tensor, params: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        values = codes.new_empty((*codes.shape[:2], codes.shape[2] * 2), dtype=dtype)
        for rows, blocks in self._parts(codes.shape[0]):
            scale, zero = params[blocks, None, :, 0], params[blocks, None, :, 1]
            values[rows] = affine_int4.decode(self._by_block(codes[rows]), scale, zero, dtype).flatten(0, 1)
        return values

    def error_bound(self, x: torch.Tensor) -> torch.Tensor:
        bound = torch.empty_like(x, dtype=torch.float32)
        for rows, _ in self._parts(x.shape[0]):
            blocks = self._by_block(x[rows])
            bound[rows] = affine_int4.error_bound(blocks, 1).expand_as(blocks).flatten(0, 1)
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
