"""What tiered KV was expected to bring."""

from __future__ import annotations

from typing import Any

from spectrumkv_sglang.report.content import Picture, Section, Table, megabytes, milliseconds
from spectrumkv_sglang.report.drawing import stacked


def sizing_sections(document: dict[str, Any]) -> list[Section]:
    """What `spectrumkv size --json` wrote."""
    advice = [f"{one['prompt_tokens']:,} tokens: {one['text']}" for one in document["advice"]]
    shown: list[Table | Picture] = []
    for one in document["estimates"]:
        title = f"{one['prompt_tokens']:,} tokens at {document['gbps']:g} Gb/s"
        native = ["native", "1", megabytes(one["native_bytes"]), milliseconds(one["native_transfer_seconds"]),
                  milliseconds(one["native_ttft_seconds"])]  # fmt: skip
        rows = [
            [choice["profile"], f"{choice['b']:.3f}", megabytes(choice["wire_bytes"]),
             milliseconds(choice["transfer_seconds"]), milliseconds(choice["ttft_seconds"])]
            for choice in one["choices"]
        ]  # fmt: skip
        shown.append(Table(title, ["profile", "b", "MB", "transfer, ms", "TTFT, ms"], [native, *rows]))
        shown.append(_picture(title, one))
    text = [f"Expected, not measured. {line}" if i == 0 else line for i, line in enumerate(document["assumptions"])]
    return [Section(f"Sizing: {document['model']}", [*advice, *text], shown)]


def _picture(title: str, one: dict[str, Any]) -> Picture:
    names = ["native", *(choice["profile"] for choice in one["choices"])]
    prefill = one["prefill_seconds"]
    ttft = [one["native_ttft_seconds"], *(choice["ttft_seconds"] for choice in one["choices"])]
    parts = {"prefill": [prefill] * len(names), "transfer": [max(0.0, seconds - prefill) for seconds in ttft]}
    return Picture(
        f"sizing {one['prompt_tokens']}",
        f"{title}: time to the first token; of the transfer, what does not hide behind prefill.",
        lambda figure: stacked(figure.add_subplot(), names, parts, "seconds"),
    )
