"""In place packing and unpacking on a real pool's layout: what changes, what does not, and when."""

import numpy as np
import pytest
import torch

from spectrumkv_sglang.config import load_config
from spectrumkv_sglang.importance.scores import SlotScores
from spectrumkv_sglang.kernels.precision import Precision
from spectrumkv_sglang.kernels.quantisers import quantiser_for
from spectrumkv_sglang.loopback.in_place import InPlaceTransfer
from spectrumkv_sglang.payload.codec import KVBuffers
from spectrumkv_sglang.payload.geometry import KVGeometry
from spectrumkv_sglang.transfer.pool_view import PoolView

PAGE = 4
GEOMETRY = KVGeometry(layers=3, kv_heads=2, head_dim=16, v_head_dim=16, page_size=PAGE, dtype="float32")


@pytest.fixture
def view() -> PoolView:
    generator = torch.Generator().manual_seed(5)
    slots = 60 * PAGE

    def buffers() -> list[torch.Tensor]:
        return [torch.randn(slots, 2, 16, generator=generator) for _ in range(3)]

    return PoolView(KVBuffers(k=buffers(), v=buffers()), GEOMETRY, torch.device("cpu"), slots)


def _transfer(view: PoolView, **settings: str) -> InPlaceTransfer:
    environ = {f"SPECTRUMKV_{name.upper()}": value for name, value in {"min_tokens": "0", **settings}.items()}
    return InPlaceTransfer(view, load_config(None, environ), SlotScores(view.pool_slots, view.device))


def _copy(view: PoolView) -> list[torch.Tensor]:
    return [buffer.clone() for buffer in (*view.buffers.k, *view.buffers.v)]


def _slots(pages: np.ndarray) -> torch.Tensor:
    return torch.from_numpy((pages[:, None] * PAGE + np.arange(PAGE)).reshape(-1))


PAGES = np.random.default_rng(2).permutation(60)[:41].astype(np.int64)


def test_native_precision_leaves_the_pool_bit_for_bit(view: PoolView) -> None:
    before = _copy(view)
    transfer = _transfer(view, profile="native-packed", budget="1.0")
    transfer.pack("r", PAGES, len(PAGES))
    record = transfer.unpack("r")
    assert all(torch.equal(a, b) for a, b in zip(before, _copy(view), strict=True))
    assert record.tokens == 41 * PAGE
    assert record.tokens_by_tier == (41 * PAGE, 0, 0)
    assert record.native_bytes == 41 * PAGE * GEOMETRY.native_bytes_per_token
    assert record.native_bytes < record.wire_bytes < 1.2 * record.native_bytes


def test_only_the_prompts_pages_change_and_within_the_quantisers_bound(view: PoolView) -> None:
    before = _copy(view)
    transfer = _transfer(view, profile="int8")
    transfer.pack("r", PAGES, len(PAGES))
    record = transfer.unpack("r")
    slots = _slots(PAGES)
    others = torch.ones(view.pool_slots, dtype=torch.bool)
    others[slots] = False
    for old, new in zip(before, _copy(view), strict=True):
        assert torch.equal(old[others], new[others])
        error = (old[slots] - new[slots]).abs()
        assert (error <= quantiser_for(Precision.INT8).error_bound(old[slots])).all()
        assert error.max() > 0
    assert record.wire_bytes < 0.6 * record.native_bytes


def test_nothing_changes_before_the_whole_prompt_is_there(view: PoolView) -> None:
    before = _copy(view)
    transfer = _transfer(view, profile="int8")
    transfer.pack("r", PAGES[:16], len(PAGES))
    transfer.pack("r", PAGES[:16], len(PAGES))  # a chunk that completed no page
    transfer.pack("r", PAGES, len(PAGES))
    assert all(torch.equal(a, b) for a, b in zip(before, _copy(view), strict=True))
    record = transfer.unpack("r")
    assert record.tokens_by_tier == (41 * PAGE, 0, 0)
    assert not torch.equal(before[0], view.buffers.k[0])


def test_a_chunk_travels_with_the_values_of_its_time(view: PoolView) -> None:
    transfer = _transfer(view, profile="native-packed", budget="1.0")
    slots = _slots(PAGES[:16])
    early = view.buffers.k[0][slots].clone()
    transfer.pack("r", PAGES[:16], len(PAGES))
    view.buffers.k[0][slots] = 0.0
    transfer.pack("r", PAGES, len(PAGES))
    transfer.unpack("r")
    assert torch.equal(view.buffers.k[0][slots], early)


def test_a_prompt_larger_than_a_slot_travels_in_several_payloads(view: PoolView) -> None:
    transfer = _transfer(view, profile="native-packed", budget="1.0", slot_bytes="64KiB")
    before = _copy(view)
    transfer.pack("r", PAGES, len(PAGES))
    transfer.unpack("r")
    assert all(torch.equal(a, b) for a, b in zip(before, _copy(view), strict=True))


def test_a_forgotten_prompt_can_begin_anew(view: PoolView) -> None:
    transfer = _transfer(view, profile="int8")
    transfer.pack("r", PAGES[:8], len(PAGES))
    transfer.forget("r")
    transfer.forget("never seen")
    transfer.pack("r", PAGES, len(PAGES))
    assert transfer.unpack("r").tokens == 41 * PAGE
    with pytest.raises(KeyError):
        transfer.unpack("r")
