"""Figures as Plotly reads them; colours are put in by the page, which knows light from dark."""

from __future__ import annotations

from html import escape
from typing import Any

from paceline.report.drawing import one_bar_per_category
from paceline.report.figure import Axis, Figure, Series
from paceline.report.palette import GUIDE, look

VERSION = "4.1.1"
"""Of assets/plotly-basic.min.js."""

_ROW, _CHROME = 27, 118
_MANY_POINTS = 40


def safe(words: str) -> str:
    """Plotly reads tags such as <b> and <a> in any text: a name of a file may not be one."""
    return escape(words, quote=False)


def spec(figure: Figure) -> dict[str, Any]:
    """Data and layout of a figure, JSON-able."""
    traces = [_trace(figure, each) for each in figure.series]
    lying = figure.horizontal
    value = _axis(figure.y, figure)
    place = _axis(figure.x, figure)
    if lying:
        place |= {"autorange": "reversed", "title": None, "automargin": True, "showgrid": False}
    bars = any(each.shape == "bar" for each in figure.series)
    spread = bars and not figure.stacked and not _one_lane(figure)
    height = max(3, len(figure.categories)) * _ROW * (1.25 if spread else 1) + _CHROME
    unified = not bars and len(figure.series) > 1
    return {
        "data": traces,
        "layout": {
            "xaxis": value if lying else place,
            "yaxis": place if lying else value,
            "barmode": "group" if spread else ("stack" if figure.stacked else "overlay"),
            "bargap": 0.28,
            "height": round(height) if lying else 380,
            "showlegend": len(figure.series) > 1,
            "hovermode": "x unified" if unified else "closest",
        },
    }


def _one_lane(figure: Figure) -> bool:
    bars = [each for each in figure.series if each.shape == "bar"]
    return any(each.base for each in bars) or one_bar_per_category(bars)


def _axis(axis: Axis, figure: Figure) -> dict[str, Any]:
    made: dict[str, Any] = {"title": {"text": axis.title}, "type": axis.kind}
    if axis.kind == "category":
        made |= {
            "categoryorder": "array",
            "categoryarray": [safe(each) for each in figure.categories],
        }
    if axis.format == "percent":
        made |= {"tickformat": ".0%", "hoverformat": ".2%"}
    elif axis.kind != "category":
        made |= {"tickformat": ",~r", "hoverformat": ",.5~g"}
    if axis.ticks:
        made |= {"tickvals": list(axis.ticks), "ticktext": [f"{tick:,.6g}" for tick in axis.ticks]}
    if axis.minimum == 0 and axis.kind == "linear":
        made["rangemode"] = "tozero"
        if axis.maximum is not None:
            made["range"] = [axis.minimum, axis.maximum]
    return made


def _trace(figure: Figure, each: Series) -> dict[str, Any]:
    seen = GUIDE if each.shape == "guide" else look(each.look)
    x = [safe(value) if isinstance(value, str) else value for value in each.x]
    y = list(each.y)
    trace: dict[str, Any] = {
        "name": safe(each.name),
        "x": y if figure.horizontal else x,
        "y": x if figure.horizontal else y,
        "colour": {"light": seen.light, "dark": seen.dark},
    }
    if each.labels:
        trace["text"] = [safe(label) for label in each.labels]
    if each.low and each.high:
        trace[f"error_{'x' if figure.horizontal else 'y'}"] = _error(each)
    if each.shape == "bar":
        trace |= {
            "type": "bar",
            "orientation": "h" if figure.horizontal else "v",
            "textposition": "none",
            "marker": {"pattern": {"shape": seen.hatch, "size": 6, "solidity": 0.25}},
            "hovertemplate": _hover(figure, each),
        }
        if each.base:
            trace |= {"base": list(each.base), "customdata": y}
        return trace
    dash = ",".join(f"{length}px" for length in seen.dash) or "solid"
    many = len(each.x) > _MANY_POINTS
    mode = {"points": "markers", "guide": "lines"}.get(each.shape, "lines+markers")
    return trace | {
        "type": "scatter",
        "mode": "lines" if many and mode == "lines+markers" else mode,
        "line": {"dash": dash, "width": 1.5 if each.shape == "guide" else 2},
        "marker": {"symbol": seen.marker, "size": 8},
        "hovertemplate": _hover(figure, each),
    }


def _error(each: Series) -> dict[str, Any]:
    pairs = list(zip(each.y, each.low, each.high, strict=True))
    return {
        "type": "data",
        "symmetric": False,
        "array": [None if y is None or h is None else max(0.0, h - y) for y, _, h in pairs],
        "arrayminus": [None if y is None or k is None else max(0.0, y - k) for y, k, _ in pairs],
        "thickness": 1.25,
        "width": 3,
    }


def _hover(figure: Figure, each: Series) -> str:
    """What hovering says; names are put in by Plotly, so that no name is read as a template."""
    value = "x" if figure.horizontal else "y"
    place = "y" if figure.horizontal else "x"
    more = "<br>%{text}" if each.labels else ""
    if each.shape != "bar":
        return f"%{{{value}}}{more.replace('<br>', ', ')}"
    amount = f"%{{{value}}}" if not each.base else "%{customdata:,.4~g} ms from %{base:,.4~g} ms"
    return f"<b>%{{{place}}}</b><br>%{{fullData.name}}: {amount}{more}<extra></extra>"
