"""How kernels and transfers reach the link model, what is left out, and that a known cost is found again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from link_model_forecast import COMPRESSED, FORMS, GOAL_VARIANT, MIB, SHAPES, SLOTS_MIB, Setting, forecasts_of, goal_of
from link_model_points import (
    PROFILES,
    PointsError,
    codecs_of,
    cross_validated,
    packing_seconds,
    plain_overheads,
    points_of,
    pool_bytes_per_token,
    transfers_of,
)
from transfer_samples import Sample, Status

from spectrumkv_sglang.tuning.fixed_cost import fit_fixed_cost
from spectrumkv_sglang.tuning.link_model import FixedCost, Transfer, bytes_per_second, pipelined_seconds

RESULTS = json.loads((Path(__file__).parents[2] / "docs/results/gpu.json").read_text(encoding="utf-8"))
CODECS = {shape: codecs_of(RESULTS, shape) for shape in SHAPES}
LLAMA = CODECS["Llama-3.1-8B"]
CHUNK = 1 << 30
COST = FixedCost(chunk_seconds=0.010, payload_seconds=0.0002)
GOODPUT = {5.0: 4.8, 10.0: 9.6}


def _sample(variant: str, rate: float, tokens: int) -> Sample:
    """A transfer that took what the model says with `COST`."""
    codec, native_bytes = LLAMA[variant], CHUNK * tokens // 8192
    transfer = Transfer.in_slots(native_bytes, codec.b, chunks=1)
    return Sample(
        variant,
        rate,
        tokens,
        ttft_seconds=9.0,
        transfer_seconds=pipelined_seconds(transfer, bytes_per_second(GOODPUT.get(rate, 40.0)), codec, COST),
        wire_bytes=round(native_bytes * codec.b),
        native_bytes=native_bytes,
        writes=transfer.payloads,
        pack_seconds=0.002 * transfer.payloads,
    )


SAMPLES = [_sample(variant, rate, tokens) for variant in PROFILES for rate in GOODPUT for tokens in (4096, 8192)]


def test_codecs_come_from_the_measured_kernels() -> None:
    assert set(LLAMA) == set(PROFILES)
    assert LLAMA["int8"].b == pytest.approx(0.508, abs=0.001)
    [int8] = [
        entry["seconds"]
        for entry in RESULTS["kernels"]["kernels"]
        if (entry["model"], entry["page_size"], entry["profile"]) == ("Llama-3.1-8B", 1, "int8")
    ]
    assert LLAMA["int8"].pack_bytes_per_second == pytest.approx(CHUNK / int8["pack"])
    assert LLAMA["int8"].unpack_bytes_per_second == pytest.approx(CHUNK / int8["verified_unpack"])
    assert pool_bytes_per_token(RESULTS, "Llama-3.1-8B") == 32 * 2 * 8 * 128 * 2
    with pytest.raises(PointsError, match="no kernels of Mistral, page size 1"):
        codecs_of(RESULTS, "Mistral")


def test_the_host_s_time_is_that_of_a_payload_of_the_slot_where_it_was_measured() -> None:
    def host(slot_mib: int, payloads: list[dict[str, object]]) -> float:
        entries = [
            entry | {"payloads": payloads if entry["profile"] == "int8" else []}
            for entry in RESULTS["kernels"]["kernels"]
        ]
        document = {"kernels": {"kernels": entries}}
        return codecs_of(document, "Llama-3.1-8B", slot_mib=slot_mib)["int8"].pack_host_seconds

    measured = [{"slot_mib": 16, "pack": {"host_seconds": 1.5e-4}, "unpack": {"host_seconds": 1e-4}}]
    whole_chunk = host(16, [])
    assert host(16, measured) == 1.5e-4
    assert host(64, measured) == whole_chunk > 0


def test_a_cost_put_into_the_points_is_found_and_predicts_other_links() -> None:
    points, excluded = points_of(SAMPLES, GOODPUT, LLAMA, chunk_tokens=8192)
    assert excluded == {}
    fitted = fit_fixed_cost([point.measured for point in points])
    assert fitted.chunk_seconds == pytest.approx(COST.chunk_seconds, rel=1e-3)
    assert fitted.payload_seconds == pytest.approx(COST.payload_seconds, rel=1e-3)
    assert max(abs(prediction.relative_error) for prediction in cross_validated(points)) < 1e-4


def test_a_point_is_predicted_without_its_own_link() -> None:
    """A link that behaves differently must show as an error, not be fitted away."""
    odd = [
        replace(sample, transfer_seconds=(sample.transfer_seconds or 0) * 1.5) if sample.rate_gbps == 10.0 else sample
        for sample in SAMPLES
    ]
    points, _ = points_of(odd, GOODPUT, LLAMA, chunk_tokens=8192)
    errors = [p.relative_error for p in cross_validated(points) if p.point.rate_gbps == 10.0]
    assert all(error == pytest.approx(-1 / 3, abs=0.01) for error in errors)


def test_what_is_left_out_is_said() -> None:
    others = [
        replace(SAMPLES[0], rate_gbps=0.0),
        replace(SAMPLES[0], repeat=-1),
        replace(SAMPLES[0], variant="plain"),
        Sample("int8", 5.0, 8192, status=Status.TIMEOUT, error="no answer"),
        replace(SAMPLES[0], prompt_tokens=16384),
    ]
    points, excluded = points_of([*SAMPLES, *others], GOODPUT, LLAMA, chunk_tokens=8192)
    assert len(points) == len(SAMPLES)
    assert sum(excluded.values()) == len(others)
    assert "no limit: bound by the host, not by a link of known bandwidth" in excluded
    assert any(reason.startswith("several chunks") for reason in excluded)
    with pytest.raises(PointsError, match="no transfer that the model can be held against"):
        points_of(others, GOODPUT, LLAMA, chunk_tokens=8192)


def test_the_measured_goodput_is_preferred() -> None:
    documents = [{"samples": [{"variant": "int8", "rate_gbps": rate, "prompt_tokens": 1} for rate in (0.0, 5.0, 10.0)],
                  "goodput_gbps": {"5": 4.5, "0": 70.0}}]  # fmt: skip
    samples, goodput = transfers_of(documents, 0.9)
    assert len(samples) == 3
    assert goodput == {5.0: 4.5, 10.0: pytest.approx(9.0)}


def test_plain_mooncake_and_packing_are_accounted_for() -> None:
    plain = Sample("plain-tuned", 5.0, 8192, transfer_seconds=1.0, wire_bytes=300_000_000, writes=64)
    ((sample, over),) = plain_overheads([plain, *SAMPLES], GOODPUT)["plain-tuned"]
    assert (sample.writes, over) == (64, pytest.approx(0.5))
    assert packing_seconds(SAMPLES)["int8"] == pytest.approx(0.002)


def test_forecasts_of_every_form() -> None:
    setting = Setting(fitted=COST, chunk_tokens=8192, payload_bytes=16 * MIB, unfused=100e9)
    forecasts = forecasts_of(CODECS, {shape: pool_bytes_per_token(RESULTS, shape) for shape in SHAPES}, setting)
    by_form = {
        form: [f for f in forecasts if f.form == form] for form in FORMS
    }  # fmt: skip
    for kernels, host, fitted in zip(by_form["kernels"], by_form["host"], by_form["fitted"], strict=True):
        assert kernels.seconds < host.seconds < fitted.seconds
        assert kernels.break_even_gbps > host.break_even_gbps > fitted.break_even_gbps
    for f in forecasts:
        assert (f.ratio < 1) == (f.rate_gbps < f.break_even_gbps), f
    slow = [f for f in forecasts if f.rate_gbps == 1]
    assert all(f.ratio == pytest.approx(CODECS[f.shape][f.variant].b, rel=0.02) for f in slow)
    assert {f.variant for f in forecasts} == set(COMPRESSED)


def test_what_the_goal_allows_is_what_reaches_it() -> None:
    setting = Setting(fitted=COST, chunk_tokens=8192, payload_bytes=16 * MIB, unfused=100e9)
    codec = LLAMA[GOAL_VARIANT]
    by_slot = {mib: codecs_of(RESULTS, "Llama-3.1-8B", slot_mib=mib)[GOAL_VARIANT] for mib in SLOTS_MIB}
    goal = goal_of("Llama-3.1-8B", by_slot, CHUNK, setting, [])
    allowed = goal.allowed_chunk_seconds[16]
    kernels = replace(codec, pack_host_seconds=0.0, unpack_host_seconds=0.0)
    bandwidth = bytes_per_second(400)
    seconds = pipelined_seconds(Transfer.in_slots(CHUNK, codec.b), bandwidth, kernels, FixedCost(allowed))
    assert seconds == pytest.approx(0.35 * CHUNK / bandwidth)
    # Larger slots mean fewer payloads that the host has to plan.
    assert goal.ratios_with_host[64] < goal.ratios_with_host[16]
