"""What a report is made of: sections of text, figures and tables, as frozen data.

A figure says what is shown, not how: the page's `charts.js` draws it on a screen and in print,
`drawing` as a file for papers, both from the same numbers, so that they cannot disagree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Cell = str | float | int | None
Format = Literal["plain", "percent", "clock"]
"""A clock shows seconds as minutes and seconds."""


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One axis; `title` has the unit."""

    title: str
    kind: Literal["linear", "log", "category"] = "linear"
    format: Format = "plain"
    ticks: tuple[float, ...] = ()
    """Where ticks stand when the values are few and mean something (1, 2, 4 hosts)."""
    minimum: float | None = None
    maximum: float | None = None


@dataclass(frozen=True, kw_only=True)
class Series:
    """One named set of points, bars or blocks."""

    name: str
    x: tuple[float | str, ...]
    y: tuple[float | None, ...]
    look: int = 0
    """Place in the palette: colour, dash, marker and hatch go together."""
    shape: Literal["line", "points", "bar", "guide"] = "line"
    """A guide is a thin line to compare with, such as the ideal."""
    low: tuple[float | None, ...] = ()
    high: tuple[float | None, ...] = ()
    """Ends of the error bars, where there are any."""
    base: tuple[float, ...] = ()
    """Where each bar begins, when not at zero: the blocks of a timeline."""
    labels: tuple[str, ...] = ()
    """What else hovering over a point says."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One figure."""

    key: str
    """Names its files and its place in the page; unique in a report."""
    title: str
    caption: str
    """What is shown and how it was measured."""
    x: Axis
    y: Axis
    series: tuple[Series, ...]
    stacked: bool = False
    horizontal: bool = False
    """Bars lie: the categories of `x` stand on the vertical axis, the first one on top."""
    order: tuple[str, ...] = ()
    """Order of the categories of `x`; that of their appearance when empty."""

    @property
    def categories(self) -> tuple[str, ...]:
        """The categories of `x`, in order."""
        if self.x.kind != "category" or self.order:
            return self.order
        return tuple(dict.fromkeys(str(value) for each in self.series for value in each.x))


@dataclass(frozen=True, kw_only=True)
class Table:
    """One table; numbers stay numbers, `formats` says how each column is shown."""

    key: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    formats: tuple[str, ...] = ()
    """One format specification per column (",.1f", ".1%", ""); all plain when empty."""
    strong: int | None = None
    """The row to point out."""
    folded: bool = False
    """Shown only when asked for: a long list of little interest."""

    def shown(self, row: int) -> tuple[str, ...]:
        """The cells of a row as text."""
        formats = self.formats or ("",) * len(self.columns)
        return tuple(show(cell, spec) for cell, spec in zip(self.rows[row], formats, strict=True))


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the report."""

    key: str
    title: str
    text: tuple[str, ...] = ()
    blocks: tuple[Figure | Table, ...] = ()

    @property
    def figures(self) -> tuple[Figure, ...]:
        return tuple(block for block in self.blocks if isinstance(block, Figure))

    @property
    def tables(self) -> tuple[Table, ...]:
        return tuple(block for block in self.blocks if isinstance(block, Table))


def show(cell: Cell, spec: str = "") -> str:
    """A cell as a person reads it: nothing for None, `spec` for numbers.

    >>> show(1234.5, ",.1f"), show(None), show("x", ",.1f"), show(0.5, ".0%")
    ('1,234.5', '', 'x', '50%')
    """
    if cell is None:
        return ""
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, int | float) and spec:
        return format(cell, spec)
    return str(cell)


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
