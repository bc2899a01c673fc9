"""Tables of the link model: validation, sequential form, forecasts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from link_model_forecast import (
    COMPRESSED,
    FORMS,
    GOAL_RATIO,
    GOAL_VARIANT,
    PROMPTS,
    RATES,
    SHAPES,
    Forecast,
    Goal,
    unfused_codec,
)
from link_model_points import Prediction
from rich import box
from rich.table import Table

from spectrumkv_sglang.tuning.link_model import Codec, break_even

PUBLISHED_LIMITS_GBPS = (25, 50)
"""Up to where int8 and int4 pay in KVShuttle: sequential and pipelined."""
_TEXT = ("variant", "shape", "form")


def validation_table(predictions: Sequence[Prediction]) -> Table:
    """Predicted against measured."""
    columns = ("Gb/s", "prompt", "variant", "b", "payloads", "measured ms", "predicted ms", "error")
    table = _table("Transfer time, measured and predicted with a cost fitted to the other links", columns)
    for prediction in predictions:
        point, measured = prediction.point, prediction.point.measured
        table.add_row(
            f"{point.rate_gbps:g}",
            f"{point.prompt_tokens:,}",
            point.variant,
            f"{measured.codec.b:.3f}",
            str(measured.transfer.payloads),
            f"{measured.seconds * 1e3:.0f}",
            f"{prediction.seconds * 1e3:.0f}",
            f"{prediction.relative_error:+.1%}",
        )
    return table


def sequential_table(codecs: Mapping[str, Mapping[str, Codec]], unfused: float) -> Table:
    """S and B* of the sequential form, beside B* of an unfused S and the S that the published limits mean."""
    limits = " to ".join(str(limit) for limit in PUBLISHED_LIMITS_GBPS)
    columns = ("shape", "variant", "b", "S GB/s", "B* Gb/s", f"B* at S = {unfused / 1e9:g}", f"S for B* = {limits}")
    table = _table("Sequential form: B* = (1 - 1/cr) S", columns)
    for shape, of_variant in codecs.items():
        for variant in COMPRESSED:
            codec = of_variant[variant]
            implied = " to ".join(f"{limit / 8 / (1 - codec.b):.1f}" for limit in PUBLISHED_LIMITS_GBPS)
            table.add_row(
                shape,
                variant,
                f"{codec.b:.3f}",
                f"{codec.speed / 1e9:,.0f}",
                f"{break_even(codec) * 8e-9:,.0f}",
                f"{break_even(unfused_codec(codec.b, unfused)) * 8e-9:,.0f}",
                implied,
            )
    return table


def time_table(forecasts: Sequence[Forecast], shape: str, form: str) -> Table:
    """Milliseconds of one shape: native and every variant."""
    table = _table(f"{shape}, form `{form}`: ms (of native)", ("tokens", "Gb/s", "native", *COMPRESSED))
    chosen = [f for f in forecasts if f.shape == shape and f.form == form]
    for tokens in PROMPTS:
        for rate in RATES:
            here = {f.variant: f for f in chosen if f.tokens == tokens and f.rate_gbps == rate}
            cells = [f"{here[name].seconds * 1e3:,.1f} ({here[name].ratio:.2f})" for name in COMPRESSED]
            table.add_row(f"{tokens:,}", str(rate), f"{here[COMPRESSED[0]].native_seconds * 1e3:,.1f}", *cells)
    return table


def ratio_table(forecasts: Sequence[Forecast], tokens: int, variant: str) -> Table:
    """Ratio to native of one variant, every shape and form, and where each form breaks even."""
    columns = ("shape", "form", *(f"{rate} Gb/s" for rate in RATES), "breaks even at Gb/s")
    table = _table(f"{variant}, {tokens:,} tokens: time over native", columns)
    for shape in SHAPES:
        for form in FORMS:
            row = [f for f in forecasts if (f.shape, f.tokens, f.variant, f.form) == (shape, tokens, variant, form)]
            ratios = [f"{f.ratio:.2f}" for f in sorted(row, key=lambda f: f.rate_gbps)]
            table.add_row(shape, form, *ratios, f"{row[0].break_even_gbps:,.0f}")
    return table


def goal_table(goals: Sequence[Goal]) -> Table:
    """Where the goal stands, and what would have to change."""
    slots = list(goals[0].allowed_chunk_seconds)
    columns = (
        "shape",
        *FORMS,
        *(f"ms a chunk may cost, {mib} MiB slots" for mib in slots),
        *(f"host, {mib} MiB slots" for mib in slots),
    )
    title = f"Goal: {GOAL_VARIANT} at {goals[0].rate_gbps:g} Gb/s, 8,192 tokens, at most {GOAL_RATIO} of native"
    table = _table(title, columns, no_wrap=False)
    for goal in goals:
        table.add_row(
            goal.shape,
            *(f"{goal.ratios[form]:.2f}" for form in FORMS),
            *(f"{goal.allowed_chunk_seconds[mib] * 1e3:.2f}" for mib in slots),
            *(f"{goal.ratios_with_host[mib]:.2f}" for mib in slots),
        )
    return table


def _table(title: str, columns: Sequence[str], *, no_wrap: bool = True) -> Table:
    table = Table(title=title, box=box.MARKDOWN)
    for column in columns:
        table.add_column(column, justify="left" if column in _TEXT else "right", no_wrap=no_wrap)
    return table
