"""`paceline watch --text`: what the page shows, for a terminal."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from paceline.text import duration, rate, terminal
from paceline.watch.follow import Follower
from paceline.watch.state import state_of

OVER = ("finished", "stopped", "lost")
_BARS = "▁▂▃▄▅▆▇█"


def watch_text(paths: Sequence[Path], *, once: bool = False) -> None:
    """Show the runs until all of them are over, or Ctrl-C; `once`: as they are now."""
    runs = [Follower(path) for path in paths]
    console = terminal()

    def look() -> Group:
        for run in runs:
            run.look()
        return Group(*(shown(state_of(run, key)) for key, run in enumerate(runs)))

    if once or not console.is_terminal:
        console.print(look())
        return
    with Live(look(), console=console, auto_refresh=False) as live:
        while any(run.state not in OVER for run in runs):
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


def shown(state: dict[str, Any]) -> RenderableType:
    """One run."""
    head, progress, curves = state["head"], state["progress"], state["curves"]
    line = Text(f"update {progress['update']:,}")
    if progress["updates"]:
        line.append(f" of {progress['updates']:,}")
    if progress["speed"]:
        line.append(f"  {rate(progress['speed'])} {head['unit']}/s")
    if progress["loss"] is not None:
        line.append(f"  loss {progress['loss']:.4g}")
    line.append(f"  {duration(progress['seconds'])} so far")
    if progress["left"] is not None:
        line.append(f"  {duration(progress['left'])} left")
    full = round(60 * progress["update"] / (progress["updates"] or 1))
    parts: list[RenderableType] = [line, Text("━" * full + "╌" * (60 - full))]
    for name in ("loss", "speed"):
        if curve := spark([value for _, value in curves[name]]):
            parts.append(Text(f"{name:<6} {curve}"))
    if state["legs"]["now"]:
        parts.append(Text(f"leg    {state['legs']['now']['text']}"))
    parts.append(_hosts(state["hosts"]))
    parts += [Text(sentence) for sentence in state["ledger"]["slow"]]
    parts += [Text(_where(rank)) for rank in state["ledger"]["ranks"]]
    parts += [Text(f"{duration(n['at'])}  {n['text']}") for n in state["notes"][-3:]]
    title = f"{head['name']} · {head['model']} on {head['data']} · {head['state']}"
    return Panel(Group(*parts), title=Text(title), title_align="left")


def _where(rank: dict[str, Any]) -> str:
    largest = sorted(rank["parts"].items(), key=lambda part: -part[1])[:4]
    return f"{rank['name']}: " + ", ".join(f"{share:.0%} {name}" for name, share in largest)


def _hosts(hosts: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("host", "", "cores", "memory MB", "MB/s out", "MB/s in", "waited"):
        table.add_column(name, justify="left" if name in ("host", "") else "right")
    for host in hosts:
        numbers = (f"{host['cpu']:.2f}", f"{host['memory']:,.0f}", f"{host['sent']:.2f}",
                   f"{host['received']:.2f}")  # fmt: skip
        waited = "" if host["waiting"] is None else f"{host['waiting']:.1%}"
        there = host["state"] == "there"
        table.add_row(Text(host["name"]), host["state"], *(numbers if there else ("",) * 4), waited)
    return table
