"""Figures for paper: the same data as the interactive ones, drawn on a canvas."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from paceline.report.canvas import (
    Canvas,
    PngCanvas,
    Point,
    SvgCanvas,
    draw_block,
    draw_marker,
    text_width,
)
from paceline.report.figure import GUIDE, Axis, Figure, Look, Series, look
from paceline.text import clock

WIDTH = 760.0
_INK, _SOFT, _GRID = "#1c1c1e", "#55595f", "#e2e4e8"
_SMALL, _NORMAL, _TITLE = 11.0, 12.0, 15.0
_ROW = 26.0
_MANY_POINTS = 40


def figure_svg(figure: Figure) -> str:
    layout = _Layout(figure)
    canvas = SvgCanvas(WIDTH, layout.height)
    _draw(canvas, layout)
    return canvas.render(figure.title, figure.caption)


def figure_png(figure: Figure) -> bytes:
    """The figure as PNG, twice as sharp as the SVG's own size."""
    layout = _Layout(figure)
    canvas = PngCanvas(WIDTH, layout.height)
    _draw(canvas, layout)
    return canvas.render()


@dataclass(frozen=True)
class _Scale:
    """From values to pixels."""

    axis: Axis
    low: float
    high: float
    start: float
    end: float
    ticks: tuple[float, ...]

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.axis.kind == "log":
            value, low, high = (math.log10(max(v, 1e-300)) for v in (value, low, high))
        return self.start + (value - low) / ((high - low) or 1.0) * (self.end - self.start)


class _Layout:
    """Where everything stands."""

    def __init__(self, figure: Figure) -> None:
        self.figure = figure
        self.categories = figure.categories
        self.legend = list(_legend_rows(figure))
        self.caption = textwrap.wrap(figure.caption, 108)
        self.legend_top = 34.0
        self.top = self.legend_top + 20.0 * len(self.legend) + 12.0
        inner = max(3, len(self.categories)) * _ROW if figure.horizontal else 260.0
        self.bottom = self.top + inner
        self.height = self.bottom + 50.0 + 16.0 * len(self.caption)
        value, place = list(_values(figure)), [float(v) for v in _places(figure)]
        low, high, ticks = bounds(figure.y, value)
        labels = self.categories if figure.horizontal else [number(t, figure.y) for t in ticks]
        widest = max((text_width(_short(label), _SMALL) for label in labels), default=30.0)
        self.left = min(300.0, widest * 1.06 + (18.0 if figure.horizontal else 40.0))
        self.right = WIDTH - 18.0
        across, up = (self.left, self.right), (self.bottom, self.top)
        self.y = _Scale(figure.y, low, high, *(across if figure.horizontal else up), tuple(ticks))
        if figure.x.kind == "category":
            low, high, ticks = -0.5, len(self.categories) - 0.5, []
        else:
            low, high, ticks = bounds(figure.x, place)
        self.x = _Scale(
            figure.x,
            low,
            high,
            *((self.top, self.bottom) if figure.horizontal else across),
            tuple(ticks),
        )

    def point(self, place: float, value: float) -> Point:
        """Pixels of a value at a place of the x axis."""
        x, y = self.x(place), self.y(value)
        return (y, x) if self.figure.horizontal else (x, y)

    def place(self, value: float | str) -> float:
        """A value of the x axis as a number."""
        if self.figure.x.kind == "category":
            return float(self.categories.index(str(value)))
        return float(value)


def _draw(canvas: Canvas, layout: _Layout) -> None:
    figure = layout.figure
    canvas.text((14, 24), figure.title, _TITLE, colour=_INK, bold=True)
    _draw_legend(canvas, layout)
    _draw_value_axis(canvas, layout)
    _draw_place_axis(canvas, layout)
    bars = [each for each in figure.series if each.shape == "bar"]
    _draw_bars(canvas, layout, bars)
    for each in figure.series:
        if each.shape != "bar":
            _draw_line(canvas, layout, each)
    for row, words in enumerate(layout.caption):
        place = (14.0, layout.bottom + 58.0 + 16.0 * row)
        canvas.text(place, words, _SMALL, colour=_SOFT)


def _draw_legend(canvas: Canvas, layout: _Layout) -> None:
    for row, entries in enumerate(layout.legend):
        y = layout.legend_top + 20.0 * row + 8.0
        for x, each in entries:
            seen = _look(each)
            if each.shape == "bar":
                draw_block(canvas, (x, y - 6, x + 20, y + 6), seen.light, seen.hatch)
            else:
                if each.shape != "points":
                    canvas.line([(x, y), (x + 24, y)], seen.light, 2, seen.dash)
                if each.shape != "guide":
                    draw_marker(canvas, (x + 12, y), seen.marker, seen.light)
            canvas.text((x + 30, y + 4), _short(each.name), _SMALL, colour=_INK)


