"""Tables on a terminal."""

from __future__ import annotations

from rich.table import Table

from paceline.schema import Candidate, Race


def race_table(race: Race) -> Table:
    """Every candidate, the fastest first."""
    table = Table(
        title=f"{race.workload}, batch {race.batch_size}, {race.cores} cores", title_justify="left"
    )
    for name, justify in (
        ("candidate", "left"),
        ("images/s", "right"),
        ("spread", "right"),
        ("speedup", "right"),
        ("memory", "right"),
        ("exact", "left"),
        ("", "left"),
    ):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for entry in sorted(race.candidates, key=lambda c: -(c.images_per_second or 0.0)):
        table.add_row(*_row(entry), style="bold green" if entry.chosen else None)
    return table


def _row(entry: Candidate) -> list[str]:
    speed = entry.images_per_second
    memory = entry.memory_mb or entry.estimated_mb
    return [
        entry.name,
        f"{speed:,.1f}" if speed else "-",
        f"{entry.low:,.0f} to {entry.high:,.0f}" if entry.low and entry.high else "",
        f"{entry.speedup:.2f}" if entry.speedup else "",
        f"{memory:,.0f} MB" if memory else "",
        "yes" if entry.exact else "no",
        ("chosen: " if entry.chosen else "") + entry.reason,
    ]
