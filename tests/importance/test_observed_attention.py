"""Attention observed from sampled queries, against the written-out softmax."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spectrumkv_sglang.importance.attention import observed_attention


def brute_force(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: list[int],
    scaling: float,
    sliding_window: int | None,
    logit_cap: float | None,
) -> tuple[np.ndarray, np.ndarray]:
    """One query, one head, one key at a time, in float64."""
    keys, group = k.shape[0], q.shape[1] // k.shape[1]
    sums, could_attend = np.zeros(keys), np.zeros(keys)
    for index, position in enumerate(positions):
        oldest = 0 if sliding_window is None or sliding_window < 0 else max(0, position - sliding_window)
        could_attend[oldest : position + 1] += 1
        for head in range(q.shape[1]):
            logits = np.array(
                [float(q[index, head].double() @ k[j, head // group].double()) for j in range(oldest, position + 1)]
            )
            logits *= scaling
            if logit_cap:
                logits = logit_cap * np.tanh(logits / logit_cap)
            weights = np.exp(logits - logits.max())
            sums[oldest : position + 1] += weights / weights.sum() / q.shape[1]
    return sums, could_attend


@given(
    keys=st.integers(1, 24),
    heads=st.sampled_from([(1, 1), (3, 1), (4, 2), (6, 3)]),
    window=st.sampled_from([None, -1, 0, 3, 100]),
    cap=st.sampled_from([None, 0.0, 2.0]),
    block_bytes=st.sampled_from([1, 500, 1 << 20]),
    seed=st.integers(0, 100),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_equals_brute_force(
    keys: int,
    heads: tuple[int, int],
    window: int | None,
    cap: float | None,
    block_bytes: int,
    seed: int,
    data: st.DataObject,
) -> None:
    positions = data.draw(st.lists(st.integers(0, keys - 1), max_size=8))
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(len(positions), heads[0], 8, generator=generator) * 3
    k = torch.randn(keys, heads[1], 8, generator=generator)

    sums, could_attend = observed_attention(
        q, k, torch.tensor(positions, dtype=torch.int64), 0.35, window, cap, block_bytes=block_bytes
    )

    expected_sums, expected_counts = brute_force(q, k, positions, 0.35, window, cap)
    assert sums.dtype == could_attend.dtype == torch.float32
    np.testing.assert_allclose(sums.numpy(), expected_sums, atol=1e-5)
    np.testing.assert_array_equal(could_attend.numpy(), expected_counts)


def test_all_queries_normalised_equal_the_attention_matrix() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(40, 6, 16), torch.randn(40, 2, 16)
    logits = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(3, dim=1)) * 0.25
    attention = logits.masked_fill(~torch.ones(40, 40, dtype=torch.bool).tril(), float("-inf")).softmax(-1)
    expected = attention.sum(dim=(0, 1)) / 6 / torch.arange(40, 0, -1)

    sums, could_attend = observed_attention(q, k, torch.arange(40), 0.25)

    torch.testing.assert_close(sums / could_attend, expected, rtol=1e-5, atol=1e-7)
    assert float(sums.sum()) == pytest.approx(40, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_inputs_are_computed_in_float32(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    q, k = torch.randn(5, 4, 32).to(dtype), torch.randn(50, 2, 32).to(dtype)
    positions = torch.tensor([49, 3, 20, 20, 0])
    half = observed_attention(q, k, positions, 0.2)
    full = observed_attention(q.float(), k.float(), positions, 0.2)
    assert torch.equal(half[0], full[0])
    assert torch.equal(half[1], full[1])


def test_later_keys_and_other_queries_do_not_leak() -> None:
    torch.manual_seed(2)
    q, k = torch.randn(2, 2, 8), torch.randn(10, 2, 8)
    k[6:] = float("nan")  # slots after the last sampled query may hold anything
    sums, could_attend = observed_attention(q, k, torch.tensor([5, 2]), 1.0)
    assert torch.isfinite(sums).all()
    assert (sums[6:] == 0).all()
    assert could_attend.tolist() == [2, 2, 2, 1, 1, 1, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("q_shape", "k_shape", "positions", "message"),
    [
        ((2, 4, 8), (5, 3, 8), [0, 1], "multiple of kv_heads"),
        ((2, 4, 8), (5, 2, 16), [0, 1], "head_dim"),
        ((2, 4), (5, 2, 8), [0, 1], "expected q"),
        ((2, 4, 8), (5, 2, 8), [0], "expected 2 query positions"),
        ((2, 4, 8), (5, 2, 8), [0, 5], r"\[0, 5\)"),
        ((2, 4, 8), (5, 2, 8), [-1, 2], r"\[0, 5\)"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    q_shape: tuple[int, ...], k_shape: tuple[int, ...], positions: list[int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        observed_attention(torch.zeros(q_shape), torch.zeros(k_shape), torch.tensor(positions), 1.0)
