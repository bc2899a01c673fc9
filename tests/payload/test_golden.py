"""Format version 1 stays what it was when it was released."""

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
from spectrumkv_sglang.payload.layout import plan_layout
from spectrumkv_sglang.payload.tier_map import encode_tier_map

MAKER = Path(__file__).parent / "golden" / "make_payload.py"
VERSION_1 = MAKER.with_name("v1.bin")
VERSION_1_CHANNEL = MAKER.with_name("v1-int4-channel.bin")
CHECKSUM = 0xBC23AAD2A31136BB
GEOMETRY_DIGEST = 0xBC0A880E3509FFA7
TABLE_DIGEST = 0x32A158A6B9C7AA23
TABLE_BYTES = "03000000000000000000000000020202010101020202010101010001030003030003030003"
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
    return read(VERSION_1)


def test_this_build_still_writes_version_1(maker: ModuleType, golden: torch.Tensor) -> None:
    written = maker.payload()
    assert written.numel() == golden.numel()
    assert torch.nonzero(written != golden).flatten().tolist() == []


def test_this_build_still_writes_and_reads_scales_that_rows_share(maker: ModuleType) -> None:
    golden, written = read(VERSION_1_CHANNEL), maker.channel_payload()
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


def test_this_build_still_reads_version_1(maker: ModuleType, golden: torch.Tensor) -> None:
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
    before = [path.read_bytes() for path in (VERSION_1, VERSION_1_CHANNEL)]
    assert maker.main() == 1
    assert capsys.readouterr().err.count("new FORMAT_VERSION") == 2
    assert [path.read_bytes() for path in (VERSION_1, VERSION_1_CHANNEL)] == before
