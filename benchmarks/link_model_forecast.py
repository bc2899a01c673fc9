"""What the link model says of links that cannot be had here, in four forms that differ in what they count.

* kernels: pack and unpack at their measured speeds, nothing else: what the GPU allows;
* host: and what the host needs to plan and launch them, for every payload, as measured for a slot of that size;
* fitted: and what the TCP points cost beyond the model, of which a part is TCP's own (staging in host memory);
* unfused: a given S in place of the kernels, as systems without fused kernels have, and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from link_model_points import PROFILES

from spectrumkv_sglang.tuning.fixed_cost import without_host_time
from spectrumkv_sglang.tuning.link_model import (
    NO_FIXED_COST,
    Codec,
    FixedCost,
    Transfer,
    bytes_per_second,
    native_seconds,
    pipelined_break_even,
    pipelined_seconds,
)

SHAPES = ("Llama-3.1-8B", "Qwen2.5-7B", "Qwen2.5-32B")
RATES = (1, 5, 10, 25, 50, 100, 200, 400)
PROMPTS = (8192, 32768)
FORMS = ("kernels", "host", "fitted", "unfused")
COMPRESSED = tuple(variant for variant in PROFILES if variant != "native-packed")
GOAL_RATIO = 0.35
GOAL_VARIANT = "balanced-0.3"
SLOTS_MIB = (16, 64)
MIB = 1024 * 1024


@dataclass(frozen=True)
class Setting:
    """What all forecasts of a run have in common.

    Attributes:
        fitted: cost beyond the stages, from the measured transfers.
        chunk_tokens: tokens of a chunk.
        payload_bytes: size of a slot.
        unfused: S of the form `unfused`, native bytes per second.
    """

    fitted: FixedCost
    chunk_tokens: int
    payload_bytes: int
    unfused: float


@dataclass(frozen=True)
class Forecast:
    """What the model says of one transfer.

    Attributes:
        ratio: time over that of the native transfer, V / B.
        break_even_gbps: rate up to which this transfer is sooner than a native one.
    """

    shape: str
    tokens: int
    rate_gbps: float
    variant: str
    form: str
    native_seconds: float
    seconds: float
    ratio: float
    break_even_gbps: float


@dataclass(frozen=True)
class Goal:
    """How the goal, a transfer of at most `GOAL_RATIO` of native on the fastest link, stands for one shape.

    Attributes:
        ratios: time over native by form.
        allowed_chunk_seconds: what a chunk may cost beyond the kernels, by slot size in MiB; below 0: out of reach.
        ratios_with_host: time over native with the host's present time, by slot size in MiB.
    """

    shape: str
    rate_gbps: float
    ratios: dict[str, float]
    allowed_chunk_seconds: dict[int, float]
    ratios_with_host: dict[int, float]


def unfused_codec(b: float, speed: float) -> Codec:
    """A codec of S = ``speed``, half of the time packing and half of it unpacking."""
    return Codec(b, 2 * speed, 2 * speed)


def forecasts_of(
    codecs: Mapping[str, Mapping[str, Codec]], bytes_per_token: Mapping[str, float], setting: Setting
) -> list[Forecast]:
    """Every shape, prompt, rate, compressed variant and form."""
    return [
        _forecast(shape, tokens, rate, variant, form, codecs[shape][variant], tokens * bytes_per_token[shape], setting)
        for shape in SHAPES
        for tokens in PROMPTS
        for rate in RATES
        for variant in COMPRESSED
        for form in FORMS
    ]


def goal_of(
    shape: str, codecs: Mapping[int, Codec], chunk_bytes: float, setting: Setting, forecasts: Sequence[Forecast]
) -> Goal:
    """Where the goal stands for one chunk of ``chunk_bytes``, native, of `GOAL_VARIANT`; its codec by slot in MiB."""
    rate = RATES[-1]
    bandwidth = bytes_per_second(rate)
    native = native_seconds(chunk_bytes, bandwidth)

    def seconds(of: Codec, mib: int) -> float:
        return pipelined_seconds(Transfer.in_slots(chunk_bytes, of.b, payload_bytes=mib * MIB), bandwidth, of)

    return Goal(
        shape=shape,
        rate_gbps=rate,
        ratios={
            f.form: f.ratio
            for f in forecasts
            if (f.shape, f.tokens, f.rate_gbps, f.variant) == (shape, PROMPTS[0], rate, GOAL_VARIANT)
        },
        allowed_chunk_seconds={
            mib: GOAL_RATIO * native - seconds(without_host_time(codecs[mib]), mib) for mib in SLOTS_MIB
        },
        ratios_with_host={mib: seconds(codecs[mib], mib) / native for mib in SLOTS_MIB},
    )


def _forecast(
    shape: str, tokens: int, rate: float, variant: str, form: str, codec: Codec, native_bytes: float, setting: Setting
) -> Forecast:
    if form == "unfused":
        codec = unfused_codec(codec.b, setting.unfused)
    elif form == "kernels":
        codec = without_host_time(codec)
    fixed = setting.fitted if form == "fitted" else NO_FIXED_COST
    bandwidth = bytes_per_second(rate)
    chunks = max(1, round(tokens / setting.chunk_tokens))
    transfer = Transfer.in_slots(native_bytes, codec.b, chunks=chunks, payload_bytes=setting.payload_bytes)
    native = native_seconds(native_bytes, bandwidth)
    seconds = pipelined_seconds(transfer, bandwidth, codec, fixed)
    limit = pipelined_break_even(transfer, codec, fixed) * 8 / 1e9
    return Forecast(shape, tokens, rate, variant, form, native, seconds, seconds / native, limit)
