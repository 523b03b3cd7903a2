"""The report as one HTML file that needs nothing else: no network, no other file.

Everything that came from a file of a run is escaped. A content security policy allows the two
scripts of the page by their hashes, and no connection at all, whatever a run's files say.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from importlib import resources

from paceline.report import plotly
from paceline.report.drawing import figure_svg
from paceline.report.figure import Figure, Section, Table


@dataclass(frozen=True, kw_only=True)
class Report:
    """What the page shows."""

    title: str
    subtitle: str
    tiles: tuple[tuple[str, str], ...]
    """Value and what it is."""
    sections: tuple[Section, ...]
    problems: tuple[str, ...] = ()
    footer: str = ""

    @property
    def figures(self) -> tuple[Figure, ...]:
        return tuple(figure for section in self.sections for figure in section.figures)

    @property
    def tables(self) -> tuple[Table, ...]:
        return tuple(table for section in self.sections for table in section.tables)


def asset(name: str) -> str:
    """A file that comes with the package."""
    return (resources.files("paceline.report") / "assets" / name).read_text(encoding="utf-8")


def render(report: Report) -> str:
    """The whole page."""
    scripts = [asset("plotly-basic.min.js"), asset("page.js")]
    policy = (
        "default-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; script-src "
        + " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    )
    figures = {figure.key: plotly.spec(figure) for figure in report.figures}
    links = "".join(
        f'<a href="#{escape(section.key)}">{escape(section.title)}</a>'
        for section in report.sections
    )
    tiles = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(what)}</span></div>'
        for value, what in report.tiles
    )
    problems = "".join(f"<p>{escape(problem)}</p>" for problem in report.problems)
    return "".join(
        (
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n',
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n',
            f"<title>{escape(report.title)}</title>\n<style>\n{asset('page.css')}</style>\n",
            f"</head>\n<body>\n<header>\n<h1>{escape(report.title)}</h1>\n",
            f'<p class="subtitle">{escape(report.subtitle)}</p>\n',
            f'<div class="tiles">{tiles}</div>\n' if tiles else "",
            f'<div class="problems">{problems}</div>\n' if problems else "",
            f"</header>\n<nav><div>{links}</div></nav>\n<main>\n",
            *(_section(section) for section in report.sections),
            f"</main>\n<footer><p>{escape(report.footer)}</p></footer>\n",
            f'<script type="application/json" id="figures">{_embedded(figures)}</script>\n',
            *(f"<script>{script}</script>\n" for script in scripts),
            "</body>\n</html>\n",
        )
    )


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _embedded(value: object) -> str:
    """JSON that no `</script>` inside it can end."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _section(section: Section) -> str:
    parts = [f'<section id="{escape(section.key)}">\n<h2>{escape(section.title)}</h2>\n']
    parts += [f"<p>{escape(words)}</p>\n" for words in section.text]
    for is_figure, blocks in itertools.groupby(
        section.blocks, lambda block: isinstance(block, Figure)
    ):
        group = list(blocks)
        parts.append(_figures(group) if is_figure else _tables(group))
    parts.append("</section>\n")
    return "".join(parts)


def _figures(figures: Iterable[Figure | Table]) -> str:
    parts = ['<div class="figures">\n']
    for figure in figures:
        assert isinstance(figure, Figure)
        kind = ' class="wide"' if figure.horizontal else ""
        parts.append(
            f'<figure id="figure-{escape(figure.key)}"{kind}>\n<h3>{escape(figure.title)}</h3>\n'
            f'<div class="plot" id="plot-{escape(figure.key)}"></div>\n'
            f'<div class="static">{figure_svg(figure, bare=True)}</div>\n'
            f"<figcaption>{escape(figure.caption)}</figcaption>\n</figure>\n"
        )
    return "".join((*parts, "</div>\n"))


def _tables(tables: Iterable[Figure | Table]) -> str:
    parts = []
    for table in tables:
        assert isinstance(table, Table)
        if not table.rows:
            continue
        made = _table(table)
        parts.append(
            f"<details><summary>{escape(table.title)}</summary>{made}</details>\n"
            if table.folded
            else made
        )
    return "".join(parts)


def _table(table: Table) -> str:
    numeric = [_is_numeric(table, column) for column in range(len(table.columns))]
    head = "".join(
        f'<th scope="col"{_class(n)}>{escape(title)}</th>'
        for title, n in zip(table.columns, numeric, strict=True)
    )
    rows = []
    for index in range(len(table.rows)):
        cells = "".join(
            f"<td{_class(n, len(cell) > 40)}>{escape(cell)}</td>"
            for cell, n in zip(table.shown(index), numeric, strict=True)
        )
        strong = ' class="strong"' if index == table.strong else ""
        rows.append(f"<tr{strong}>{cells}</tr>\n")
    caption = "" if table.folded else f"<caption>{escape(table.title)}</caption>"
    return (
        f'<div class="table"><table id="table-{escape(table.key)}">{caption}'
        f"<thead><tr>{head}</tr></thead><tbody>\n{''.join(rows)}</tbody></table></div>\n"
    )


def _class(numeric: bool, long: bool = False) -> str:
    if numeric:
        return ' class="n"'
    return ' class="long"' if long else ""


def _is_numeric(table: Table, column: int) -> bool:
    """True when every known cell of the column is a number."""
    cells = [row[column] for row in table.rows if row[column] is not None]
    return bool(cells) and all(
        isinstance(cell, int | float) and not isinstance(cell, bool) for cell in cells
    )
