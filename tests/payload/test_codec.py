"""Packing and unpacking: errors within the bound, content alone decides the bytes, and checks come before writes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spectrumkv_sglang.kernels.checksum import payload_checksum
from spectrumkv_sglang.kernels.precision import Precision
from spectrumkv_sglang.kernels.quantisers import quantiser_for
from spectrumkv_sglang.payload.codec import (
    KVBuffers,
    pack_payload,
    pack_with_checksum,
    read_prologue,
    unpack_if_intact,
    unpack_payload,
    write_prologue,
)
from spectrumkv_sglang.payload.errors import PayloadError
from spectrumkv_sglang.payload.geometry import KVGeometry
from spectrumkv_sglang.payload.layout import PayloadLayout, plan_layout
from spectrumkv_sglang.payload.precision_table import PrecisionTable
from spectrumkv_sglang.payload.prologue import Prologue

GEOMETRIES = st.builds(
    KVGeometry,
    layers=st.integers(1, 3),
    kv_heads=st.integers(1, 4),
    head_dim=st.sampled_from([8, 24, 64]),
    v_head_dim=st.sampled_from([8, 40, 64]),
    page_size=st.just(1),
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
)
POOL_SLOTS = 288


@dataclass
class Chunk:
    """Random rows of a random pool."""

    buffers: KVBuffers
    pool_slots: torch.Tensor
    tiers: npt.NDArray[np.uint8]
    layout: PayloadLayout

    def pack(self, fill: int = 0) -> torch.Tensor:
        out = torch.full((self.layout.total_bytes,), fill, dtype=torch.uint8)
        pack_payload(self.buffers, self.pool_slots, self.tiers, self.layout, out)
        return out

    def blank_buffers(self) -> KVBuffers:
        return KVBuffers(
            [torch.full_like(x, 3.0) for x in self.buffers.k], [torch.full_like(x, 3.0) for x in self.buffers.v]
        )


def random_chunk(geometry: KVGeometry, seed: int, rows: int = 50, tier_count: int = 3, last_high: int = 0) -> Chunk:
    """Tier 0 holds precisions whose rows decode by themselves, as a profile's HIGH does; ``last_high`` rows have it."""
    numbers, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    values = numbers.choice([*Precision], (tier_count, geometry.layers, 2, geometry.kv_heads)).astype(np.uint8)
    values[0] = numbers.choice([p for p in Precision if quantiser_for(p).block_rows == 1], values[0].shape)
    table = PrecisionTable(values)
    tiers = numbers.integers(0, tier_count, rows).astype(np.uint8)
    tiers[rows - last_high :] = 0

    def pool(dim: int) -> torch.Tensor:
        shape = (POOL_SLOTS, geometry.kv_heads, dim)
        return (torch.randn(shape, generator=generator) * 3).to(getattr(torch, geometry.dtype))

    buffers = KVBuffers(
        [pool(geometry.head_dim) for _ in range(geometry.layers)],
        [pool(geometry.v_head_dim) for _ in range(geometry.layers)],
    )
    layout = plan_layout(geometry, table, np.bincount(tiers, minlength=tier_count).tolist())
    return Chunk(buffers, torch.randperm(POOL_SLOTS, generator=generator)[:rows], tiers, layout)


def small_chunk(rows: int = 50) -> Chunk:
    return random_chunk(KVGeometry(2, 3, 24, 40, 1, "float16"), seed=0, rows=rows)


@given(
    geometry=GEOMETRIES,
    seed=st.integers(0, 2**31),
    rows=st.one_of(st.integers(0, 90), st.integers(250, 280)),
    tier_count=st.integers(1, 4),
)
@settings(max_examples=60, deadline=None)
def test_rows_arrive_within_the_bound_of_their_precision(
    geometry: KVGeometry, seed: int, rows: int, tier_count: int
) -> None:
    chunk = random_chunk(geometry, seed, rows, tier_count)
    received = chunk.blank_buffers()
    unpack_payload(chunk.pack(), received, chunk.pool_slots, chunk.tiers, chunk.layout)
    others = torch.ones(POOL_SLOTS, dtype=torch.bool)
    others[chunk.pool_slots] = False
    for layer in range(geometry.layers):
        for kv in (0, 1):
            sent, got = chunk.buffers.of(layer, kv), received.of(layer, kv)
            assert bool((got[others] == 3.0).all())
            for tier, head in np.ndindex(tier_count, geometry.kv_heads):
                of_tier = chunk.pool_slots[torch.from_numpy(np.flatnonzero(chunk.tiers == tier))]
                want, arrived = sent[of_tier, head][:, None], got[of_tier, head][:, None]
                quantiser = quantiser_for(Precision(int(chunk.layout.table.values[tier, layer, kv, head])))
                assert bool(((arrived.double() - want.double()).abs() <= quantiser.error_bound(want)).all())


