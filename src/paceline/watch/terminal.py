"""`paceline watch --text`: what the page shows, for a terminal."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from paceline.report.load import RunData
from paceline.report.track import HostSeen, Track
from paceline.schema.ledger import TITLES, RankLedger
from paceline.text import duration, rate, terminal
from paceline.watch.follow import Follower
from paceline.watch.state import run_of

_BARS = "▁▂▃▄▅▆▇█"


def watch_text(paths: Sequence[Path], *, once: bool = False) -> None:
    """Show the runs until all of them are over, or Ctrl-C; `once`: as they are now."""
    runs = [Follower(path) for path in paths]
    console = terminal()

    def look() -> Group:
        for run in runs:
            run.look()
        return Group(*(shown(run_of(run)) for run in runs))

    if once or not console.is_terminal:
        console.print(look())
        return
    with Live(look(), console=console, auto_refresh=False) as live:
        while any(not run.is_over for run in runs):
            time.sleep(1.0)
            live.update(look(), refresh=True)


def spark(values: Sequence[float], width: int = 48) -> str:
    """A small curve.

    >>> spark([0.0, 1.0, 2.0])
    '▁▅█'
    """
    values = values[-width:]
    if not values:
        return ""
    low, high = min(values), max(values)
    return "".join(_BARS[round((v - low) / ((high - low) or 1.0) * 7 + 1e-9)] for v in values)


def shown(run: RunData) -> RenderableType:
    """One run."""
    track = run.track or Track(state="starting", seconds=0.0)
    line = Text(f"update {track.update:,}")
    if track.updates:
        line.append(f" of {track.updates:,}")
    if track.speed:
        line.append(f"  {rate(track.speed)} {track.unit}/s")
    if track.loss is not None:
        line.append(f"  loss {track.loss:.4g}")
    line.append(f"  {duration(track.seconds)} so far")
    if track.left is not None:
        line.append(f"  {duration(track.left)} left")
    full = round(60 * track.update / (track.updates or 1))
    parts: list[RenderableType] = [line, Text("━" * full + "╌" * (60 - full))]
    for name, points in (("loss", track.losses), ("speed", track.speeds)):
        if curve := spark([value for _, value in points]):
            parts.append(Text(f"{name:<6} {curve}"))
    if track.leg:
        parts.append(Text(f"leg    {track.leg[1]}"))
    parts.append(_hosts(track.hosts))
    if run.ledger is not None:
        parts += [Text(sentence) for sentence in run.ledger.sentences()]
        parts += [Text(_where(rank)) for rank in run.ledger.ranks]
    parts += [Text(f"{duration(at)}  {text}") for at, _, _, text in track.notes[-3:]]
    title = f"{run.name} · {run.model} on {run.data} · {track.state}"
    return Panel(Group(*parts), title=Text(title), title_align="left")


def _where(rank: RankLedger) -> str:
    largest = sorted(rank.shares.items(), key=lambda part: -part[1])[:4]
    return f"{rank.name}: " + ", ".join(
        f"{share:.0%} {TITLES[name]}" for name, share in largest if share
    )


def _hosts(hosts: Sequence[HostSeen]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("host", "", "cores", "memory MB", "MB/s out", "MB/s in", "waited"):
        table.add_column(name, justify="left" if name in ("host", "") else "right")
    for host in hosts:
        numbers = (
            (host.cpu, ".2f"), (host.memory, ",.0f"), (host.sent, ".2f"), (host.received, ".2f"),
            (host.waited, ".1%"),
        )  # fmt: skip
        cells = ("" if value is None else format(value, style) for value, style in numbers)
        table.add_row(Text(host.name), host.state, *cells)
    return table
