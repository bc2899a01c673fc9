"""A transformers model that prefills a prefix, gives its KV away and goes on from KV that it gets back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from spectrumkv_sglang.evaluation.attention_tap import AttentionObserver, PrefillObserver, observing, register_attention
from spectrumkv_sglang.evaluation.errors import EvaluationError
from spectrumkv_sglang.evaluation.prefix import MovedKV, Prefilled, PrefixKV
from spectrumkv_sglang.evaluation.rotation import RotationTap
from spectrumkv_sglang.evaluation.scorers import Observation
from spectrumkv_sglang.payload.errors import PayloadError
from spectrumkv_sglang.payload.geometry import ITEMSIZE_BY_DTYPE, KVGeometry
from spectrumkv_sglang.payload.key_rotation import KeyRotation
from spectrumkv_sglang.payload.kv_buffers import KVBuffers
from spectrumkv_sglang.transfer.pool_view import PoolView


@dataclass(frozen=True)
class ModelFiles:
    """What of a model is read before its weights: configuration and tokenizer."""

    path: Path
    config: Any
    tokenizer: Any

    @property
    def context_tokens(self) -> int | None:
        """Longest sequence that the model is made for; None when its configuration does not say."""
        return getattr(self.config.get_text_config(), "max_position_embeddings", None)

    @property
    def dtype(self) -> str:
        """Dtype that the weights were saved in, which a server's KV pool takes too."""
        named = str(getattr(self.config.get_text_config(), "dtype", None)).removeprefix("torch.")
        return named if named in ITEMSIZE_BY_DTYPE else "bfloat16"


def read_model_files(path: Path) -> ModelFiles:
    """Configuration and tokenizer of the model in a directory.

    Raises:
        EvaluationError: transformers is not installed, no such directory, or files that it cannot read.
    """
    if not path.is_dir():
        raise EvaluationError(f"--model-path {path}: no such directory; give a local Hugging Face model directory")
    if not (path / "config.json").is_file():
        raise EvaluationError(f"--model-path {path}: no config.json there; give a Hugging Face model directory")
    try:
        from transformers import AutoConfig, AutoTokenizer
    except ImportError as error:
        raise EvaluationError(
            f"the evaluation runs on transformers, which cannot be imported ({error}); SGLang brings it: "
            "pip install 'spectrumkv-sglang[sglang]'"
        ) from error
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # transformers raises whatever a file brings about
        raise EvaluationError(
            f"--model-path {path}: configuration or tokenizer cannot be read: {error}; is the directory complete, and "
            "does the installed transformers know this model?"
        ) from error
    tokenizer.model_max_length = 10**9  # whole texts are encoded and cut afterwards: no warning
    return ModelFiles(path, config, tokenizer)


