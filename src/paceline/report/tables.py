"""Tables on a terminal."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from paceline.schema import Candidate, Race
from paceline.text import rate, terminal


def race_table(race: Race) -> Table:
    """Every candidate, the fastest first, with its reason on a line of its own if need be."""
    title = f"{race.workload}, batch {race.batch_size}, {race.cores} cores"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("candidate", no_wrap=True)
    for name in ("images/s", "spread", "speedup", "MB"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("exact", no_wrap=True)
    table.add_column("why", overflow="fold", min_width=24)
    for entry in sorted(race.candidates, key=lambda c: -(c.images_per_second or 0.0)):
        table.add_row(*_row(entry), style="bold green" if entry.chosen else None)
    return table


def _row(entry: Candidate) -> list[str]:
    speed = entry.images_per_second
    memory = entry.memory_mb or entry.estimated_mb
    spread = ""
    if speed and entry.low and entry.high:
        spread = f"{(entry.high - entry.low) / speed:.0%}"
    return [
        entry.name,
        rate(speed) if speed else "-",
        spread,
        f"{entry.speedup:.2f}" if entry.speedup else "",
        f"{memory:,.0f}" if memory else "",
        "yes" if entry.exact else "no",
        ("chosen: " if entry.chosen else "") + entry.reason,
    ]


def wide_console() -> Console:
    """A console for tables: what a terminal has, and room enough when piped."""
    return terminal(width=150)
