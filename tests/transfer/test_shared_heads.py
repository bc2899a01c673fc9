"""Which heads a prefill and a decode rank of unequal TP sizes share, compared with what SGLang itself would copy."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from key_angles import key_angles

from spectrumkv_sglang.observability.reasons import Reason
from spectrumkv_sglang.payload.codec import KVBuffers
from spectrumkv_sglang.payload.errors import PayloadError
from spectrumkv_sglang.payload.geometry import KVGeometry
from spectrumkv_sglang.profiles.profile import Profile
from spectrumkv_sglang.transfer.errors import ControlMessageError
from spectrumkv_sglang.transfer.handshake import Handshake, decode_handshake, encode_handshake
from spectrumkv_sglang.transfer.pool_view import PoolView
from spectrumkv_sglang.transfer.shared_heads import RankHeads, heads_of_rank, shared_heads

HEAD_BYTES = 4
PEER = Handshake("tcp://10.0.0.7:50123", 1, "bfloat16", 2, 2, 4, 8, 16, 8, 1, 1 << 20, 8, [0, 1], True, "", [])
TOTAL = st.just(16)
SIZES = st.sampled_from([1, 2, 4, 8, 16])


def held(total: int, tp_size: int) -> int:
    return max(1, total // tp_size)


def rank_heads(total: int, tp_size: int, rank: int) -> RankHeads:
    found = heads_of_rank(total, tp_size, rank, held(total, tp_size))
    assert found is not None
    return found


def partners(prefill_tp: int, decode_tp: int, decode_rank: int) -> list[int]:
    """Prefill ranks that SGLang connects a decode rank to."""
    if decode_tp >= prefill_tp:
        return [decode_rank // (decode_tp // prefill_tp)]
    ratio = prefill_tp // decode_tp
    return list(range(decode_rank * ratio, (decode_rank + 1) * ratio))


def copied_by_sglang(total: int, prefill_tp: int, prefill_rank: int, decode_tp: int, decode_rank: int) -> list[int]:
    """First head of ours, first head of decode's, number of heads: from the addresses that SGLang's slices name."""
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager

    calls: list[tuple[list[int], list[int], list[int]]] = []

    def batch_transfer_sync(session: str, sources: list[int], targets: list[int], lengths: list[int]) -> int:
        calls.append((sources, targets, lengths))
        return 0

    manager = SimpleNamespace(
        kv_args=SimpleNamespace(
            engine_rank=prefill_rank,
            kv_item_lens=[held(total, prefill_tp) * HEAD_BYTES] * 2,
            page_size=1,
            total_kv_head_num=total,
            kv_head_num=held(total, prefill_tp),
            kv_data_ptrs=[0, 0],
            kv_layer_ids=[],
        ),
        attn_tp_size=prefill_tp,
        pp_size=1,
        get_mha_kv_ptrs_with_pp=lambda ours, theirs: (ours[:1], ours[1:], theirs[:1], theirs[1:], 1),
        engine=SimpleNamespace(batch_transfer_sync=batch_transfer_sync),
        _await_transfer_futures=lambda futures: max(future.result() for future in futures),
    )
    page = np.zeros(1, dtype=np.int32)
    with ThreadPoolExecutor(1) as executor:
        code = MooncakeKVManager.send_kvcache_slice(
            manager, "s", page, [0, 0], page, decode_rank, decode_tp, held(total, decode_tp) * HEAD_BYTES, executor
        )
    assert code == 0
    (source,), (target,), (length,) = calls[0]
    return [source // HEAD_BYTES, target // HEAD_BYTES, length // HEAD_BYTES]


@given(total=TOTAL, prefill_tp=SIZES, decode_tp=SIZES)
@settings(max_examples=50, deadline=None)
def test_every_head_of_decode_comes_from_a_rank_that_has_it(total: int, prefill_tp: int, decode_tp: int) -> None:
    for decode_rank in range(decode_tp):
        ours = rank_heads(total, decode_tp, decode_rank)
        got: list[int] = []
        for prefill_rank in partners(prefill_tp, decode_tp, decode_rank):
            theirs = rank_heads(total, prefill_tp, prefill_rank)
            shared = shared_heads(theirs, ours)
            assert shared is not None
            # Numbers of the model's heads, from either side's own.
            sent = [theirs.first + shared.ours + i for i in range(shared.count)]
            assert sent == [ours.first + shared.theirs + i for i in range(shared.count)]
            assert set(sent) <= set(range(theirs.first, theirs.end))
            got += sent
        assert set(got) == set(range(ours.first, ours.end))
        assert len(got) == ours.count


@given(total=TOTAL, prefill_tp=SIZES, decode_tp=SIZES, data=st.data())
@settings(max_examples=50, deadline=None)
def test_they_are_those_that_sglang_copies(total: int, prefill_tp: int, decode_tp: int, data: st.DataObject) -> None:
    decode_rank = data.draw(st.integers(0, decode_tp - 1))
    prefill_rank = data.draw(st.sampled_from(partners(prefill_tp, decode_tp, decode_rank)))
    shared = shared_heads(rank_heads(total, prefill_tp, prefill_rank), rank_heads(total, decode_tp, decode_rank))
    assert shared is not None
    if prefill_tp != decode_tp:  # else SGLang sends whole pages
        expected = copied_by_sglang(total, prefill_tp, prefill_rank, decode_tp, decode_rank)
        assert [shared.ours, shared.theirs, shared.count] == expected


@given(
    total=st.integers(0, 64),
    size=st.integers(1, 64),
    rank=st.integers(-1, 64),
    in_pool=st.integers(0, 64),
)
def test_a_split_that_is_not_even_is_not_guessed(total: int, size: int, rank: int, in_pool: int) -> None:
    found = heads_of_rank(total, size, rank, in_pool)
    if found is None:
        even = total > 0 and total % size == 0
        assert not even or not 0 <= rank < size or in_pool != total // size
    else:
        assert (found.count, found.total) == (in_pool, total)
        assert 0 <= found.first < found.end <= total


@given(st.data())
def test_heads_of_two_ranks_are_a_part_of_the_one_or_of_the_other_or_nothing(data: st.DataObject) -> None:
    def heads() -> RankHeads:
        total = data.draw(st.integers(1, 12))
        count = data.draw(st.integers(1, total))
        return RankHeads(data.draw(st.integers(0, total - count)), count, total)

    ours, theirs = heads(), heads()
    shared = shared_heads(ours, theirs)
    both = set(range(ours.first, ours.end)) & set(range(theirs.first, theirs.end))
    if shared is None:
        assert ours.total != theirs.total or len(both) < min(ours.count, theirs.count)
    else:
        assert {ours.first + shared.ours + i for i in range(shared.count)} == both
        assert {theirs.first + shared.theirs + i for i in range(shared.count)} == both


@pytest.mark.parametrize(("first", "count", "total"), [(0, 0, 4), (4, 1, 4), (-1, 1, 4), (0, 5, 4), (3, 2, 4)])
def test_heads_outside_the_model(first: int, count: int, total: int) -> None:
    with pytest.raises(ValueError, match=f"expected KV heads within 0 to {total - 1}"):
        RankHeads(first, count, total)


def test_a_handshake_names_heads_that_the_model_has() -> None:
    assert decode_handshake(encode_handshake(PEER)).heads == RankHeads(4, 2, 8)
    unknown = msgspec.structs.replace(PEER, first_head=0, total_heads=0)
    assert decode_handshake(encode_handshake(unknown)).heads is None
    for lie in ({"first_head": 7}, {"kv_heads": 9, "first_head": 0}, {"total_heads": 5}):
        with pytest.raises(ControlMessageError, match="expected KV heads within 0 to"):
            decode_handshake(encode_handshake(msgspec.structs.replace(PEER, **lie)))


def a_view(heads: int) -> PoolView:
    geometry = KVGeometry(layers=2, kv_heads=heads, head_dim=16, v_head_dim=8, page_size=1, dtype="float32")
    pools = [[torch.arange(6.0 * heads * dim).view(6, heads, dim) for _ in range(2)] for dim in (16, 8)]
    return PoolView(KVBuffers(*pools), geometry, torch.device("cpu"), 6, key_angles(geometry))


def test_a_part_of_a_pool_is_its_memory_and_nothing_else() -> None:
    view = a_view(4)
    part = view.of_heads(1, 2)
    assert part is view.of_heads(1, 2)
    assert view.of_heads(0, 4) is view
    assert (part.geometry.kv_heads, part.first_head, part.rotation) == (2, 1, view.rotation)
    assert part.of_heads(1, 1).first_head == 2
    part.buffers.check_geometry(part.geometry)
    for whole, piece in zip((*view.buffers.k, *view.buffers.v), (*part.buffers.k, *part.buffers.v), strict=True):
        before = whole.clone()
        piece.zero_()
        assert not whole[:, 1:3].any()
        assert torch.equal(whole[:, [0, 3]], before[:, [0, 3]])


@pytest.mark.parametrize(("first", "count"), [(0, 0), (0, 5), (4, 1), (3, 2), (-1, 1), (2**32 - 1, 1), (0, 2**16 - 1)])
def test_a_part_that_the_pool_does_not_have(first: int, count: int) -> None:
    view = a_view(4)
    with pytest.raises(PayloadError, match="expected heads within 0 to 3"):
        view.of_heads(first, count)
    with pytest.raises(PayloadError, match="expected heads within 0 to 3"):
        view.table(_by_heads()).of_heads(first, count)


def test_a_peer_that_asks_for_every_part_is_given_no_memory_for_it() -> None:
    view = a_view(16)
    for first in range(16):
        for count in range(1, 17 - first):
            assert view.of_heads(first, count).geometry.kv_heads == count
    assert len(view._parts) <= 64


def _by_heads() -> Profile:
    fields: dict[str, Any] = {
        "name": "by-heads",
        "tiers": {"high": {"keys": "native", "values": "native"}, "low": {"keys": "int4", "values": "int4"}},
        "head_overrides": [{"heads": [2], "keys": "int8", "tiers": ["low"]}],
    }
    return Profile.model_validate(fields)


def test_a_profiles_heads_are_those_of_the_whole_rank() -> None:
    view = a_view(4)
    whole = view.table(_by_heads())
    assert np.array_equal(view.of_heads(2, 2).table(_by_heads()).values, whole.values[..., 2:])
    assert np.array_equal(view.of_heads(2, 1).table(_by_heads()).values, whole.values[..., 2:3])
    assert np.array_equal(view.of_heads(0, 2).of_heads(1, 1).table(_by_heads()).values, whole.values[..., 1:2])


@pytest.mark.parametrize(
    ("ours", "theirs", "decode_heads", "fits"),
    [
        (512, 1024, 4, True),  # decode holds twice as many heads of 256 bytes
        (512, 256, 1, True),
        (512, 1024, 2, False),  # as many heads, and twice the bytes: another dtype or page size
        (512, 512, 4, False),
        (512, 768, 3, False),
        (512, 1024, None, True),  # a peer without this package does not say
        (512, 768, None, False),
    ],
)
def test_heads_of_another_size_are_not_copied_natively(
    ours: int, theirs: int, decode_heads: int | None, fits: bool
) -> None:
    from spectrumkv_sglang.transfer.manager import SpectrumKVManager

    registration = SimpleNamespace(dst_kv_item_len=theirs)
    if decode_heads is not None:
        registration.spectrumkv_handshake = msgspec.structs.replace(PEER, kv_heads=decode_heads)
    manager: Any = SpectrumKVManager.__new__(SpectrumKVManager)
    manager.kv_args = SimpleNamespace(kv_item_lens=[ours] * 6)
    manager.decode_kv_args_table = {"s": registration}
    manager.prefill_rank = SimpleNamespace(kv_heads=2)
    misfit = manager._native_misfit("s", sliced=True)
    assert (misfit == "") == fits, misfit
    if fits:
        assert manager._sliced_page_bytes("s") == 6 * min(ours, theirs)
    assert (manager._native_misfit("s", sliced=False) == "") == (ours == theirs)


@pytest.mark.parametrize(("answer", "counted"), [((0, False), [0]), ((0, True), [-1]), ((-1, False), [-1])])
def test_sglangs_staging_buffer_is_counted_when_it_has_sent(
    monkeypatch: pytest.MonkeyPatch, answer: tuple[int, bool], counted: list[int]
) -> None:
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager

    from spectrumkv_sglang.transfer.manager import SpectrumKVManager

    monkeypatch.setattr(MooncakeKVManager, "_do_staging_transfer", lambda manager, *arguments: answer)
    sent: list[Any] = []

    def send(chunk: Any, send_natively: Any, only: Any) -> tuple[int, bool]:
        code = send_natively().code
        sent.append((only, chunk.room, chunk.page_bytes, code))
        return code, code != 0

    chunk = SimpleNamespace(
        room=7, prefill_kv_indices=np.arange(3), index_slice=slice(0, 3), is_last_chunk=True, spectrumkv_origin=None
    )
    manager: Any = SpectrumKVManager.__new__(SpectrumKVManager)
    manager.current = SimpleNamespace(chunk=chunk)
    manager.transfer_infos = {7: {"s": SimpleNamespace(dst_kv_indices=np.arange(3))}}
    manager.decode_kv_args_table = {"s": SimpleNamespace(dst_kv_item_len=256)}
    manager.kv_args = SimpleNamespace(kv_item_lens=[512] * 6)
    manager.prefill_rank = SimpleNamespace(send=send, kv_heads=2)
    request = SimpleNamespace(mooncake_session_id="s")
    assert manager._do_staging_transfer("strategy", chunk, request, "target") == answer
    assert sent == [(Reason.STAGING, 7, 6 * 256, code) for code in counted]