@given(geometry=GEOMETRIES, seed=st.integers(0, 2**31))
@settings(max_examples=20, deadline=None)
def test_each_segment_holds_its_rows_in_chunk_order(geometry: KVGeometry, seed: int) -> None:
    chunk = random_chunk(geometry, seed)
    payload = chunk.pack()
    for segment in chunk.layout.segments:
        rows = chunk.pool_slots[torch.from_numpy(np.flatnonzero(chunk.tiers == segment.tier))]
        source = chunk.buffers.of(segment.layer, segment.kv)[rows, segment.head_lo : segment.head_hi]
        codes, params = quantiser_for(segment.precision).quantise(source)
        at, end = segment.codes_offset, segment.codes_offset + segment.codes_bytes
        assert torch.equal(payload[at:end], codes.flatten())
        at, end = segment.params_offset, segment.params_offset + segment.params_bytes
        assert torch.equal(payload[at:end], params.contiguous().flatten().view(torch.uint8))


def test_content_alone_decides_the_body() -> None:
    chunk = small_chunk()
    clean, dirty = chunk.pack(fill=0), chunk.pack(fill=0xAB)
    assert torch.equal(clean[256:], dirty[256:])
    assert bool((dirty[:256] == 0xAB).all())
    # The same rows elsewhere in the pool make the same bytes: fragmentation leaves no trace.
    moved = torch.randperm(POOL_SLOTS)
    back = torch.empty_like(moved)
    back[moved] = torch.arange(POOL_SLOTS)
    elsewhere = KVBuffers([k[moved] for k in chunk.buffers.k], [v[moved] for v in chunk.buffers.v])
    again = replace(chunk, buffers=elsewhere, pool_slots=back[chunk.pool_slots]).pack()
    assert payload_checksum(again) == payload_checksum(clean)


def test_longer_memory_keeps_its_tail() -> None:
    chunk = small_chunk()
    out = torch.full((chunk.layout.total_bytes + 512,), 0xAB, dtype=torch.uint8)
    assert pack_payload(chunk.buffers, chunk.pool_slots, chunk.tiers, chunk.layout, out) == chunk.layout.total_bytes
    assert bool((out[chunk.layout.total_bytes :] == 0xAB).all())


def test_uninitialised_page_tails_poison_no_other_row() -> None:
    chunk = random_chunk(KVGeometry(2, 3, 24, 40, 1, "float16"), seed=0, last_high=7)
    received, expected = chunk.blank_buffers(), chunk.blank_buffers()
    unpack_payload(chunk.pack(), expected, chunk.pool_slots, chunk.tiers, chunk.layout)
    tail = chunk.pool_slots[-7:]
    for buffer in (*chunk.buffers.k, *chunk.buffers.v):
        buffer[tail[::2]] = float("nan")
        buffer[tail[1::2]] = float("inf")
    unpack_payload(chunk.pack(), received, chunk.pool_slots, chunk.tiers, chunk.layout)
    intact = chunk.pool_slots[:-7]
    for got, want in zip((*received.k, *received.v), (*expected.k, *expected.v), strict=True):
        assert torch.equal(got[intact], want[intact])


def test_strided_pools_are_read_and_written_in_place() -> None:
    chunk = small_chunk()
    wide = [torch.zeros(POOL_SLOTS, 6, x.shape[2], dtype=x.dtype) for x in (*chunk.buffers.k, *chunk.buffers.v)]
    views = [x[:, 1::2] for x in wide]
    strided = KVBuffers(views[:2], views[2:])
    unpack_payload(chunk.pack(), strided, chunk.pool_slots, chunk.tiers, chunk.layout)
    assert not any(x[:, ::2].any() for x in wide)
    for view, source in zip(views, (*chunk.buffers.k, *chunk.buffers.v), strict=True):
        view.copy_(source)
    assert torch.equal(replace(chunk, buffers=strided).pack(), chunk.pack())


def test_prologue_travels_in_the_first_bytes() -> None:
    chunk = small_chunk()
    payload = chunk.pack()
    prologue = Prologue(
        room=2**63 - 1,
        generation=5,
        sequence=2,
        first_position=0,
        rows_per_tier=chunk.layout.rows_per_tier,
        total_bytes=chunk.layout.total_bytes,
        geometry_digest=chunk.layout.geometry.digest(),
        table_digest=chunk.layout.table.digest(),
    )
    write_prologue(payload, prologue)
    assert read_prologue(payload) == prologue
    assert torch.equal(payload[256:], chunk.pack()[256:])
    with pytest.raises(PayloadError, match="expected room for 256 bytes, got 255"):
        write_prologue(payload[:255], prologue)
    with pytest.raises(PayloadError, match="expected 256 bytes, got 100"):
        read_prologue(payload[:100])


