"""What a search for profiles found: every judged point, and the frontier in bytes, loss and speed."""

from __future__ import annotations

from typing import Any

from spectrumkv_sglang.report.content import Picture, Section, Table, number


def tuning_sections(document: dict[str, Any]) -> list[Section]:
    """The frontier.json of `spectrumkv tune`."""
    frontier, others = document["frontier"], document["others"]
    rows = [
        [
            one["profile"], f"{one['wire_ratio']:.3f}", number(one["kl"]), number(one["speed"] / 1e9),
            " / ".join(f"{share:.0%}" for share in one["tier_shares"]), "yes" if one["candidate"] else "",
        ]
        for one in sorted(frontier, key=lambda one: one["wire_ratio"])
    ]  # fmt: skip
    columns = ["profile", "b", "KL, nats a token", "speed, GB/s", "high / mid / low", "controller's candidate"]
    return [
        Section(
            f"Search for profiles: {document['model']}",
            [
                f"{document['judged']} of {document['points_of_space']} points judged; speeds of "
                f"{document['speeds_of']}; stopped by: {document['stopped_by']}."
            ],
            [
                Table("Frontier in bytes, loss and speed", columns, rows),
                Picture(
                    "search",
                    "Wire bytes over native bytes against KL; grey: beaten in bytes, loss and speed.",
                    lambda figure: _draw(figure, frontier, others),
                    (8.0, 4.0),
                ),
            ],
        )
    ]


def _draw(figure: Any, frontier: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    axes = figure.add_subplot()
    for points, colour, label in ((others, "#adb5bd", "beaten"), (frontier, "#1b4965", "on the frontier")):
        axes.scatter([p["wire_ratio"] for p in points], [max(p["kl"], 1e-6) for p in points], color=colour, label=label)
    axes.set_yscale("log")
    axes.set_xlabel("wire bytes / native bytes")
    axes.set_ylabel("KL from native, nats a token")
    axes.legend(fontsize=8, frameon=False)
