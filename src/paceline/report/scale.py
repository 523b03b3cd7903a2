"""Ticks and numbers of an axis: pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterable

from paceline.report.figure import Axis
from paceline.text import clock


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
