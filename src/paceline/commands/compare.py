"""`paceline compare`: what differs between two runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click


@click.command("compare")
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
def command(a: Path, b: Path, as_json: bool) -> None:
    """Say what differs between the runs A and B: configuration, plan, speed, loss, accuracy.

    \b
    paceline compare runs/before runs/after
    paceline report runs/before runs/after       the same as figures
    """
    from paceline.report.compare import compare
    from paceline.report.load import load_run
    from paceline.text import printable

    first, second = load_run(a, events=False), load_run(b, events=False)
    found = compare(first, second)
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    names = (first.name, second.name) if first.name != second.name else (str(a), str(b))
    for problem in (*first.problems, *second.problems):
        click.echo(f"warning: {printable(problem)}", err=True)
    for part in ("config", "plan"):
        if found[part]:
            _print([(row["key"], _plain(row["a"]), _plain(row["b"])) for row in found[part]],
                   (part, *names))  # fmt: skip
        else:
            click.echo(f"{part}: nothing differs\n")
    rows = [
        (row["title"], _number(row, "a"), _number(row, "b"), _change(row))
        for row in found["measured"]
    ]
    _print(rows, ("measured", *names, "change"))


def _print(rows: Sequence[tuple[str, ...]], columns: tuple[str, ...]) -> None:
    from rich import box
    from rich.table import Table

    from paceline.report.tables import wide_console

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, name in enumerate(columns):
        right = index > 0 and columns[0] == "measured"
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    wide_console().print(table)


def _plain(value: Any) -> str:
    return "-" if value is None else str(value)


def _number(row: dict[str, Any], side: str) -> str:
    value = row[side]
    if value is None:
        return "-"
    if row["key"].endswith("accuracy"):
        return f"{value:.2%}"
    if row["key"] in ("epochs", "updates"):
        return f"{value:,.0f}"
    return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def _change(row: dict[str, Any]) -> str:
    if row["change"] is None:
        return ""
    if row["key"].endswith("accuracy"):
        return f"{(row['b'] - row['a']) * 100:+.2f} points"
    return f"{row['change']:+.1%}"
