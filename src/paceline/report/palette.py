"""Colours that colour-blind people tell apart, each with a dash, a marker and a hatch of its own.

The colours are those of Okabe and Ito ("Color Universal Design", 2008), in an order that keeps
neighbours far apart; on dark ground the two darkest are lighter. Nothing is told by colour
alone: dashes, markers and hatches say the same again, also on black-and-white paper.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Look:
    """How one series looks everywhere."""

    light: str
    """Colour on white."""
    dark: str
    """Colour on a dark ground."""
    dash: tuple[int, ...]
    """Lengths of strokes and gaps in pixels; empty for a whole line."""
    marker: str
    """A name that `charts.js` and `strokes` draw."""
    hatch: str
    """Strokes over a block, as letters look like them; empty for plain."""


LOOKS = (
    Look("#0072B2", "#4AA8E8", (), "circle", ""),
    Look("#D55E00", "#F07C28", (7, 4), "square", "/"),
    Look("#009E73", "#1FC297", (2, 3), "diamond", "."),
    Look("#E69F00", "#F0B42E", (9, 3, 2, 3), "triangle-up", "\\"),
    Look("#CC79A7", "#DD92BB", (12, 4), "x", "x"),
    Look("#56B4E9", "#8CD0F5", (12, 3, 2, 3), "triangle-down", "-"),
    Look("#5B5B5B", "#B4B4B4", (4, 2), "cross", "|"),
    Look("#B3A900", "#F0E442", (3, 3, 9, 3), "pentagon", "+"),
    Look("#B8BCC2", "#5F656D", (1, 3), "circle", ""),
)
GUIDE = Look("#8A8A8A", "#8A8A8A", (4, 4), "circle", "")


def look(place: int) -> Look:
    """The look at a place; it begins again after the last.

    The colours begin again one dash later, so that the tenth series is not like the first.
    """
    turn, index = divmod(place, len(LOOKS))
    if not turn:
        return LOOKS[index]
    shape = LOOKS[(index + turn) % len(LOOKS)]
    colour = LOOKS[index]
    return Look(colour.light, colour.dark, shape.dash, shape.marker, shape.hatch)
