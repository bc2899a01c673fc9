"""How samples of the transfer benchmark become tables: medians, gains apart, failures that stay visible."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from fragmented_pool import HOOKED
from pairs import TUNED, VARIANTS, groups_of, variants_named
from plain_transfer_log import read_plain_transfer
from rich.console import Console
from sglang_plugin import plugin_folder
from transfer_prompts import prompt_of
from transfer_samples import Sample, Status, cases_of, samples_of, shortest_link_seconds
from transfer_table import print_results, shortened

from spectrumkv_sglang.errors import SpectrumKVError

PLAIN = Sample("plain", 10.0, 8192, ttft_seconds=2.0, transfer_seconds=1.6, wire_bytes=1000, writes=64, cpu_seconds=4.0)
TUNED_SAMPLE = replace(PLAIN, variant="plain-tuned", ttft_seconds=1.2, transfer_seconds=0.9)
FP8 = replace(PLAIN, variant="fp8-kv", ttft_seconds=0.7, transfer_seconds=0.45, wire_bytes=500)
PACKED = Sample("native-packed", 10.0, 8192, ttft_seconds=1.0, transfer_seconds=0.8, wire_bytes=1001, native_bytes=1000)
INT8 = replace(PACKED, variant="int8", ttft_seconds=0.5, transfer_seconds=0.4, wire_bytes=508)


def test_packing_and_quantisation_gain_stand_apart() -> None:
    (case,) = cases_of([PLAIN, TUNED_SAMPLE, FP8, PACKED, INT8])
    packed, int8 = case.row("native-packed"), case.row("int8")
    assert packed is not None
    assert int8 is not None
    assert (packed.packing_gain, packed.quantisation_gain) == (pytest.approx(1.2), None)
    assert (int8.packing_gain, int8.quantisation_gain) == (None, pytest.approx(2.0))
    assert (packed.transfer_packing_gain, int8.transfer_quantisation_gain) == (pytest.approx(1.125), pytest.approx(2.0))
    assert (int8.of_plain, int8.of_tuned) == (pytest.approx(0.25), pytest.approx(0.5 / 1.2))
    assert (int8.transfer_of_plain, int8.transfer_of_tuned) == (pytest.approx(0.25), pytest.approx(0.4 / 0.9))


def test_only_spectrumkv_quantises_on_the_way() -> None:
    """FP8 KV is smaller in the pool already; it is compared with plain, and has no gain over native-packed."""
    (case,) = cases_of([PLAIN, TUNED_SAMPLE, FP8, PACKED])
    fp8 = case.row("fp8-kv")
    assert fp8 is not None
    assert (fp8.packing_gain, fp8.quantisation_gain, fp8.transfer_quantisation_gain) == (None, None, None)
    assert fp8.b == pytest.approx(0.5)
    assert fp8.of_tuned == pytest.approx(0.7 / 1.2)


def test_medians_of_the_repetitions() -> None:
    samples = [replace(INT8, ttft_seconds=seconds, repeat=number) for number, seconds in enumerate((9.0, 0.4, 0.5))]
    (case,) = cases_of(samples)
    assert case.rows[0].ttft_seconds == 0.5
    assert case.rows[0].succeeded == 3


def test_slow_links_come_first_and_no_limit_last() -> None:
    samples = [
        replace(INT8, rate_gbps=rate, prompt_tokens=tokens) for rate in (0.0, 25.0, 1.0) for tokens in (8192, 2048)
    ]
    order = [(case.rate_gbps, case.prompt_tokens) for case in cases_of(samples)]
    assert order == [(1.0, 2048), (1.0, 8192), (25.0, 2048), (25.0, 8192), (0.0, 2048), (0.0, 8192)]


def test_the_warm_up_counts_only_when_it_failed() -> None:
    slow = replace(INT8, repeat=-1, ttft_seconds=60.0)
    (case,) = cases_of([slow, INT8])
    assert case.rows[0].ttft_seconds == INT8.ttft_seconds
    assert cases_of([slow]) == []
    broken = Sample("plain", 0.0, 8192, repeat=-1, status=Status.FAILED, error="HTTP status 500")
    (case,) = cases_of([broken])
    assert case.rows[0].failures == ("warm-up failed: HTTP status 500 (1 x)",)


def test_a_failed_request_gives_no_figures_and_is_said() -> None:
    failed = Sample("plain", 10.0, 8192, status=Status.TIMEOUT, error="no answer after 60 s")
    (case,) = cases_of([failed, replace(failed, repeat=1), INT8, PACKED])
    row, int8 = case.row("plain"), case.row("int8")
    assert row is not None
    assert int8 is not None
    assert (row.succeeded, row.ttft_seconds, row.failures) == (0, None, ("timeout: no answer after 60 s (2 x)",))
    assert int8.of_plain is None
    assert int8.quantisation_gain == pytest.approx(2.0)


def test_the_printed_tables_name_what_failed(tmp_path: Path) -> None:
    failed = Sample("plain", 10.0, 8192, status=Status.FAILED, error="queue is full")
    skipped = replace(failed, prompt_tokens=32768, status=Status.SKIPPED, error="servers given up after a failure")
    documents = [
        {"samples": [asdict(s) for s in (failed, skipped, TUNED_SAMPLE)], "goodput_gbps": {"10": 9.57, "0": 60.0}},
        {"samples": [asdict(s) for s in (PACKED, INT8)]},
    ]
    console = Console(width=200, record=True, file=(tmp_path / "out").open("w"))
    print_results(console, json.loads(json.dumps(documents)))
    text = console.export_text()
    assert "plain (10 Gb/s 8,192 tokens): failed: queue is full (1 x)" in text
    assert "plain (10 Gb/s 32,768 tokens): skipped: servers given up after a failure (1 x)" in text
    assert "10 Gb/s: 9.57" in text
    int8_lines = [line for line in text.splitlines() if "| int8 " in line]
    assert any("500" in line and "0.42" in line and "2.00" in line for line in int8_lines)
    assert any("400" in line and "0.508" in line for line in int8_lines)


def test_samples_survive_the_file_and_older_files_are_read() -> None:
    samples = [INT8, Sample("plain", 1.0, 2048, status=Status.SKIPPED, error="time limit of the run")]
    assert samples_of(json.loads(json.dumps({"samples": [asdict(sample) for sample in samples]}))) == samples
    older = {"variant": "int8", "rate_gbps": 5.0, "prompt_tokens": 8192, "ttft_seconds": 1.2, "no_longer_there": 3}
    assert samples_of({"samples": [older]}) == [Sample("int8", 5.0, 8192, ttft_seconds=1.2)]
    with pytest.raises(ValueError, match="no list `samples`"):
        samples_of({"transfer": []})


def test_what_cannot_end_in_time_is_foreseen() -> None:
    """1 MB for 1,000 tokens: 32,000 tokens need 256 ms at 1 Gb/s."""
    seen = [replace(INT8, prompt_tokens=1000, link_bytes=1_000_000, repeat=-1)]
    assert shortest_link_seconds(seen, "int8", 32000, 1.0) == pytest.approx(0.256)
    assert shortest_link_seconds(seen, "int8", 32000, 0.0) == 0.0
    assert shortest_link_seconds(seen, "plain", 32000, 1.0) == 0.0


def test_plain_mooncake_runs_at_its_defaults_and_tuned_by_default() -> None:
    of_name = {variant.name: variant for variant in VARIANTS}
    assert (of_name["plain"].env, of_name["plain-tuned"].env) == ({}, TUNED)
    assert of_name["fp8-kv"].flags == ("--kv-cache-dtype", "fp8_e4m3")
    assert {of_name[name].backend for name in ("plain", "plain-tuned", "fp8-kv")} == {"mooncake_tcp"}
    # One decode serves all profiles; an FP8 pool or other settings of Mooncake need their own.
    assert len({variant.decode_key for variant in VARIANTS}) == 4
    with pytest.raises(SpectrumKVError, match="no variant spectrum-9; there are plain, plain-tuned"):
        variants_named(["int8", "spectrum-9"])


def test_variants_are_grouped_by_the_servers_that_they_need() -> None:
    """Six servers at once: three plain pairs, then profiles that share a decode, five at most."""
    groups = groups_of(VARIANTS, 6)
    assert [[variant.name for variant in group] for group in groups] == [
        ["plain", "plain-tuned", "fp8-kv"],
        ["native-packed", "native-packed-zstd", "int8", "near-lossless-0.5", "balanced-0.3"],
        ["aggressive-0.2", "spectrum-0.5", "spectrum-0.35", "spectrum-0.28"],
    ]
    assert [len(group) for group in groups_of(VARIANTS, 2)] == [1] * len(VARIANTS)
    with pytest.raises(SpectrumKVError, match="expected at least 2"):
        groups_of(VARIANTS, 1)


def test_every_variant_gets_the_same_prompt() -> None:
    assert prompt_of(64, 0, 30000) == prompt_of(64, 0, 30000)
    assert prompt_of(64, 0, 30000) != prompt_of(64, 1, 30000)
    assert all(100 <= token < 30000 for token in prompt_of(1000, -1, 30000))


def test_the_log_of_plain_transfers_adds_up_what_came_after_the_offset(tmp_path: Path) -> None:
    path = tmp_path / "plain.jsonl"
    assert read_plain_transfer(path, 0) is None
    lines = [
        {"seconds": 0.5, "blocks": 64, "bytes": 1000, "status": 0},
        {"seconds": 0.25, "blocks": 9, "bytes": 10, "status": -1},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"seconds": 9')
    both = read_plain_transfer(path, 0)
    assert both is not None
    assert (both.seconds, both.blocks, both.wire_bytes, both.chunks, both.failed) == (0.75, 73, 1010, 2, 1)
    last = read_plain_transfer(path, len(json.dumps(lines[0])) + 1)
    assert last is not None
    assert (last.blocks, last.chunks) == (9, 1)


def test_a_module_becomes_a_plugin_that_sglang_finds(tmp_path: Path) -> None:
    import importlib.metadata

    import fragmented_pool

    root = plugin_folder(tmp_path, Path(fragmented_pool.__file__))
    (found,) = importlib.metadata.Distribution.discover(path=[str(root)])
    (entry_point,) = found.entry_points
    assert (entry_point.group, entry_point.value) == ("sglang.srt.plugins", "fragmented_pool:register")
    assert (root / "fragmented_pool.py").read_text() == Path(fragmented_pool.__file__).read_text()
    assert len(HOOKED) == 4


def test_a_long_message_keeps_both_ends() -> None:
    message = "servers did not start: " + "x" * 1000 + " ValueError: no FP8 here"
    short = shortened(message)
    assert short.startswith("servers did not start")
    assert short.endswith("ValueError: no FP8 here")
    assert len(short) < 320
    assert shortened("short") == "short"