def test_unpack_refuses_before_it_touches_the_pool() -> None:
    chunk = small_chunk()
    payload, received = chunk.pack(), chunk.blank_buffers()
    total, slots, tiers, layout = chunk.layout.total_bytes, chunk.pool_slots, chunk.tiers, chunk.layout
    below, beyond = slots.clone(), slots.clone()
    below[3], beyond[3] = -1, POOL_SLOTS
    moved = tiers.copy()
    moved[0] = (moved[0] + 1) % 3
    bad_tier = tiers.copy()
    bad_tier[0] = 3
    other_dtype = KVBuffers([k.float() for k in received.k], [v.float() for v in received.v])
    attempts = [
        (payload[:-256], received, slots, tiers, f"expected a payload of {total} bytes, got {total - 256}"),
        (torch.cat((payload, payload[:256])), received, slots, tiers, f"got {total + 256}"),
        (payload, received, slots[:-1], tiers, "expected int64 pool slots of 50 rows"),
        (payload, received, slots.int(), tiers, "got torch.int32"),
        (payload, received, below, tiers, f"expected pool slots 0 to {POOL_SLOTS - 1}, got -1"),
        (payload, received, beyond, tiers, f"expected pool slots 0 to {POOL_SLOTS - 1}, got [0-9]+ to {POOL_SLOTS}"),
        (payload, received, slots, moved, "rows per tier, got"),
        (payload, received, slots, bad_tier, "expected tiers below 3, got 3"),
        (payload, received, slots, tiers[:-1], "rows per tier, got"),
        (payload, KVBuffers(received.k[:1], received.v), slots, tiers, "expected 2 layers, got 1 of K and 2 of V"),
        (payload, KVBuffers(received.v, received.k), slots, tiers, "K of layer 0"),
        (payload, other_dtype, slots, tiers, "torch.float16.* got .*torch.float32"),
        (payload.view(torch.int8), received, slots, tiers, "contiguous uint8 vector"),
        (payload.repeat_interleave(2)[::2], received, slots, tiers, "contiguous uint8 vector"),
        (torch.cat((payload[:8], payload))[8:], received, slots, tiers, "divisible by 16"),
    ]
    for memory, buffers, rows, of_tiers, message in attempts:
        with pytest.raises(PayloadError, match=message):
            unpack_payload(memory, buffers, rows, of_tiers, layout)
    with pytest.raises(PayloadError, match='expected "torch" or "triton"'):
        unpack_payload(payload, received, slots, tiers, layout, backend="cuda")  # type: ignore[arg-type]
    for buffer in (*received.k, *received.v):
        assert bool((buffer == 3.0).all())


def test_pack_refuses_memory_that_is_too_short() -> None:
    chunk = small_chunk()
    out = torch.full((chunk.layout.total_bytes - 256,), 0xAB, dtype=torch.uint8)
    with pytest.raises(PayloadError, match=f"expected room for {chunk.layout.total_bytes} bytes"):
        pack_payload(chunk.buffers, chunk.pool_slots, chunk.tiers, chunk.layout, out)
    assert bool((out == 0xAB).all())


def prologue_of(chunk: Chunk) -> Prologue:
    layout = chunk.layout
    digests = layout.geometry.digest(), layout.table.digest()
    return Prologue(7, 1, 0, 0, layout.rows_per_tier, layout.total_bytes, *digests)


def test_packing_with_a_checksum_is_packing_prologue_and_checksum() -> None:
    chunk = small_chunk()
    expected = chunk.pack()
    write_prologue(expected, prologue_of(chunk))
    out = torch.zeros(chunk.layout.total_bytes, dtype=torch.uint8)
    packed = pack_with_checksum(chunk.buffers, chunk.pool_slots, chunk.tiers, chunk.layout, out, prologue_of(chunk))
    assert packed.wait() == payload_checksum(expected)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("fault", ["none", "payload", "checksum", "prologue"])
def test_only_an_intact_payload_reaches_the_pool(fault: str) -> None:
    chunk = small_chunk()
    payload = torch.zeros(chunk.layout.total_bytes, dtype=torch.uint8)
    arguments = chunk.pool_slots, chunk.tiers, chunk.layout
    announced = prologue_of(chunk)
    checksum = pack_with_checksum(chunk.buffers, *arguments, payload, announced).wait()
    if fault == "payload":
        payload[-1] ^= 1
    elif fault == "checksum":
        checksum ^= 1
    elif fault == "prologue":
        announced = replace(announced, generation=2)
    received = chunk.blank_buffers()
    outcome = unpack_if_intact(payload, received, *arguments, checksum, announced).wait()
    assert outcome.checksum == payload_checksum(payload)
    assert outcome.written == (fault == "none")
    assert outcome.checksum_fits == (fault in ("none", "prologue"))
    assert outcome.prologue_fits == (fault != "prologue")
    untouched = all(bool((buffer == 3.0).all()) for buffer in (*received.k, *received.v))
    assert untouched == (fault != "none")
