"""A tokenizer in which every token shows, for servers with dummy weights.

``sglang.bench_serving`` takes the first chunk with text in it for the first token. Dummy weights answer with any id of
the vocabulary, and with a real tokenizer many of those have no text (special tokens, parts of characters, ids that it
does not have): the first token would be seen too late, or never.
"""

from __future__ import annotations

import json
from pathlib import Path

from spectrumkv_sglang.errors import SpectrumKVError


class TokenizerError(SpectrumKVError):
    """There is no tokenizer to give the servers and the client."""


def write_visible_tokenizer(folder: Path, vocabulary: int) -> Path:
    """Write a tokenizer whose token ``i`` is the word ``t<i>``, and return ``folder``.

    Args:
        folder: it is created.
        vocabulary: number of tokens.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(vocabulary)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config) + "\n", encoding="utf-8")
    return folder


def vocabulary_size(model: Path) -> int:
    """Number of token ids of a model.

    Raises:
        TokenizerError: its config.json does not say.
    """
    try:
        content = json.loads((model / "config.json").read_text(encoding="utf-8"))
        return int(content.get("text_config", content)["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TokenizerError(
            f"{model / 'config.json'} has no vocab_size ({error!r}): name a tokenizer, --tokenizer"
        ) from (error)


def serving_tokenizer(model: Path, chosen: Path | None, flags: list[str], folder: Path) -> Path:
    """The tokenizer of the servers and the client.

    Args:
        model: the model's directory.
        chosen: the one asked for, if any.
        flags: SGLang flags of the servers; with ``dummy`` weights among them one is written to ``folder``.
        folder: see there.
    """
    if chosen is not None:
        return chosen.resolve()
    if "dummy" in flags or "--load-format=dummy" in flags:
        return write_visible_tokenizer(folder, vocabulary_size(model)).resolve()
    return model.resolve()
