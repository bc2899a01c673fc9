"""Which flags the probe's own server gets."""

import pytest

from spectrumkv_sglang.launch.servers import Device
from spectrumkv_sglang.probe.errors import ProbeError
from spectrumkv_sglang.probe.server_flags import decode_flags, probe_server_flags, with_cpu_defaults


def test_what_decides_the_answers_is_passed_on_and_what_does_not_is_left_out() -> None:
    flags = {"tp": 2, "dtype": "bfloat16", "attention-backend": "fa3", "port": 1, "host": "0.0.0.0", "page-size": 16}
    kept, left_out = probe_server_flags({**flags, "disable-radix-cache": True, "enable_metrics": True})
    assert kept == {"tp": 2, "dtype": "bfloat16", "attention-backend": "fa3", "page-size": 16}
    assert left_out == ("port", "host", "disable-radix-cache", "enable_metrics")


@pytest.mark.parametrize(
    "flags",
    [
        {"speculative-algorithm": "EAGLE"},
        {"speculative_algorithm": "EAGLE"},
        {"speculative-algo": "EAGLE"},
        {"pp-size": 2},
        {"nnodes": 2},
    ],
)
def test_what_makes_kv_travel_natively_is_refused_with_what_to_do(flags: dict[str, object]) -> None:
    with pytest.raises(ProbeError, match="probe"):
        probe_server_flags(flags)  # type: ignore[arg-type]


def test_sizes_of_one_are_no_parallelism() -> None:
    assert probe_server_flags({"pp-size": 1, "nnodes": 1})[0] == {"pp-size": 1, "nnodes": 1}


def test_a_machine_without_a_gpu_gets_what_it_needs_below_the_operators_own() -> None:
    flags = with_cpu_defaults({"dtype": "bfloat16", "max_total_tokens": 999}, Device.CPU)
    assert flags["device"] == "cpu"
    assert flags["dtype"] == "bfloat16"
    assert "max-total-tokens" not in flags
    assert with_cpu_defaults({"device": "cuda"}, Device.CPU) == {"device": "cuda"}
    assert with_cpu_defaults({"tp": 2}, Device.CUDA) == {"tp": 2}


@pytest.mark.parametrize(("version", "needed"), [("0.5.16", False), ("0.5.20", True), ("0.5.23", True)])
def test_decode_on_a_cpu_keeps_from_pinned_memory(version: str, needed: bool) -> None:
    assert bool(decode_flags({"device": "cpu"}, version)) is needed
    assert decode_flags({"device": "cuda"}, version) == {}


@pytest.mark.parametrize("key", ["model-path", "model", "model_path"])
def test_another_model_than_the_probed_one_is_refused(key: str) -> None:
    with pytest.raises(ProbeError, match="named once"):
        probe_server_flags({key: "/models/other"})