def _draw_value_axis(canvas: Canvas, layout: _Layout) -> None:
    figure = layout.figure
    for tick in layout.y.ticks:
        at = layout.y(tick)
        words = number(tick, figure.y)
        if figure.horizontal:
            canvas.line([(at, layout.top), (at, layout.bottom)], _GRID, 1)
            canvas.text((at, layout.bottom + 16), words, _SMALL, colour=_SOFT, anchor="middle")
        else:
            canvas.line([(layout.left, at), (layout.right, at)], _GRID, 1)
            canvas.text((layout.left - 7, at + 4), words, _SMALL, colour=_SOFT, anchor="end")
    middle = ((layout.left + layout.right) / 2, layout.bottom + 36)
    if figure.horizontal:
        canvas.text(middle, figure.y.title, _NORMAL, colour=_INK, anchor="middle")
    else:
        side = (18.0, (layout.top + layout.bottom) / 2)
        canvas.text(side, figure.y.title, _NORMAL, colour=_INK, anchor="middle", upright=True)


def _draw_place_axis(canvas: Canvas, layout: _Layout) -> None:
    figure = layout.figure
    for index, words in enumerate(layout.categories):
        at = layout.x(index)
        if figure.horizontal:
            place = (layout.left - 8, at + 4)
            canvas.text(place, _short(words), _SMALL, colour=_INK, anchor="end")
        else:
            place = (at, layout.bottom + 16)
            canvas.text(place, _short(words), _SMALL, colour=_INK, anchor="middle")
    for tick in layout.x.ticks:
        at = layout.x(tick)
        canvas.line([(at, layout.bottom), (at, layout.bottom + 4)], _SOFT, 1)
        place = (at, layout.bottom + 17)
        canvas.text(place, number(tick, figure.x), _SMALL, colour=_SOFT, anchor="middle")
    if figure.horizontal:
        canvas.line([(layout.left, layout.top), (layout.left, layout.bottom)], _SOFT, 1)
        return
    canvas.line([(layout.left, layout.bottom), (layout.right, layout.bottom)], _SOFT, 1)
    middle = ((layout.left + layout.right) / 2, layout.bottom + 36)
    canvas.text(middle, figure.x.title, _NORMAL, colour=_INK, anchor="middle")


def _draw_bars(canvas: Canvas, layout: _Layout, bars: list[Series]) -> None:
    side_by_side = not layout.figure.stacked and not any(each.base for each in bars)
    overlaid = side_by_side and one_bar_per_category(bars)
    lanes = len(bars) if side_by_side and not overlaid else 1
    thickness = 0.72 / max(1, lanes)
    heights: dict[float, float] = {}
    for lane, each in enumerate(bars):
        seen = _look(each)
        shift = (lane - (lanes - 1) / 2) * thickness if lanes > 1 else 0.0
        for index, (place, value) in enumerate(zip(each.x, each.y, strict=True)):
            if value is None:
                continue
            at = layout.place(place)
            start = each.base[index] if each.base else max(0.0, layout.y.low)
            if layout.figure.stacked:
                start = heights.get(at, 0.0)
                heights[at] = start + value
            elif not each.base:
                value -= start
            near = layout.point(at + shift - thickness / 2, start)
            far = layout.point(at + shift + thickness / 2, start + value)
            box = (
                min(near[0], far[0]),
                min(near[1], far[1]),
                max(near[0], far[0]),
                max(near[1], far[1]),
            )
            draw_block(canvas, box, seen.light, seen.hatch)
            _draw_error(canvas, layout, each, index, at + shift)


