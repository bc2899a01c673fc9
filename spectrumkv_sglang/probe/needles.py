"""Needle-in-a-haystack trials: one sentence with a random number, hidden in real text, and a question for it.

The sentence names an archive that nothing else in the prompt names, and a number of five digits that occurs nowhere
else, so an answer is right or wrong without any judgement. The prompt ends with the beginning of the answer's sentence,
for a chat model inside the assistant's turn: even small models then go on with the number, and what is tested is
whether they can still read it from the cache. With tokenizers that cut numbers into digits the first generated token
is the space before the number, so that every digit is generated from what has been transferred.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from spectrumkv_sglang.errors import SpectrumKVError
from spectrumkv_sglang.probe.haystack import Haystack, Tokenizer

DEFAULT_DEPTHS = (0.1, 0.5, 0.9)
DEFAULT_TRIALS = 3
DEFAULT_ANSWER_TOKENS = 16
_MIN_FILLER_TOKENS = 256
_SPARE_TOKENS = 16  # another archive's name, or number, may take a few more
_ARCHIVES = (
    *("walnut", "falcon", "juniper", "saffron", "marble", "cobalt", "badger", "lantern", "pelican", "thistle"),
    *("ginger", "velvet", "otter", "cedar", "turquoise", "raven", "maple", "coral", "lobster", "jasmine"),
    *("panther", "hazel", "violet", "tiger", "poppy", "dolphin", "emerald", "heron", "magnolia", "beaver"),
)
INTRODUCTION = "The following text contains one access code. Read it and remember the access code."
_NEEDLE = "The access code of the {archive} archive is {number}."
_QUESTION = "What is the access code of the {archive} archive?"
_ANSWER_START = "The access code of the {archive} archive is"


class NeedleError(SpectrumKVError):
    """Trials cannot be made with these lengths, depths or this text."""


@dataclass(frozen=True)
class NeedleTrial:
    """One prompt with a hidden needle.

    Attributes:
        token_ids: the whole prompt, special tokens included.
        prompt: the same as text, without a special token that the tokenizer puts in front.
        needle: the hidden sentence.
        answer: the number to be generated.
        depth: asked position of the needle, from 0 (start of the prompt) to 1.
        needle_token: index in ``token_ids`` at which the needle begins.
        length: what prompt and answer had to fit in, in tokens.
        seed: what the needle and the order of the text were drawn from.
    """

    token_ids: tuple[int, ...]
    prompt: str
    needle: str
    answer: str
    depth: float
    needle_token: int
    length: int
    seed: int

    def passed(self, answer_text: str) -> bool:
        """Whether the generated text contains the number, not as part of a longer one."""
        return re.search(rf"(?<!\d){self.answer}(?!\d)", answer_text) is not None


def make_trials(
    tokenizer: Tokenizer,
    haystack: Haystack,
    *,
    lengths: Sequence[int],
    depths: Sequence[float] = DEFAULT_DEPTHS,
    trials: int = DEFAULT_TRIALS,
    seed: int = 0,
    answer_tokens: int = DEFAULT_ANSWER_TOKENS,
) -> list[NeedleTrial]:
    """Return ``trials`` trials for each length.

    Fewer trials than depths are spread over them; more go round again, with other needles and the text in another
    order.

    Args:
        tokenizer: of the probed model; its chat template is used if it has one.
        haystack: where needles are hidden.
        lengths: for each the tokens that prompt and answer have to fit in together.
        depths: positions of the needle from 0 to 1, as a share of the length.
        trials: how many for each length.
        seed: the same one gives the same trials.
        answer_tokens: how many will be generated.

    Raises:
        NeedleError: no trials, a depth outside 0..1, or a length with no room for a needle in some text.
    """
    if trials < 1 or not lengths or not depths:
        raise NeedleError(
            f"no trials to make: {trials} trials, lengths {list(lengths)}, depths {list(depths)}; give at least one of "
            "each"
        )
    check_depths(depths)
    made: list[NeedleTrial] = []
    for length in lengths:
        for depth in _spread(depths, trials):
            # Multiplied apart, so that runs with neighbouring seeds share no trial.
            trial_seed = seed * 1_000_003 + len(made)
            made.append(_make_trial(tokenizer, haystack, length, depth, trial_seed, answer_tokens))
    return made


def check_depths(depths: Sequence[float]) -> None:
    """Raise NeedleError unless every depth lies in 0..1."""
    if wrong := [depth for depth in depths if not 0.0 <= depth <= 1.0]:
        raise NeedleError(f"depth {wrong[0]} of a needle is not between 0 (start of the text) and 1 (end of it)")


def least_length(tokenizer: Tokenizer, answer_tokens: int = DEFAULT_ANSWER_TOKENS) -> int:
    """Tokens of the shortest trial: what stands around the text in this model's chat template, and some text.

    Raises:
        NeedleError: the chat template cannot be used.
    """
    longest = max(_ARCHIVES, key=lambda archive: len(tokenizer.encode(archive, add_special_tokens=False)))
    frame = prompt_frame(tokenizer, longest)
    around = _count(tokenizer, frame, frame.text([], 0, needle_sentence(longest, "12345")))
    return around + _MIN_FILLER_TOKENS + answer_tokens + _SPARE_TOKENS


def needle_sentence(archive: str, number: str) -> str:
    """Return the sentence that is hidden."""
    return _NEEDLE.format(archive=archive, number=number)


def draw_archives(drawn: random.Random) -> list[str]:
    """Return every name of an archive, in a drawn order."""
    return drawn.sample(_ARCHIVES, len(_ARCHIVES))


def archives_not_in(text: str, archives: Sequence[str], least: int = 1) -> list[str]:
    """Return those of ``archives`` that ``text`` has no word of.

    Raises:
        NeedleError: they are fewer than ``least``.
    """
    words = set(re.findall(r"\w+", text.lower()))
    free = [name for name in archives if name not in words]
    if len(free) < least:
        raise NeedleError(
            f"the haystack contains all but {len(free)} of the words that could name a needle "
            f"({', '.join(_ARCHIVES[:3])}, ...), expected {least}: give another text with --haystack, or leave it out"
        )
    return free


def _spread(depths: Sequence[float], trials: int) -> list[float]:
    if trials >= len(depths):
        return [depths[i % len(depths)] for i in range(trials)]
    return [depths[(2 * i + 1) * len(depths) // (2 * trials)] for i in range(trials)]


def _make_trial(
    tokenizer: Tokenizer, haystack: Haystack, length: int, depth: float, seed: int, answer_tokens: int
) -> NeedleTrial:
    drawn = random.Random(seed)
    candidates = draw_archives(drawn)
    number = draw_number(drawn)
    room = length - answer_tokens
    frame = prompt_frame(tokenizer, candidates[0])
    overhead = _count(tokenizer, frame, frame.text([], 0, needle_sentence(candidates[0], number)))
    if room - overhead < _MIN_FILLER_TOKENS:
        raise NeedleError(
            f"a length of {length} tokens has no room for a needle in some text: the question, the needle and "
            f"{answer_tokens} answer tokens take {overhead + answer_tokens}, and the text at least "
            f"{_MIN_FILLER_TOKENS}; give longer lengths, or serve the model with a longer context"
        )
    filler = haystack.filler(tokenizer, room - overhead, seed)
    text = "".join(filler)
    while number in text:
        number = draw_number(drawn)
    archive = archives_not_in(text, candidates)[0]
    frame = prompt_frame(tokenizer, archive)
    needle = needle_sentence(archive, number)
    # Sentences encoded together may take a few tokens more than one by one.
    while _count(tokenizer, frame, frame.text(filler, 0, needle)) > room:
        filler.pop()
    place = _place(tokenizer, frame, filler, depth * length)
    prompt = frame.text(filler, place, needle)
    token_ids = tokenizer.encode(prompt, add_special_tokens=frame.add_special_tokens)
    before = frame.head + "".join(filler[:place])
    return NeedleTrial(
        token_ids=tuple(token_ids),
        prompt=prompt,
        needle=needle,
        answer=number,
        depth=depth,
        needle_token=_count(tokenizer, frame, before),
        length=length,
        seed=seed,
    )


@dataclass(frozen=True)
class PromptFrame:
    """What stands around the text: instruction and question, inside the chat template if there is one.

    Attributes:
        head: before the text.
        tail: from the question to the beginning of the answer.
        add_special_tokens: whether the tokenizer adds its own in front; a chat template has them already.
    """

    head: str
    tail: str
    add_special_tokens: bool

    def text(self, filler: Sequence[str], place: int, needle: str) -> str:
        """Return the prompt with the needle before sentence ``place``, set off by a space."""
        before = "".join(filler[:place])
        return f"{self.head}{before} {needle}{''.join(filler[place:])}{self.tail}"


def prompt_frame(tokenizer: Tokenizer, archive: str, introduction: str = INTRODUCTION) -> PromptFrame:
    """Return the frame of a prompt that asks for the number of ``archive``.

    Raises:
        NeedleError: the chat template cannot be used.
    """
    question = _QUESTION.format(archive=archive)
    answer_start = _ANSWER_START.format(archive=archive)
    if not tokenizer.chat_template:
        # The completion form: a base model goes on with the sentence.
        return PromptFrame(introduction, f"\n\n{question}\n{answer_start}", add_special_tokens=True)
    mark = "\x00"
    message = {"role": "user", "content": f"{introduction}{mark}\n\n{question}"}
    try:
        chat = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template may raise anything
        raise NeedleError(
            f"the model's chat template refuses a user's message ({error}): probe with another one in the model's "
            "directory (tokenizer_config.json or chat_template.jinja)"
        ) from error
    head, found, tail = chat.partition(mark)
    if not found:
        raise NeedleError("the model's chat template does not pass on the user's message: probe with another template")
    return PromptFrame(head, tail + answer_start, add_special_tokens=False)


def _count(tokenizer: Tokenizer, frame: PromptFrame, text: str) -> int:
    return len(tokenizer.encode(text, add_special_tokens=frame.add_special_tokens))


def _place(tokenizer: Tokenizer, frame: PromptFrame, filler: Sequence[str], target: float) -> int:
    """Return before which sentence the needle comes closest to the token position ``target``."""
    position = _count(tokenizer, frame, frame.head)
    best, distance = 0, abs(position - target)
    for i, sentence in enumerate(filler, start=1):
        position += len(tokenizer.encode(sentence, add_special_tokens=False))
        if abs(position - target) < distance:
            best, distance = i, abs(position - target)
    return best


def draw_number(drawn: random.Random) -> str:
    """Return five digits that do not begin with a zero, all of them different: nothing to guess or to repeat."""
    digits = drawn.sample("0123456789", 5)
    if digits[0] == "0":
        digits.reverse()
    return "".join(digits)
