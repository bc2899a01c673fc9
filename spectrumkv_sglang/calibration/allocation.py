"""The precision map of least expected KL divergence whose bytes on the wire keep to a budget."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from spectrumkv_sglang.calibration.candidates import Candidates
from spectrumkv_sglang.calibration.errors import CalibrationError
from spectrumkv_sglang.calibration.expected_cost import ExpectedCost, Granularity
from spectrumkv_sglang.calibration.lagrangian import Chain, Group
from spectrumkv_sglang.kernels.precision import Precision
from spectrumkv_sglang.kernels.quantisers import quantiser_for
from spectrumkv_sglang.payload.geometry import KVGeometry
from spectrumkv_sglang.payload.precision_table import PrecisionTable
from spectrumkv_sglang.profiles.chunk_plan import ChunkPlan, plan_chunk
from spectrumkv_sglang.profiles.tier import TIER_COUNT, Tier
from spectrumkv_sglang.transfer.chunk_planner import CHUNK_MESSAGE_BYTES, SUBCHUNK_MESSAGE_BYTES

DEFAULT_SLOT_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True)
class NominalChunk:
    """The chunk that a map's bytes are stated for, sinks, prologues, alignment and messages counted.

    Attributes:
        geometry: of the pool.
        tokens: of the chunk.
        sink_tokens: first tokens, which travel native.
        slot_bytes: of a landing slot.
    """

    geometry: KVGeometry
    tokens: int = 8192
    sink_tokens: int = 4
    slot_bytes: int = DEFAULT_SLOT_BYTES

    @property
    def low_tokens(self) -> int:
        """Tokens that travel as the map says."""
        return self.tokens - self.sink_tokens

    def wire_ratio(self, cells: NDArray[np.uint8], transforms: NDArray[np.uint8]) -> float:
        """Wire / native bytes when all tokens but the sinks travel as ``cells`` (uint8 [layers, K|V, kv_heads]) say."""
        return self._plan(cells, transforms).achieved

    def cell_bytes(self, precision: Precision, kv: int) -> int:
        """Codes and parameters of one head's keys (0) or values (1) of one layer, without alignment."""
        quantiser, dim = quantiser_for(precision), self.geometry.dim_of(kv)
        codes = quantiser.code_bytes(self.low_tokens, 1, dim, self.geometry.itemsize)
        return codes + quantiser.param_bytes(self.low_tokens, 1, dim)

    def _plan(self, cells: NDArray[np.uint8], transforms: NDArray[np.uint8]) -> ChunkPlan:
        tiers = np.full((TIER_COUNT, *cells.shape), Precision.NATIVE, dtype=np.uint8)
        tiers[Tier.LOW] = cells
        table = PrecisionTable(tiers, transforms)
        sinks = np.arange(self.tokens) < self.sink_tokens
        # No budget: all that is not forced is LOW.
        return plan_chunk(
            np.ones(self.tokens, np.float32),
            self.geometry,
            table,
            0.0,
            self.slot_bytes,
            sinks,
            (Tier.HIGH, Tier.LOW),
            SUBCHUNK_MESSAGE_BYTES + CHUNK_MESSAGE_BYTES + len(table.to_bytes()),
        )


@dataclass(frozen=True)
class Allocation:
    """A precision map.

    Attributes:
        granularity: how finely it tells cells apart.
        candidates: what it was chosen from.
        cells: uint8 [layers, K|V, kv_heads] of `Precision` values.
        expected: KL divergence that each cell is expected to add, nats, float64 [layers, K|V, kv_heads].
        wire_ratio: wire / native bytes of the nominal chunk.
    """

    granularity: Granularity
    candidates: Candidates
    cells: NDArray[np.uint8]
    expected: NDArray[np.float64]
    wire_ratio: float

    @property
    def expected_kl(self) -> float:
        """Sum over all cells, nats a token."""
        return float(self.expected.sum())

    @property
    def transforms(self) -> NDArray[np.uint8]:
        """uint8 [layers, K|V], as a precision table takes them."""
        return transforms_of(self.candidates, len(self.cells))

    def stepped_up(self) -> NDArray[np.uint8]:
        """The map with every cell one candidate up, as far as there is one."""
        up = self.cells.copy()
        for index in np.ndindex(up.shape):
            up[index] = self.candidates.of(index[1]).step_up(Precision(int(up[index])))
        return up