def _draw_line(canvas: Canvas, layout: _Layout, each: Series) -> None:
    seen = _look(each)
    for piece in _pieces(layout, each):
        if each.shape != "points":
            canvas.line(piece, seen.light, 1.5 if each.shape == "guide" else 2.0, seen.dash)
        if each.shape != "guide":
            every = max(1, len(piece) // 12) if len(piece) > _MANY_POINTS else 1
            for place in piece[::every]:
                draw_marker(canvas, place, seen.marker, seen.light)
    for index, value in enumerate(each.y):
        if value is not None:
            _draw_error(canvas, layout, each, index, layout.place(each.x[index]))


def _draw_error(canvas: Canvas, layout: _Layout, each: Series, index: int, at: float) -> None:
    if not each.low or not each.high:
        return
    low, high = each.low[index], each.high[index]
    if low is None or high is None:
        return
    near, far = layout.point(at, low), layout.point(at, high)
    canvas.line([near, far], _INK, 1.25)
    for x, y in (near, far):
        cap = [(x, y - 3), (x, y + 3)] if layout.figure.horizontal else [(x - 3, y), (x + 3, y)]
        canvas.line(cap, _INK, 1.25)


def _pieces(layout: _Layout, each: Series) -> Iterator[list[Point]]:
    """Runs of points without a gap."""
    piece: list[Point] = []
    for place, value in zip(each.x, each.y, strict=True):
        if value is None or not math.isfinite(value):
            if piece:
                yield piece
            piece = []
        else:
            piece.append(layout.point(layout.place(place), value))
    if piece:
        yield piece


def _values(figure: Figure) -> Iterator[float]:
    """Everything that the value axis must hold."""
    tops: dict[float | str, float] = {}
    for each in figure.series:
        if each.shape == "bar" and figure.y.kind == "linear":
            yield 0.0
        for index, value in enumerate(each.y):
            if value is None:
                continue
            if figure.stacked and each.shape == "bar":
                tops[each.x[index]] = tops.get(each.x[index], 0.0) + value
            else:
                yield value + (each.base[index] if each.base else 0.0)
        yield from (v for v in (*each.low, *each.high) if v is not None)
    yield from tops.values()


def _places(figure: Figure) -> Iterator[float]:
    if figure.x.kind != "category":
        for each in figure.series:
            yield from (float(value) for value in each.x)


def _legend_rows(figure: Figure) -> Iterator[list[tuple[float, Series]]]:
    """Entries with their place, as many to a row as fit; one series needs no legend."""
    if len(figure.series) < 2:
        return
    row: list[tuple[float, Series]] = []
    x = 14.0
    for each in figure.series:
        width = 30.0 + text_width(_short(each.name), _SMALL) * 1.06 + 20.0
        if row and x + width > WIDTH - 10.0:
            yield row
            row, x = [], 14.0
        row.append((x, each))
        x += width
    yield row


def one_bar_per_category(bars: list[Series]) -> bool:
    """True when series only differ in what they mean, such as chosen and not chosen."""
    places = [place for each in bars for place in each.x]
    return len(places) == len(set(places))


def _look(each: Series) -> Look:
    return GUIDE if each.shape == "guide" else look(each.look)


def _short(words: str) -> str:
    return words if len(words) <= 44 else words[:41] + "..."


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers that cover [low, high], about `count` steps of 1, 2, 2.5 or 5.

    >>> nice_ticks(0, 97)
    [0.0, 20.0, 40.0, 60.0, 80.0, 100.0]
    """
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low:
        high = low + 1 if math.isfinite(low) else 1.0
        low = low if math.isfinite(low) else 0.0
    rough = (high - low) / count
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = magnitude * next(
        nice for nice in (1, 2, 2.5, 5, 10) if rough <= nice * magnitude * 1.001
    )
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(place * step, 12) for place in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten, with 2 and 5 between them when there are few."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    steps = (1,) if last - first > 3 else (1, 2, 5)
    ticks = [step * 10.0**power for power in range(first, last + 1) for step in steps]
    below = max((tick for tick in ticks if tick <= low), default=ticks[0])
    above = min((tick for tick in ticks if tick >= high), default=ticks[-1])
    return [tick for tick in ticks if below <= tick <= above]


def number(value: float, axis: Axis | None = None) -> str:
    """A tick's number, short.

    >>> number(12000), number(0.25), number(1e6), number(0.5, Axis(title="", format="percent"))
    ('12,000', '0.25', '1,000,000', '50%')
    """
    if axis is not None and axis.format == "percent":
        return f"{round(value * 100, 1):g}%"
    if axis is not None and axis.format == "clock":
        return clock(value)
    if value and abs(value) < 0.001:
        return f"{value:.0e}"
    if abs(value) >= 1e7:
        return f"{value:.3g}"
    return f"{value:,.10g}" if abs(value) < 1000 else f"{value:,.0f}"


def bounds(axis: Axis, values: Iterable[float]) -> tuple[float, float, list[float]]:
    """Lowest and highest value of an axis, and its ticks."""
    known = [value for value in values if math.isfinite(value)]
    if axis.kind == "log":
        known = [value for value in known if value > 0] or [1.0]
        low, high = min(known), max(known)
        if axis.ticks:
            return low / 1.1, high * 1.1, list(axis.ticks)
        ticks = log_ticks(low, high)
        return ticks[0], ticks[-1], ticks
    known = known or [0.0, 1.0]
    low = axis.minimum if axis.minimum is not None else min(known)
    high = axis.maximum if axis.maximum is not None else max(known)
    if axis.ticks:
        room = (max(axis.ticks) - min(axis.ticks)) * 0.05 or 0.5
        return min(low, *axis.ticks, high) - room, max(high, *axis.ticks) + room, list(axis.ticks)
    ticks = nice_ticks(low, high)
    return ticks[0], ticks[-1], ticks
