"""The model around the moved KV: the same logits as in one go, whatever the attention, and what cannot be evaluated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from spectrumkv_sglang.evaluation.errors import EvaluationError
from spectrumkv_sglang.evaluation.model import EvalModel
from spectrumkv_sglang.evaluation.prefix import MovedKV, NativeMethod
from spectrumkv_sglang.evaluation.scorers import Observation, observation
from spectrumkv_sglang.importance.scorers import ExactScorer
from spectrumkv_sglang.kernels.transforms.derope import rotate_back

WINDOW = 8
SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("qwen2", {}),
    ("gemma3_text", {**SLIDING, "query_pre_attn_scalar": 16}),
    ("gemma2", {**SLIDING, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 1.0}),
]
IDS = torch.randint(2, 97, (48,), generator=torch.Generator().manual_seed(1)).tolist()
SPLIT = 30


def reference_model(model: EvalModel) -> Any:
    """The same weights with transformers' own eager attention."""
    own: Any = model._model
    other = type(own)(own.config).eval()
    other.load_state_dict(own.state_dict())
    other.set_attn_implementation("eager")
    return other


@pytest.mark.parametrize(("family", "more"), FAMILIES)
def test_after_native_kv_the_logits_are_those_of_the_whole_text(
    small_model: Callable[..., EvalModel], family: str, more: dict[str, Any]
) -> None:
    """Sliding windows and capped logits included: the cache holds everything, and the masks hide what they must."""
    model = small_model(family, **more)
    with torch.inference_mode():
        whole = reference_model(model)(input_ids=torch.tensor([IDS])).logits[0]
    prefilled = model.prefill("text", IDS[:SPLIT], {})
    assert prefilled.prefix.tokens == SPLIT
    assert prefilled.next_token == int(whole[SPLIT - 1].argmax())
    moved = NativeMethod().move(prefilled.prefix)
    torch.testing.assert_close(model.logits_after(moved, IDS[SPLIT:]), whole[SPLIT:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("family", "more"), FAMILIES)
def test_observed_importance_is_the_attention_that_the_model_pays(
    small_model: Callable[..., EvalModel], family: str, more: dict[str, Any]
) -> None:
    model = small_model(family, **more)
    observed = model.prefill("text", IDS, {"exact": Observation(ExactScorer())}).prefix.scores["exact"]
    with torch.inference_mode():
        attentions = reference_model(model)(input_ids=torch.tensor([IDS]), output_attentions=True).attentions
    received = sum(layer[0].mean(0).sum(0) for layer in attentions)
    tokens = len(IDS)
    could_attend = torch.zeros(tokens)
    for layer in range(2):
        window = WINDOW if more and layer == 0 else tokens
        could_attend += torch.tensor([min(window, tokens - position) for position in range(tokens)])
    torch.testing.assert_close(observed.read(torch.arange(tokens)), received / could_attend, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("family", "more"), FAMILIES)
def test_other_ways_to_observe(small_model: Callable[..., EvalModel], family: str, more: dict[str, Any]) -> None:
    """The raw sum, and attention times the norms of values, both from the model's own attention matrix."""
    model = small_model(family, **more)
    observed = {name: observation(name) for name in ("exact-raw", "exact-value-norm")}
    prefix = model.prefill("text", IDS, {name: seen for name, seen in observed.items() if seen}).prefix
    with torch.inference_mode():
        attentions = reference_model(model)(input_ids=torch.tensor([IDS]), output_attentions=True).attentions
    tokens = len(IDS)
    raw = sum(layer[0].mean(0).sum(0) for layer in attentions) / (len(attentions) * tokens)
    torch.testing.assert_close(prefix.scores["exact-raw"].read(torch.arange(tokens)), raw, rtol=1e-3, atol=1e-5)
    received, could_attend = torch.zeros(tokens), torch.zeros(tokens)
    for layer, attention in enumerate(attentions):
        norms = prefix.view.buffers.v[layer].norm(dim=-1)
        relative = (norms / norms.mean(0)).T.repeat_interleave(2, dim=0)  # two query heads read each KV head
        received += (attention[0].sum(1) * relative).mean(0)
        window = WINDOW if more and layer == 0 else tokens
        could_attend += torch.tensor([min(window, tokens - position) for position in range(tokens)])
    weighted = prefix.scores["exact-value-norm"].read(torch.arange(tokens))
    torch.testing.assert_close(weighted, received / could_attend, rtol=1e-3, atol=1e-5)


def test_continuations_fed_in_turn_do_not_see_one_another(small_model: Callable[..., EvalModel]) -> None:
    model = small_model("llama")
    moved = NativeMethod().move(model.prefill("text", IDS[:SPLIT], {}).prefix)
    fed = [IDS[SPLIT:], IDS[SPLIT + 5 : SPLIT + 9], IDS[SPLIT:]]
    for ids, logits in zip(fed, model.logits_after_each(moved, fed), strict=True):
        torch.testing.assert_close(logits, model.logits_after(moved, ids))


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_turned_back_keys_are_what_the_projection_gave(small_model: Callable[..., EvalModel], family: str) -> None:
    model = small_model(family)
    projected: list[torch.Tensor] = []
    for layer in model._model.model.layers:
        layer.self_attn.k_proj.register_forward_hook(lambda module, args, output: projected.append(output[0]))
    prefix = model.prefill("text", IDS, {}).prefix
    assert prefix.rotation is not None
    for layer, (cos, sin) in enumerate(prefix.rotation.layers):
        keys = rotate_back(prefix.view.buffers.k[layer], cos, sin)
        torch.testing.assert_close(keys.flatten(1), projected[layer], rtol=1e-4, atol=1e-5)


def test_turning_back_undoes_a_factor_and_leaves_what_is_not_turned(small_model: Callable[..., EvalModel]) -> None:
    from spectrumkv_sglang.kernels.transforms.derope import rotate

    x = torch.randn(10, 2, 16)
    angles = torch.randn(10, 4).repeat(1, 2)
    cos, sin = 1.3 * angles.cos(), 1.3 * angles.sin()  # as YaRN scales them; 8 of 16 dimensions are turned
    turned = rotate(x, cos, sin)
    assert torch.equal(turned[..., 8:], x[..., 8:])
    torch.testing.assert_close(rotate_back(turned, cos, sin), x)


def test_dropped_tokens_are_not_attended_to(small_model: Callable[..., EvalModel]) -> None:
    model = small_model("llama")
    prefix = model.prefill("text", IDS[:SPLIT], {}).prefix
    kept = torch.ones(SPLIT, dtype=torch.bool)
    kept[5:20] = False
    whole = prefix.copied_view().buffers
    spoilt = prefix.copied_view().buffers
    for buffer in (*spoilt.k, *spoilt.v):
        buffer[5:20] = 100.0
    first, second = (model.logits_after(MovedKV(kv, 0, kept), IDS[SPLIT:]) for kv in (whole, spoilt))
    torch.testing.assert_close(first, second)
    assert not torch.allclose(first, model.logits_after(MovedKV(whole, 0), IDS[SPLIT:]), atol=1e-3)
    assert len(model.generate(MovedKV(spoilt, 0, kept), IDS[SPLIT], 5)) == 5


def test_generation_is_greedy(small_model: Callable[..., EvalModel]) -> None:
    model = small_model("llama")
    prefilled = model.prefill("text", IDS[:SPLIT], {})
    generated = model.generate(NativeMethod().move(prefilled.prefix), prefilled.next_token, 4)
    text = [*IDS[:SPLIT], prefilled.next_token]
    for token in generated:
        with torch.inference_mode():
            assert token == int(reference_model(model)(input_ids=torch.tensor([text])).logits[0, -1].argmax())
        text.append(token)


def test_generation_stops_when_it_is_enough(small_model: Callable[..., EvalModel]) -> None:
    model = small_model("llama")
    prefilled = model.prefill("text", IDS[:SPLIT], {})
    moved, first = NativeMethod().move(prefilled.prefix), prefilled.next_token
    whole = model.generate(moved, first, 6)
    assert model.generate(moved, first, 6, lambda so_far: len(so_far) == 4) == whole[:3]
    assert model.generate(moved, first, 6, lambda so_far: True) == []


def test_a_recurrent_model_is_refused(small_model: Callable[..., EvalModel]) -> None:
    model = small_model("llama")
    model._layers = 3  # as if one layer kept no keys
    with pytest.raises(EvaluationError, match="not one key and one value a token and layer"):
        model.prefill("text", IDS, {})


def test_an_unknown_rotation_is_not_guessed(small_model: Callable[..., EvalModel]) -> None:
    model = small_model("cohere")  # turns neighbours
    assert model.prefill("text", IDS, {}).prefix.rotation is None