def allocate(expected: ExpectedCost, candidates: Candidates, chunk: NominalChunk, target: float) -> Allocation:
    """The map of least expected KL whose nominal chunk takes at most ``target`` of its native bytes.

    Args:
        expected: of the same candidates.
        candidates: precisions to choose from.
        chunk: whose bytes are counted.
        target: b, wire / native bytes.

    Raises:
        CalibrationError: even the smallest map takes more; names the least b.
    """
    geometry = chunk.geometry
    slices = list(_groups(expected.granularity, geometry))
    groups = []
    for layers, kv, heads in slices:
        cost = expected.of(kv)[layers, heads].sum(axis=(0, 1))
        together = np.empty((geometry.layers, geometry.kv_heads))[layers, heads].size
        size = [together * chunk.cell_bytes(precision, kv) for precision in candidates.of(kv).precisions]
        groups.append(Group(np.array(size, dtype=np.int64), cost))
    transforms = transforms_of(candidates, geometry.layers)

    def cells_of(chosen: list[int]) -> NDArray[np.uint8]:
        cells = np.empty((geometry.layers, 2, geometry.kv_heads), dtype=np.uint8)
        for (layers, kv, heads), choice in zip(slices, chosen, strict=True):
            cells[layers, kv, heads] = candidates.of(kv).precisions[choice]
        return cells

    def ratio(chosen: list[int]) -> float:
        return chunk.wire_ratio(cells_of(chosen), transforms)

    require_reachable(candidates, chunk, target)
    chain = Chain(groups)
    chosen = chain.best(lambda chosen: ratio(chosen) <= target)
    cells = cells_of(chosen)
    return Allocation(expected.granularity, candidates, cells, expected_of(cells, expected, candidates), ratio(chosen))


def require_reachable(candidates: Candidates, chunk: NominalChunk, target: float) -> None:
    """Raise CalibrationError if even the cheapest precisions take more than ``target``; names the least b."""
    geometry = chunk.geometry
    cells = np.empty((geometry.layers, 2, geometry.kv_heads), dtype=np.uint8)
    for kv in (0, 1):
        cells[:, kv] = candidates.of(kv).precisions[0]
    least = chunk.wire_ratio(cells, transforms_of(candidates, geometry.layers))
    if least > target:
        raise CalibrationError(
            f"--budget {target:g}: the smallest map takes {least:.4f} of native bytes in chunks of {chunk.tokens:,} "
            f"tokens; give at least {np.ceil(least * 1e4) / 1e4:.4f}, or narrower precisions with --keys and --values"
        )


def transforms_of(candidates: Candidates, layers: int) -> NDArray[np.uint8]:
    """uint8 [layers, K|V], as a precision table takes them."""
    return np.array([[candidates.keys.transform, candidates.values.transform]] * layers, dtype=np.uint8)


def expected_of(cells: NDArray[np.uint8], expected: ExpectedCost, candidates: Candidates) -> NDArray[np.float64]:
    """KL divergence that each cell of a map is expected to add, float64 [layers, K|V, kv_heads]."""
    found = np.empty(cells.shape)
    for layer, kv, head in np.ndindex(cells.shape):
        choice = candidates.of(kv).precisions.index(Precision(int(cells[layer, kv, head])))
        found[layer, kv, head] = expected.of(kv)[layer, head, choice]
    return found


def _groups(granularity: Granularity, geometry: KVGeometry) -> Iterator[tuple[slice, int, slice]]:
    """(layers, K|V, heads) of the cells that take one precision."""
    everything = slice(None)
    if granularity is Granularity.PARTS:
        yield from ((everything, kv, everything) for kv in (0, 1))
    elif granularity is Granularity.LAYERS:
        yield from ((slice(layer, layer + 1), kv, everything) for layer, kv in product(range(geometry.layers), (0, 1)))
    else:
        for layer, kv, head in product(range(geometry.layers), (0, 1), range(geometry.kv_heads)):
            yield slice(layer, layer + 1), kv, slice(head, head + 1)
