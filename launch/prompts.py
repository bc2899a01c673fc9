"""Prompts of the demo and the end-to-end tests: written for this project, from 5 to about 900 tokens (SmolLM2)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Prompt:
    """A named prompt text."""

    name: str
    text: str


_HARBOUR = """\
The harbour of Fennick lies where the river Aske meets the sea, behind a breakwater of grey stone that took nineteen \
years to build. Before the breakwater the fishing boats were drawn up on the shingle every evening, and in a bad \
winter half of them were lost. The engineer who planned the wall, Ida Marren, had never built anything in water. She \
spent two summers in a rowing boat with a lead line and a notebook, measuring the depth at more than four thousand \
places, and only then did she draw the first curve of the wall. She set it forty metres further out than the town had \
asked for, because her soundings showed a ridge of rock there that nobody had known of. The extra distance cost a \
third more stone, and the council argued about it for a year.

The stone came from a quarry eleven kilometres up the river. Flat barges carried it down on the ebb and were towed \
back empty on the flood, so the whole work kept the rhythm of the tides. In the ninth year a storm broke through the \
unfinished end and moved blocks of twelve tonnes as if they were crates. Marren did not repair the gap at once. She \
waited until spring, measured where the sea had put the blocks, and changed the slope of the outer face to the one \
that the storm had chosen. It has not moved since. Sailors still call that part of the wall the Teacher.

When the breakwater was finished the town grew quickly. A rope works, two smokehouses and a yard for wooden boats \
were opened within five years, and the lighthouse was rebuilt in brick at the end of the new wall. Its lamp burned \
oil until the year of the great frost, when the harbour froze from side to side and a line of lanterns was set on the \
ice to guide the sledges. After the frost the keeper, a widower named Tobias Holm, asked for an electric lamp and was \
refused twice. He paid for the cable himself, out of what he earned by mending clocks, and the town paid him back \
eleven years later without being asked.

There was one more argument before the harbour was as it is now. The railway wanted a line along the quay, so that \
fish could be loaded from the boats into the wagons, and offered to pay for a deeper basin in return. The fishermen \
were for it and the boat builders against, since the line would have cut their yard off from its slip. For three \
weeks the two sides met every evening in the rope works, the only room that was large enough, and on the last evening \
a girl of fourteen, the daughter of the ferryman, asked why the rails could not end at the smokehouses and the fish \
go the last two hundred metres by water, as they had always done. Nobody had an answer to that. The line was built \
her way, the basin was dredged with the railway's money, and the yard kept its slip. The girl, whose name was Runa \
Sorley, became the first harbour master of Fennick who had not been a captain. She held the office for twenty-seven \
years, and in all that time she allowed only one change to the quay: a row of iron lamps, because the nights, she \
said, had not been asked for their opinion either.

Today the smokehouses are a museum and the boats are made of other things than wood, but the harbour office still \
keeps the habit of measuring. Every morning at seven the clerk writes down the height of the water, the direction of \
the wind and the number of boats that went out. The books fill a long shelf. The oldest are in the hand of Ida \
Marren, who kept them for six years after her eyes had begun to fail, ruling the lines with a nail so that she could \
feel them. On the last page that she wrote there is no remark about the wall. It says that the water was calm, that \
the wind came from the south-west, and that thirty-one boats went out and thirty-one came back.
"""

_STATIONS = ("Alder Bridge", "Brook End", "Carrow", "Dunmere", "East Lock", "Fallow Hill", "Gannet Rock", "Hythe")


def _weather_log(lines: int) -> str:
    """Return a log of river stations, one reading a line; the numbers follow a fixed rule."""
    rows = []
    for i in range(lines):
        station = _STATIONS[i * 5 % len(_STATIONS)]
        rows.append(
            f"{6 + i % 12:02d}:{i * 7 % 60:02d} {station}: level {1 + i * 37 % 300 / 100:.2f} m, rain {i * 11 % 23} mm"
        )
    return "\n".join(rows)


SHORT_PROMPTS = (
    Prompt("capital", "The capital of France is"),
    Prompt("steps", "Explain in two sentences how a bicycle stays upright while it is moving.\n"),
    Prompt("list", "Here is a shopping list for a simple vegetable soup:\n1."),
    Prompt("story", "Once upon a time, in a village at the edge of a forest, there lived a clockmaker who"),
)
LONG_PROMPTS = (
    Prompt(
        "harbour",
        f"Read the text and answer the question.\n\n{_HARBOUR}\n"
        "Question: Who planned the breakwater of Fennick, and how did she prepare?\n"
        "Answer: The breakwater of Fennick was planned by",
    ),
    Prompt(
        "readings",
        "These are the readings of the river stations for one day.\n\n"
        f"{_weather_log(40)}\n\nIn short, the readings show that",
    ),
)
DEMO_PROMPTS = (SHORT_PROMPTS[1], SHORT_PROMPTS[3], *LONG_PROMPTS)
