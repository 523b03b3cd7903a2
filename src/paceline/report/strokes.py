"""Markers and hatches as points and lines, the same on every canvas."""

from __future__ import annotations

import math
from collections.abc import Iterator

from paceline.report.canvas import Canvas, Point

_CORNERS = {
    "square": [45, 135, 225, 315],
    "diamond": [0, 90, 180, 270],
    "triangle-up": [90, 210, 330],
    "triangle-down": [30, 150, 270],
    "pentagon": [90, 162, 234, 306, 18],
}
_STEP = 6.0


def draw_marker(canvas: Canvas, place: Point, kind: str, colour: str, radius: float = 3.5) -> None:
    """One marker, filled or crossed."""
    x, y = place
    if kind in ("x", "cross"):
        turn = math.radians(45 if kind == "x" else 0)
        for angle in (turn, turn + math.pi / 2):
            dx, dy = radius * math.cos(angle), radius * math.sin(angle)
            canvas.line([(x - dx, y - dy), (x + dx, y + dy)], colour, 2)
        return
    corners = _CORNERS.get(kind, list(range(0, 360, 24)))
    size = radius * (1.25 if kind in _CORNERS else 1.0)
    canvas.area(
        [
            (x + size * math.cos(math.radians(a)), y - size * math.sin(math.radians(a)))
            for a in corners
        ],
        colour,
    )


def draw_block(
    canvas: Canvas, box: tuple[float, float, float, float], colour: str, hatch: str
) -> None:
    """A filled rectangle (left, top, right, bottom) with white strokes over it."""
    left, top, right, bottom = box
    canvas.area([(left, top), (right, top), (right, bottom), (left, bottom)], colour)
    if right - left < 1 or bottom - top < 1:
        return
    for stroke in hatch_lines(box, hatch):
        canvas.line(stroke, "#ffffff", 1.0)


def hatch_lines(
    box: tuple[float, float, float, float], hatch: str
) -> Iterator[tuple[Point, Point]]:
    """The strokes of a hatch inside a box."""
    left, top, right, bottom = box
    if hatch in ("/", "x", "\\"):
        for slope in {"/": (-1,), "\\": (1,), "x": (-1, 1)}[hatch]:
            yield from _slanted(box, slope)
    if hatch in ("-", "+"):
        for place in range(math.ceil(top / _STEP), math.floor(bottom / _STEP) + 1):
            yield (left, place * _STEP), (right, place * _STEP)
    if hatch in ("|", "+"):
        for place in range(math.ceil(left / _STEP), math.floor(right / _STEP) + 1):
            yield (place * _STEP, top), (place * _STEP, bottom)
    if hatch == ".":
        for row in range(math.ceil((top + 1) / _STEP), math.floor((bottom - 1) / _STEP) + 1):
            for column in range(math.ceil(left / _STEP), math.floor((right - 1) / _STEP) + 1):
                at = (column * _STEP, row * _STEP)
                yield at, (at[0] + 1, at[1])


def _slanted(box: tuple[float, float, float, float], slope: int) -> Iterator[tuple[Point, Point]]:
    """Lines y = slope * x + c, cut off at the box."""
    left, top, right, bottom = box
    ends = [y - slope * x for x in (left, right) for y in (top, bottom)]
    step = _STEP * math.sqrt(2)
    for place in range(math.ceil(min(ends) / step), math.floor(max(ends) / step) + 1):
        c = place * step
        across = sorted(((top - c) / slope, (bottom - c) / slope))
        start, end = max(left, across[0]), min(right, across[1])
        if end > start:
            yield (start, slope * start + c), (end, slope * end + c)
