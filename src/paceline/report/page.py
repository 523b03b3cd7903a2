"""The page of a run: while it trains, fed by the watcher, and the same page frozen in one file.

The frozen file needs nothing else: no network, no other file. A content security policy allows
the page's one script by its hash, whatever a run's files say; what comes from them is data inside
the page, from which the script makes texts, never markup.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from importlib import resources
from typing import Any

from paceline.report.figure import LOOKS, Figure, Section, Table

FROZEN = "default-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; script-src "
LIVE = (
    "default-src 'none'; connect-src 'self'; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'; img-src data: blob:; style-src 'unsafe-inline'; script-src "
)


@dataclass(frozen=True, kw_only=True)
class Report:
    """What the page shows of a run, or of several compared."""

    title: str
    subtitle: str
    tiles: tuple[tuple[str, str], ...]
    """Value and what it is."""
    sections: tuple[Section, ...]
    problems: tuple[str, ...] = ()
    footer: str = ""
    state: str = ""
    """One word: training, finished, lost ..."""
    updates: tuple[int, int] | None = None
    """Done, and all of them, while a training goes on."""
    controls: Mapping[str, Any] | None = None
    """What a training under way takes from the page, and how it is set now."""

    @property
    def figures(self) -> tuple[Figure, ...]:
        return tuple(figure for section in self.sections for figure in section.figures)

    @property
    def tables(self) -> tuple[Table, ...]:
        return tuple(table for section in self.sections for table in section.tables)


def parts(report: Report) -> dict[str, str]:
    """The head and every section as JSON; a watcher sends a part again only when it changes."""
    head = {
        "title": report.title,
        "subtitle": report.subtitle,
        "tiles": report.tiles,
        "problems": report.problems,
        "footer": report.footer,
        "state": report.state,
        "updates": report.updates,
        "controls": report.controls,
        "sections": [section.key for section in report.sections],
    }
    return {"head": _json(head), **{each.key: _json(_section(each)) for each in report.sections}}


def _json(value: Any) -> str:
    """JSON has no infinity, which sums of damaged numbers may come to: nothing in its place."""
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), separators=(",", ":"), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value


def _section(section: Section) -> dict[str, Any]:
    blocks = [
        {"figure": _figure(block)} if isinstance(block, Figure) else {"table": _table(block)}
        for block in section.blocks
    ]
    return {"title": section.title, "text": section.text, "blocks": blocks}


def _figure(figure: Figure) -> dict[str, Any]:
    """Without what is empty, which most of it is."""
    plain: dict[str, Any] = {key: value for key, value in vars(figure).items() if value}
    for axis in ("x", "y"):
        found = vars(plain[axis]).items()
        plain[axis] = {k: v for k, v in found if v is not None and v != ()}
    plain["series"] = [
        {k: v for k, v in vars(each).items() if v != () or k in "xy"} for each in figure.series
    ]
    return plain


def _table(table: Table) -> dict[str, Any]:
    return {
        "key": table.key,
        "title": table.title,
        "columns": table.columns,
        "numeric": [_is_numeric(table, column) for column in range(len(table.columns))],
        "rows": [table.shown(row) for row in range(len(table.rows))],
        "strong": table.strong,
        "folded": table.folded,
    }


def _is_numeric(table: Table, column: int) -> bool:
    """True when every known cell of the column is a number."""
    cells = [row[column] for row in table.rows if row[column] is not None]
    return bool(cells) and all(
        isinstance(cell, int | float) and not isinstance(cell, bool) for cell in cells
    )


def frozen(report: Report) -> str:
    """The page with everything inside that it shows."""
    data = (f"{json.dumps(f'0/{name}')}:{part}" for name, part in parts(report).items())
    text = "{" + ",".join(data) + "}"
    # No `</script>` inside the data can end it.
    text = text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
    rule = f'<meta http-equiv="Content-Security-Policy" content="{FROZEN}{_digest()}">'
    inside = f'<script type="application/json" id="data">{text}</script>'
    return _page(report.title, rule, inside)


def live() -> tuple[str, str]:
    """The page that a watcher feeds, and its content security policy."""
    no_icon = '<link rel="icon" href="data:,">'  # which a browser would ask for
    return _page("Paceline: watch", no_icon, ""), LIVE + _digest()


def _page(title: str, rule: str, data: str) -> str:
    text = asset("page.html").replace("/* STYLES */", asset("page.css") + _colours())
    text = text.replace("/* SCRIPT */", _script()).replace("<!-- POLICY -->", rule)
    # Last, so that nothing in them is taken for one of the places above.
    before, _, after = text.partition("<!-- DATA -->")
    return before.replace("<!-- TITLE -->", escape(title)) + data + after


def asset(name: str) -> str:
    """A file that comes with the package."""
    return (resources.files("paceline.report") / "assets" / name).read_text(encoding="utf-8")


@functools.cache
def _script() -> str:
    looks = [(" ".join(map(str, look.dash)), look.marker, look.hatch) for look in LOOKS]
    return f"const LOOKS = {json.dumps(looks)};\n{asset('charts.js')}{asset('page.js')}"


def _digest() -> str:
    found = hashlib.sha256(_script().encode()).digest()
    return f"'sha256-{base64.b64encode(found).decode()}'"


def _colours() -> str:
    """Of every series: light, dark, and on paper always light."""
    light, dark = (
        ":root { "
        + " ".join(f"--c{place}: {getattr(look, kind)};" for place, look in enumerate(LOOKS))
        + " }"
        for kind in ("light", "dark")
    )
    return f"{light}\n@media screen and (prefers-color-scheme: dark) {{ {dark} }}\n"