class EvalModel:
    """The model with its weights.

    Args:
        files: from `read_model_files`.
        device: such as "cpu" or "cuda:0".
        dtype: that the model computes in.
        kv_dtype: that the pool holds KV in; native bytes are counted in it, and the native reference too goes
            through it.

    Raises:
        EvaluationError: the weights cannot be loaded, or the model is none that this can evaluate.
    """

    def __init__(self, files: ModelFiles, device: str, dtype: str, kv_dtype: str) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        self.device = torch.device(device)
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._kv_dtype = kv_dtype
        try:
            model = AutoModelForCausalLM.from_pretrained(
                files.path,
                config=files.config,
                dtype=self._dtype,
                attn_implementation=register_attention(),
                local_files_only=True,
            )
        except Exception as error:  # see read_model_files
            raise EvaluationError(f"--model-path {files.path}: the model cannot be loaded: {error}") from error
        self._model: Any = model.to(self.device).eval()
        self._tokenizer = files.tokenizer
        self._layers = int(files.config.get_text_config().num_hidden_layers)
        self.native_bytes_per_token = 0
        """Bytes of KV a token, known after the first prefill."""
        self._rotation = RotationTap(self._model, files.config.get_text_config().model_type)

    @torch.inference_mode()
    def prefill(self, name: str, token_ids: Sequence[int], observed: Mapping[str, Observation]) -> Prefilled:
        """Prefill ``token_ids`` and put their KV in a pool of one slot a token.

        Args:
            name: of the text.
            token_ids: of the prefix.
            observed: what to score tokens by meanwhile, by the scorer's name.

        Raises:
            EvaluationError: the model keeps something else than plain keys and values of every token and layer.
        """
        from transformers import DynamicCache

        # Without a configuration the cache keeps all tokens of every layer, of sliding-window layers too. The masks
        # that transformers makes for it still hide from those layers what lies before their window.
        cache = DynamicCache()
        observer = PrefillObserver(len(token_ids), observed, self.device)
        ids = torch.tensor([list(token_ids)], device=self.device)
        with observing(observer), self._rotation:
            output = self._model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        observer.finish()
        prefix = PrefixKV(name, self._pool(cache, len(token_ids)), observer.scores)
        return Prefilled(prefix, int(output.logits[0, -1].argmax()))

    @torch.inference_mode()
    def show_attention(self, token_ids: Sequence[int], observer: AttentionObserver) -> None:
        """Prefill ``token_ids`` for the sake of ``observer``, which sees every layer's attention; no KV is kept."""
        with observing(observer):
            self._model(
                input_ids=torch.tensor([list(token_ids)], device=self.device), use_cache=False, logits_to_keep=1
            )

    @torch.inference_mode()
    def logits_after(self, moved: MovedKV, token_ids: Sequence[int]) -> torch.Tensor:
        """Logits [tokens, vocabulary] of ``token_ids``, fed together after the moved KV."""
        return self._feed(self._cache(moved), moved, token_ids)

    @torch.inference_mode()
    def logits_after_each(self, moved: MovedKV, continuations: Sequence[Sequence[int]]) -> Iterator[torch.Tensor]:
        """`logits_after` of one continuation after the other, each fed behind the moved KV alone."""
        cache = self._cache(moved)
        tokens = cache.get_seq_length()
        for token_ids in continuations:
            yield self._feed(cache, moved, token_ids)
            cache.crop(tokens)

    @torch.inference_mode()
    def generate(
        self, moved: MovedKV, first_token: int, tokens: int, enough: Callable[[list[int]], bool] | None = None
    ) -> list[int]:
        """``tokens`` greedy tokens that follow ``first_token``, which prefill gave, from the moved KV.

        Args:
            moved: what they attend to.
            first_token: not among the result.
            tokens: how many.
            enough: called with everything so far, ``first_token`` too; True: no more are needed.
        """
        cache = self._cache(moved)
        generated = [first_token]
        while len(generated) <= tokens and not (enough and enough(generated)):
            generated.append(int(self._feed(cache, moved, generated[-1:])[-1].argmax()))
        return generated[1:]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of tokens, special ones left out."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def _feed(self, cache: Any, moved: MovedKV, token_ids: Sequence[int]) -> torch.Tensor:
        ids = torch.tensor([list(token_ids)], device=self.device)
        mask = None
        if moved.kept is not None:
            others = cache.get_seq_length() + len(token_ids) - len(moved.kept)
            mask = torch.cat([moved.kept, torch.ones(others, dtype=torch.bool)])[None].long().to(self.device)
        output = self._model(input_ids=ids, past_key_values=cache, use_cache=True, attention_mask=mask)
        return output.logits[0]

    def _pool(self, cache: Any, tokens: int) -> PoolView:
        if len(cache.layers) != self._layers or any(
            getattr(layer, "keys", None) is None or layer.keys.dim() != 4 or layer.keys.shape[2] != tokens
            for layer in cache.layers
        ):
            raise EvaluationError(
                "this model's cache is not one key and one value a token and layer (hybrid, recurrent or shared "
                "layers); SpectrumKV tiers plain MHA or GQA only, evaluate such a model"
            )
        shapes = {(layer.keys.shape, layer.values.shape) for layer in cache.layers}
        if len(shapes) != 1:
            raise EvaluationError("this model's layers differ in KV heads or head size: only equal layers are tiered")
        dtype = getattr(torch, self._kv_dtype)
        k = [layer.keys[0].transpose(0, 1).to(dtype).contiguous() for layer in cache.layers]
        v = [layer.values[0].transpose(0, 1).to(dtype).contiguous() for layer in cache.layers]
        try:
            geometry = KVGeometry(self._layers, k[0].shape[1], k[0].shape[2], v[0].shape[2], 1, self._kv_dtype)
        except PayloadError as error:
            raise EvaluationError(f"this model's KV cannot be packed: {error}") from error
        self.native_bytes_per_token = geometry.native_bytes_per_token
        angles = self._rotation.of_layers(self._layers)
        rotation = None if angles is None else KeyRotation(angles)
        unknown = "it is not known how models of this kind rotate their keys"
        return PoolView(KVBuffers(k=k, v=v), geometry, self.device, tokens, rotation, unknown)

    def _cache(self, moved: MovedKV) -> Any:
        """A transformers cache of its own with the moved KV."""
        from transformers import DynamicCache

        cache = DynamicCache()
        for layer, (k, v) in enumerate(zip(moved.buffers.k, moved.buffers.v, strict=True)):
            keys, values = (part.transpose(0, 1)[None].to(self._dtype) for part in (k, v))
            cache.update(keys, values, layer)
        return cache
