"""A calibration for people."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from spectrumkv_sglang.calibration.allocation import Allocation
from spectrumkv_sglang.calibration.candidates import PART_NAMES
from spectrumkv_sglang.calibration.held_out import Comparison, HeldOutCheck
from spectrumkv_sglang.calibration.sensitivity import Sensitivity
from spectrumkv_sglang.kernels.precision import Precision


def print_sensitivity(sensitivity: Sensitivity, console: Console) -> None:
    """The curves, and how far single layers add up to them."""
    table = Table(title="KL, nats a token, with one part of all layers rounded", title_justify="left")
    for header in ("part", "precision", "KL"):
        table.add_column(header, justify="right" if header == "KL" else "left")
    for kv, name in enumerate(PART_NAMES):
        part = sensitivity.of(kv)
        for place, (precision, kl) in enumerate(part.curve.items()):
            table.add_row("" if place else f"{name} ({part.transform})", precision, f"{kl:.6f}")
        table.add_section()
    console.print(table)
    for kv, name in enumerate(PART_NAMES):
        part = sensitivity.of(kv)
        for precision, share in part.additivity().items():
            console.print(
                f"{name}: the single layers' KL at {precision} make {share:.2f} of all layers' together",
                highlight=False,
            )


def print_allocation(allocation: Allocation, console: Console) -> None:
    """The map, a layer a line, with each part's share of the expected KL divergence."""
    table = Table(
        title=f"Map by {allocation.granularity.value}: b {allocation.wire_ratio:.4f}, expected KL "
        f"{allocation.expected_kl:.5f}",
        title_justify="left",
    )
    for header in ("layer", "keys", "share", "values", "share"):
        table.add_column(header, justify="left" if header in PART_NAMES else "right", overflow="fold")
    total = allocation.expected_kl
    for layer, cells in enumerate(allocation.cells):
        columns = [str(layer)]
        for kv in range(len(PART_NAMES)):
            share = float(allocation.expected[layer, kv].sum()) / total if total > 0 else 0.0
            columns += [_precisions(cells[kv].tolist()), f"{share:.1%}"]
        table.add_row(*columns)
    console.print(table)


def print_check(check: HeldOutCheck, console: Console) -> None:
    """Expected and measured KL divergence of every map, and what finer maps were worth."""
    table = Table(
        title=f"On {len(check.windows)} windows that the map was not made from, by the code that serves",
        title_justify="left",
    )
    for header in ("map", "b", "expected KL", "KL", "change of PPL, %", "top-1"):
        table.add_column(header, justify="left" if header == "map" else "right", overflow="fold")
    for label, found in check.maps.items():
        row = found.row
        table.add_row(
            escape(label),
            f"{row.wire_ratio:.4f}",
            f"{found.expected_kl:.5f}",
            f"{row.kl:.5f}",
            f"{row.dppl_pct:+.2f}",
            f"{row.top1:.3f}",
        )
    console.print(table)
    for comparison in check.comparisons:
        console.print(in_words(comparison), highlight=False)


def in_words(comparison: Comparison) -> str:
    """One sentence on whether the finer map helps."""
    interval = comparison.interval
    measured = f"{comparison.ratio:.2f} of its KL"
    if interval is not None:
        measured += f" (95 %: {interval[0]:.2f} to {interval[1]:.2f})"
    names = f"{comparison.ours} beside {comparison.simpler}"
    if comparison.helps is None:
        return f"{names}: {measured}; these texts do not tell whether it helps"
    if comparison.helps:
        return f"{names}: {measured}; it helps"
    return f"{names}: {measured}; it does NOT help, the simpler one is better"


def _precisions(cells: list[int]) -> str:
    """One name where all heads agree, else one a head."""
    names = [Precision(cell).name.lower() for cell in cells]
    return names[0] if len(set(names)) == 1 else " ".join(names)
