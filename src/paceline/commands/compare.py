"""`paceline compare`: what differs between two runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from paceline.report.load import RunData, finite
from paceline.report.one import flat
from paceline.schema import encode


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


_MEASURED = (
    ("images/s", "images_per_second"),
    ("time per update, median (s)", "update_seconds_median"),
    ("time per epoch, median (s)", "epoch_seconds_median"),
    ("time to read the data (s)", "read_seconds"),
    ("total time (s)", "total_seconds"),
    ("epochs", "epochs"),
    ("updates", "updates"),
    ("train loss", "train_loss"),
    ("test loss", "test_loss"),
    ("best test loss", "best_loss"),
    ("test accuracy", "test_accuracy"),
    ("best accuracy", "best_accuracy"),
)
_EXCHANGED = (
    ("bytes sent, all nodes", "bytes_sent"),
    ("bytes received, all nodes", "bytes_received"),
    ("messages sent, all nodes", "messages_sent"),
    ("messages received, all nodes", "messages_received"),
    ("communicating, mean of nodes (s)", "exchange_seconds"),
    ("hidden under computing (s)", "exchange_hidden_seconds"),
    ("waiting for the exchange (s)", "exchange_wait_seconds"),
)
"""Of runs over several nodes; left out where both have nothing to exchange."""


def compare(first: RunData, second: RunData) -> dict[str, Any]:
    """Settings and plan entries that differ, and every measured number of both.

    Each difference is {"key", "a", "b"}; each number also has "change": b / a - 1.
    """
    return {
        "a": str(first.path),
        "b": str(second.path),
        "config": _differences(dict(flat(first.config)), dict(flat(second.config))),
        "plan": _differences(_plan(first), _plan(second)),
        "measured": _measured(first, second),
    }


def _plan(run: RunData) -> dict[str, Any]:
    """Who does what; predictions and what was rejected follow from the race, not from a choice."""
    if run.plan is None:
        return {}
    plan = encode(run.plan)
    for key in ("rejected", "format"):
        plan.pop(key)
    nodes = {str(index): node for index, node in enumerate(plan.pop("nodes"))}
    return dict(flat({**plan, "nodes": nodes}))


def _differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {"key": key, "a": first.get(key), "b": second.get(key)}
        for key in dict.fromkeys((*first, *second))
        if first.get(key) != second.get(key)
    ]


def _measured(first: RunData, second: RunData) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for title, key in (*_MEASURED, *_EXCHANGED):
        a, b = first.number(key), second.number(key)
        if (a is None and b is None) or (not a and not b and (title, key) in _EXCHANGED):
            continue
        change = finite(b / a - 1) if a and b is not None else None
        rows.append({"key": key, "title": title, "a": a, "b": b, "change": change})
    return rows
