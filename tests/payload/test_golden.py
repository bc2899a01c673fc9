"""Format version 2 stays what it was when it was released."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from spectrumkv_sglang.kernels.checksum import payload_checksum
from spectrumkv_sglang.kernels.quantisers import quantiser_for
from spectrumkv_sglang.payload.codec import KVBuffers, read_prologue, unpack_payload
from spectrumkv_sglang.payload.errors import PayloadError
from spectrumkv_sglang.payload.layout import plan_layout
from spectrumkv_sglang.payload.tier_map import encode_tier_map

MAKER = Path(__file__).parent / "golden" / "make_payload.py"
VERSION_2 = MAKER.with_name("v2.bin")
VERSION_2_CHANNELS = MAKER.with_name("v2-channels.bin")
VERSION_2_TRANSFORMS = MAKER.with_name("v2-transforms.bin")
CHECKSUM = 0x9070477AD321C11E
GEOMETRY_DIGEST = 0x1F16399216936706
TABLE_DIGEST = 0x91FB45F6E7F6DC26
TABLE_BYTES = "0300000000000000000000000002020201010102020201010101000103000303000303000300000000"
TIER_MAP = "a461a059a8"


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_golden_payload", MAKER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read(path: Path) -> torch.Tensor:
    return torch.from_numpy(np.fromfile(path, dtype=np.uint8))


@pytest.fixture
def golden() -> torch.Tensor:
    return read(VERSION_2)


def test_this_build_still_writes_version_2(maker: ModuleType, golden: torch.Tensor) -> None:
    written = maker.payload()
    assert written.numel() == golden.numel()
    assert torch.nonzero(written != golden).flatten().tolist() == []


def test_this_build_still_writes_and_reads_scales_that_rows_share(maker: ModuleType) -> None:
    golden, written = read(VERSION_2_CHANNELS), maker.channel_payload()
    assert written.numel() == golden.numel()
    assert torch.nonzero(written != golden).flatten().tolist() == []
    prologue = read_prologue(golden)
    assert prologue.rows_per_tier == (4, 10, 135, 1)
    tiers, pool_slots = maker.channel_rows()
    layout = plan_layout(maker.GEOMETRY, maker.channel_table(), prologue.rows_per_tier)
    assert prologue.total_bytes == layout.total_bytes == golden.numel()
    sent = maker.buffers(len(tiers))
    received = KVBuffers([torch.zeros_like(k) for k in sent.k], [torch.zeros_like(v) for v in sent.v])
    unpack_payload(golden, received, pool_slots, tiers, layout)
    for segment in layout.segments:
        slots = pool_slots[tiers == segment.tier]
        want, got = (
            pool.of(segment.layer, segment.kv)[slots, segment.head_lo : segment.head_hi] for pool in (sent, received)
        )
        finite = torch.isfinite(want)
        bound = quantiser_for(segment.precision).error_bound(want)
        assert bool(((got.double() - want.double()).abs() <= bound)[finite].all())


def test_this_build_still_writes_and_reads_what_was_transformed(maker: ModuleType) -> None:
    golden, written = read(VERSION_2_TRANSFORMS), maker.transform_payload()
    assert torch.nonzero(written != golden).flatten().tolist() == []
    prologue = read_prologue(golden)
    assert prologue.first_position == 3
    layout = plan_layout(maker.GEOMETRY, maker.transform_table(), prologue.rows_per_tier)
    assert prologue.total_bytes == layout.total_bytes == golden.numel()
    sent = maker.buffers()
    received = KVBuffers([torch.zeros_like(k) for k in sent.k], [torch.zeros_like(v) for v in sent.v])
    rotated = maker.rotation().at(prologue.first_position, len(maker.TIERS))
    unpack_payload(golden, received, maker.POOL_SLOTS, maker.TIERS, layout, rotated=rotated)
    with pytest.raises(PayloadError, match="no angles were given"):
        unpack_payload(golden, received, maker.POOL_SLOTS, maker.TIERS, layout)
    for got, want in zip((*received.k, *received.v), (*sent.k, *sent.v), strict=True):
        got, want = got[maker.POOL_SLOTS].float(), want[maker.POOL_SLOTS].float()
        finite = torch.isfinite(want).all(dim=(1, 2))  # a transform spreads what is not finite over its row
        peak = want.abs().amax((1, 2), keepdim=True)
        assert bool(((got - want).abs() <= peak)[finite].all())  # two bits say little more than the sign
        assert torch.equal(got[(maker.TIERS == 0) & finite.numpy()], want[(maker.TIERS == 0) & finite.numpy()])
        eight = (maker.TIERS == 1) & finite.numpy()
        assert bool(((got - want).abs() <= peak * 0.02)[eight].all())


def test_this_build_still_reads_version_2(maker: ModuleType, golden: torch.Tensor) -> None:
    prologue = read_prologue(golden)
    assert prologue.room == 0x0123_4567_89AB_CDEF
    assert (prologue.generation, prologue.sequence, prologue.rows_per_tier) == (42, 7, (5, 6, 9))
    layout = plan_layout(maker.GEOMETRY, maker.table(), prologue.rows_per_tier)
    assert prologue.total_bytes == layout.total_bytes == golden.numel()
    sent = maker.buffers()
    received = KVBuffers([torch.zeros_like(k) for k in sent.k], [torch.zeros_like(v) for v in sent.v])
    unpack_payload(golden, received, maker.POOL_SLOTS, maker.TIERS, layout)
    for got, want in zip((*received.k, *received.v), (*sent.k, *sent.v), strict=True):
        got, want = got[maker.POOL_SLOTS].float(), want[maker.POOL_SLOTS].float()
        finite = torch.where(torch.isfinite(want), want, 0.0)
        # INT4, the coarsest precision in the table: half a step of a fifteenth of twice the peak.
        coarsest = finite.abs().amax(-1, keepdim=True) / 15 * 1.01
        assert bool(((got - want).abs() <= coarsest)[torch.isfinite(want)].all())
        assert torch.equal(got[maker.TIERS == 0], want[maker.TIERS == 0])


def test_numbers_that_other_messages_carry_stay_the_same(maker: ModuleType, golden: torch.Tensor) -> None:
    assert payload_checksum(golden) == CHECKSUM
    assert maker.GEOMETRY.digest() == GEOMETRY_DIGEST
    assert maker.table().digest() == TABLE_DIGEST
    assert encode_tier_map(maker.TIERS, 3).hex() == TIER_MAP
    assert maker.table().to_bytes().hex() == TABLE_BYTES


def test_the_golden_file_is_never_replaced(maker: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    before = [path.read_bytes() for path in (VERSION_2, VERSION_2_CHANNELS, VERSION_2_TRANSFORMS)]
    assert maker.main() == 1
    assert capsys.readouterr().err.count("new FORMAT_VERSION") == 3
    assert [path.read_bytes() for path in (VERSION_2, VERSION_2_CHANNELS, VERSION_2_TRANSFORMS)] == before
