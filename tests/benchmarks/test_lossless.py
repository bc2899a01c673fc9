"""Lossless compression: bounds and figures by hand, planes that hold every bit, a GPU's codecs where there is one."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from lossless import cpu_row, gpu_cells, gpu_document, zstandard_outcome
from lossless_nvcomp import CODECS, GpuRow, load_nvcomp, measure
from lossless_outcome import Outcome, order_0
from lossless_payloads import Payload, native_planes, profile_payload

from spectrumkv_sglang.payload.geometry import KVGeometry
from spectrumkv_sglang.payload.kv_buffers import KVBuffers
from spectrumkv_sglang.transfer.pool_view import PoolView

LAYERS, TOKENS, HEADS, DIM = 2, 40, 2, 64


@pytest.fixture
def view() -> PoolView:
    generator = torch.Generator().manual_seed(1)
    k, v = ([torch.randn(TOKENS, HEADS, DIM, generator=generator).bfloat16() for _ in range(LAYERS)] for _ in range(2))
    geometry = KVGeometry(LAYERS, HEADS, DIM, DIM, 1, "bfloat16")
    return PoolView(KVBuffers(k=k, v=v), geometry, torch.device("cpu"), TOKENS)


def test_order_0_of_bytes_that_are_known() -> None:
    assert order_0(bytes(100)) == 0
    assert order_0(bytes(range(256)) * 4) == pytest.approx(1)
    assert order_0(b"\x00\x07" * 50) == pytest.approx(1 / 8)


def test_order_0_by_chunk_sees_what_changes_along_the_way() -> None:
    data = bytes(64) + b"\x01" * 64 + b"\x02" * 10
    assert order_0(data) > 0.1
    assert order_0(data, 64) == 0


def test_what_an_outcome_says() -> None:
    outcome = Outcome(bytes=1000, packed_bytes=750, compress_seconds=1e-6, decompress_seconds=4e-6)
    assert outcome.ratio == 0.75
    assert outcome.compress_rate == pytest.approx(1e9)
    assert outcome.decompress_rate == pytest.approx(250e6)
    # 2000 bits saved: a link on which they take a microsecond, and one on which they take five.
    assert outcome.break_even == pytest.approx(2e9)
    assert outcome.break_even_both == pytest.approx(4e8)
    assert Outcome(1000, 1010, 1e-6, 1e-6).break_even == 0


def test_planes_hold_every_bit_of_native_kv(view: PoolView) -> None:
    planes = {payload.name: np.frombuffer(payload.data, np.uint8) for payload in native_planes(view)}
    upper, lower = planes["native, upper bytes"], planes["native, lower bytes"]
    assert np.array_equal(planes["native, byte planes"], np.concatenate([upper, lower]))
    words = np.stack([lower, upper], axis=1).ravel().view(np.int16).reshape(2 * LAYERS, TOKENS, HEADS, DIM)
    own = [view.buffers.of(layer, kv) for layer in range(LAYERS) for kv in (0, 1)]
    assert np.array_equal(words, torch.stack(own).view(torch.int16).numpy())
    by_channel = planes["native, upper bytes by channel"].reshape(2 * LAYERS, HEADS, DIM, TOKENS)
    assert np.array_equal(by_channel, upper.reshape(2 * LAYERS, TOKENS, HEADS, DIM).transpose(0, 2, 3, 1))
    _, exponents = torch.stack(own).float().frexp()
    assert np.array_equal(planes["native, exponents"].astype(int), (exponents + 126).flatten().numpy())
    assert order_0(planes["native, exponents"].tobytes()) < order_0(upper.tobytes())


def test_planes_need_two_bytes_an_element(view: PoolView) -> None:
    wide = KVBuffers(k=[k.float() for k in view.buffers.k], v=[v.float() for v in view.buffers.v])
    geometry = KVGeometry(LAYERS, HEADS, DIM, DIM, 1, "float32")
    assert list(native_planes(PoolView(wide, geometry, torch.device("cpu"), TOKENS))) == []


@pytest.mark.parametrize(("name", "element"), [("native-packed", "half"), ("fp8", "e4m3"), ("balanced", "byte")])
def test_payloads_of_profiles_say_what_they_are_made_of(view: PoolView, name: str, element: str) -> None:
    payload = profile_payload(view, name)
    assert (payload.name, payload.element) == (name, element)
    native = LAYERS * TOKENS * HEADS * DIM * 4
    assert len(payload.data) >= native if name == "native-packed" else len(payload.data) < 0.6 * native


def test_zstandard_is_measured_for_real() -> None:
    outcome = zstandard_outcome(bytes(100_000), 1)
    assert outcome.packed_bytes < 100
    assert min(outcome.compress_seconds, outcome.decompress_seconds) > 0
    cells, row = cpu_row(Payload("zeros", bytes(100_000)))
    assert cells[:4] == ["zeros", "0.1", "0.000", "0.000"]
    assert row["zstd_1"]["ratio"] < 0.001  # type: ignore[index]


def test_a_codec_that_failed_has_its_error_in_the_row() -> None:
    failed = GpuRow("int8", "LZ4", error="RuntimeError: no")
    assert gpu_cells(failed)[:3] == ["int8", "LZ4", "RuntimeError: no"]
    assert len(gpu_cells(failed)) == len(gpu_cells(GpuRow("int8", "LZ4", Outcome(10, 5, 1.0, 1.0))))
    assert gpu_document(failed) == {"profile": "int8", "codec": "LZ4", "error": "RuntimeError: no"}


def test_without_nvcomp_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setitem(sys.modules, "nvidia.nvcomp", None)
    with pytest.raises(SystemExit, match=r"pip install nvidia-nvcomp-cu13(.|\n)*nvidia-libnvcomp-cu13"):
        load_nvcomp()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="nvCOMP runs on a GPU")
def test_nvcomp_on_a_gpu(view: PoolView) -> None:
    pytest.importorskip("nvidia.nvcomp")
    payloads = [profile_payload(view, name) for name in ("native-packed", "fp8")]
    rows = list(measure(payloads, "cuda"))
    assert len(rows) == sum(payload.element in codec.elements for codec in CODECS for payload in payloads)
    assert [row for row in rows if row.error] == []
    found = {(row.payload, row.codec): row.outcome for row in rows}
    assert found["native-packed", "ANS"].ratio < 1  # type: ignore[union-attr]
