"""What a client sends is read without trouble to anybody else."""

from __future__ import annotations

from typing import Any

import pytest

from spectrumkv_sglang.tuning.request_limits import NO_LIMITS, RequestLimits, read_limits


def test_what_is_well_formed_holds() -> None:
    assert read_limits(None) == NO_LIMITS
    assert read_limits({"ttft_target_s": 0.5, "max_kl": 0}) == RequestLimits(0.5, 0.0)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("fast", "expected an object with ttft_target_s and max_kl, got str"),
        ({"max_kl": "low"}, "max_kl is 'low', expected a number from 0"),
        ({"max_kl": True}, "max_kl is True, expected a number from 0"),
        ({"max_kl": -1.5}, "max_kl is -1.5, expected a number from 0"),
        ({"ttft_target_s": 0}, "ttft_target_s is 0, expected seconds above 0"),
        ({"max_kl": 10**5000}, "max_kl is a int, expected a number from 0"),
        ({"deadline": 1}, "unknown name 'deadline', expected ttft_target_s or max_kl"),
    ],
)
def test_what_is_not_is_named(value: Any, problem: str) -> None:
    assert read_limits(value).problem.startswith(problem)


def test_a_value_is_not_printed_whole_nor_many_names_named() -> None:
    nested: list[Any] = []
    for _ in range(5000):
        nested = [nested]
    assert read_limits({"max_kl": nested}).problem.startswith("max_kl is a list")
    many = read_limits({f"name {i}": i for i in range(100_000)})
    assert len(many.problem) < 400
    assert "100000 names" in many.problem
