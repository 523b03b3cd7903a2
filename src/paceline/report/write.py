"""Writes a report's files: the page, its figures and its tables."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

from paceline.errors import UserError
from paceline.report.drawing import figure_png, figure_svg
from paceline.report.figure import Table
from paceline.report.page import Report, frozen
from paceline.run import write_whole
from paceline.schema import encode
from paceline.text import spreadsheet_cell


def write_page(report: Report, path: Path) -> Path:
    """The HTML file."""
    _write(path, frozen(report).encode())
    return path


def write_figures(report: Report, folder: Path) -> int:
    """Every figure as KEY.svg and KEY.png; gives their number."""
    for figure in report.figures:
        _write(folder / f"{figure.key}.svg", figure_svg(figure).encode())
        _write(folder / f"{figure.key}.png", figure_png(figure))
    return len(report.figures)


def write_tables(report: Report, folder: Path) -> int:
    """Every table as KEY.csv (whole numbers) and KEY.md (as shown); gives their number."""
    for table in report.tables:
        _write(folder / f"{table.key}.csv", table_csv(table).encode())
        _write(folder / f"{table.key}.md", table_markdown(table).encode())
    return len(report.tables)


def table_csv(table: Table) -> str:
    """For programs: every digit, nothing for what is not known."""
    output = io.StringIO()
    writer = csv.writer(output, lineterminator="\n")
    writer.writerow(spreadsheet_cell(name) for name in table.columns)
    writer.writerows([spreadsheet_cell(cell) for cell in row] for row in table.rows)
    return output.getvalue()


def table_markdown(table: Table) -> str:
    """For people: as the page shows it."""
    lines = [_line(table.columns), _line(["---"] * len(table.columns))]
    lines += [_line(table.shown(index)) for index in range(len(table.rows))]
    return "\n".join(lines) + "\n"


def _line(cells: Any) -> str:
    return "| " + " | ".join(_cell(cell) for cell in cells) + " |"


def _cell(text: str) -> str:
    """A bar or a new line would end the cell, and a tag would be read as HTML."""
    kept = " ".join(text.split()).replace("\\", "\\\\").replace("|", "\\|")
    return kept.replace("<", "&lt;")


def as_plain(report: Report) -> dict[str, Any]:
    """Figures and tables for programs."""
    return {
        "title": report.title,
        "subtitle": report.subtitle,
        "problems": list(report.problems),
        "sections": [
            {
                "key": section.key,
                "title": section.title,
                "text": list(section.text),
                "figures": [encode(figure) for figure in section.figures],
                "tables": [encode(table) for table in section.tables],
            }
            for section in report.sections
        ],
    }


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)
    except OSError as error:
        raise UserError(
            f"{path} cannot be written ({error.strerror}): choose another place"
        ) from None
