"""Tokenizers of the evaluation models, built from the vocabulary in their GGUF files.

Qwen2.5: byte-level BPE with the merges that the file lists. Gemma 3: SentencePiece BPE, of which the file keeps the
pieces and their scores but not the merges. SentencePiece joins the neighbours whose joint piece has the best score, so
the merges follow: every split of a piece into two known pieces, in the order of the joint piece's score.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spectrumkv_sglang.launch.packaged_models import ModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# tokenizer.ggml.token_type
_CONTROL = 3
_USER_DEFINED = 4
_SPACE = "\u2581"  # SentencePiece's visible space
# How Qwen2 cuts a text before BPE: contractions, words with a leading character, digits one by one, punctuation, space.
_QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def bpe_merges(scores: dict[str, float]) -> list[tuple[str, str]]:
    """Return BPE merges, best first, for SentencePiece pieces and their scores (higher is merged earlier).

    Where a piece can be split in several ways, the splits follow one another, the one with the better left and then
    right part first.
    """
    merges = []
    for piece, score in scores.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in scores and right in scores:
                merges.append((score, scores[left], scores[right], left, right))
    merges.sort(key=lambda merge: merge[:3], reverse=True)
    return [(left, right) for *_, left, right in merges]


def write_tokenizer(fields: dict[str, Any], out_dir: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` into ``out_dir``.

    Args:
        fields: contents of the GGUF file's fields.
        out_dir: an existing folder.

    Raises:
        ModelError: another kind of tokenizer than those of Qwen2.5 and Gemma 3.
    """
    kind = (fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"])
    if kind == ("gpt2", "qwen2"):
        tokenizer = _byte_level(fields)
    elif kind == ("llama", "default"):
        tokenizer = _sentencepiece(fields)
    else:
        raise ModelError(
            f"GGUF tokenizer is {kind}, expected that of Qwen2.5 (gpt2, qwen2) or Gemma 3 (llama, default)"
        )
    tokenizer.save(str(out_dir / "tokenizer.json"), pretty=False)
    tokens = fields["tokenizer.ggml.tokens"]
    named = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    if kind[0] == "gpt2":
        del named["bos_token"]  # Qwen2.5 puts nothing in front of a text
    architecture = fields["general.architecture"]
    config = {
        # The 4.x name: transformers 5 maps it to its own fast tokenizer.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": int(fields[f"{architecture}.context_length"]),
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
    }
    for key, name in named.items():
        field = f"tokenizer.ggml.{name}_token_id"
        if field in fields:
            config[key] = tokens[int(fields[field])]
    if "tokenizer.chat_template" in fields:
        config["chat_template"] = fields["tokenizer.chat_template"]
    write_json(out_dir / "tokenizer_config.json", config)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write readable JSON."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _byte_level(fields: dict[str, Any]) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    _add_special_tokens(tokenizer, tokens, fields["tokenizer.ggml.token_type"])
    return tokenizer


def _sentencepiece(fields: dict[str, Any]) -> Tokenizer:
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

    kinds = fields["tokenizer.ggml.token_type"]
    # llama.cpp writes the pieces that are runs of spaces with real spaces.
    pieces = [token.replace(" ", _SPACE) for token in fields["tokenizer.ggml.tokens"]]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    # SentencePiece takes user-defined pieces (runs of spaces and line ends) before any other, whatever their score.
    scores = {
        piece: -float(i) if kind == _USER_DEFINED else score - len(pieces)
        for i, (piece, kind, score) in enumerate(zip(pieces, kinds, fields["tokenizer.ggml.scores"], strict=True))
    }
    bos, unknown = (pieces[int(fields[f"tokenizer.ggml.{name}_token_id"])] for name in ("bos", "unknown"))
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=bpe_merges(scores), unk_token=unknown, byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    _add_special_tokens(tokenizer, pieces, kinds)
    tokenizer.add_tokens(
        [
            AddedToken(piece, normalized=False, special=False)
            for piece, kind in zip(pieces, kinds, strict=True)
            if kind == _USER_DEFINED and piece.strip(_SPACE)
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, vocabulary[bos])]
    )
    return tokenizer


def _add_special_tokens(tokenizer: Tokenizer, tokens: list[str], kinds: list[int]) -> None:
    from tokenizers import AddedToken

    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
