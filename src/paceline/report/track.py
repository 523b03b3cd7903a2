"""How far a run has come by the clock, and its hosts: what the page of a training is about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.report.figure import Axis, Cell, Figure, Section, Series, Table
from paceline.text import clock, rate

Points = Sequence[tuple[float, float]]
"""Seconds since the run began, and a value."""


@dataclass(frozen=True, kw_only=True)
class HostSeen:
    """One host, its ranks together."""

    name: str
    state: str
    """there, ended, or gone: it gave no sign while others went on."""
    began: float
    until: float
    """Seconds since the run began: when it was first and last heard of."""
    cpu: float | None = None
    """Cores that its ranks keep busy now; None, as what follows, where it is not there."""
    busy: float | None = None
    memory: float | None = None
    sent: float | None = None
    received: float | None = None
    waited: float | None = None
    """Part of the time so far: exposed communication and waiting."""
    made_wait: float | None = None
    """Part of the others' time that they waited for it."""
    curve: Points = ()
    """Busy cores over the last minute and a half."""


@dataclass(frozen=True, kw_only=True)
class Track:
    """How far a run has come, as a follower of its files knows."""

    state: str
    """starting, training, finished, stopped or lost."""
    seconds: float
    update: int = 0
    updates: int = 0
    epoch: int = 0
    epochs: int | None = None
    loss: float | None = None
    speed: float | None = None
    left: float | None = None
    losses: Points = ()
    speeds: Points = ()
    hosts: tuple[HostSeen, ...] = ()
    leg: tuple[float, str] | None = None
    """When the leg under way began, and what it is."""
    notes: tuple[tuple[float, int, str, str], ...] = ()
    """Second, rank, one word, and the note itself."""
    unit: str = "images"

    @property
    def under_way(self) -> bool:
        return self.state in ("starting", "training")


def tiles_of(track: Track, predicted: float | None, batch: int | None) -> list[tuple[str, str]]:
    """How far it is, in a few numbers."""
    all_of = f" / {track.updates:,}" if track.updates else ""
    whole = track.updates * (batch or 0) / predicted if predicted else 0.0
    epochs = track.epochs or 0
    now = min(track.epoch + 1, epochs) if epochs else track.epoch + 1
    return [
        (f"{track.update:,}{all_of}", "updates"),
        (f"{now} / {epochs or '?'}", "epoch"),
        (
            "..." if track.speed is None else rate(track.speed),
            f"{track.unit}/s" + (f", {rate(predicted)} predicted" if predicted else ""),
        ),
        ("..." if track.loss is None else f"{track.loss:.3g}", "loss of the newest update"),
        (clock(track.seconds), "so far"),
        (
            "..." if track.left is None else clock(track.left),
            "left" + (f"; {clock(whole)} predicted for all updates" if whole else ""),
        ),
    ]


TIME = Axis(title="time since it began", format="clock", minimum=0.0)


def progress_section(track: Track) -> Section | None:
    """Loss and speed by the clock."""
    figures = [
        Figure(
            key=key,
            title=title,
            caption=caption,
            x=TIME,
            y=Axis(title=unit, minimum=0.0),
            series=(
                Series(
                    name=name,
                    look=look,
                    x=tuple(round(at, 2) for at, _ in points),
                    y=tuple(float(f"{value:.5g}") for _, value in points),
                ),
            ),
        )
        for key, title, caption, unit, name, look, points in (
            ("loss-over-time", "Loss over time", "Of the newest update, once a second, on the part"
             " of its batch that one rank has.", "loss", "loss", 0, track.losses),
            ("speed-over-time", "Speed over time", "From one second to the next, evaluation and"
             " whatever else was done between included.", f"{track.unit}/s", track.unit + "/s", 2,
             track.speeds),
        )
        if points
    ]  # fmt: skip
    if not figures:
        return None
    return Section(key="progress", title="Progress", blocks=tuple(figures))


def hosts_section(track: Track) -> Section | None:
    """Each host: there or gone, how busy, and who waited for whom."""
    several = len(track.hosts) > 1
    if not track.hosts or not (several or track.under_way):
        return None
    columns: list[tuple[str, str, list[Cell]]] = [
        ("host", "", [host.name for host in track.hosts]),
        ("", "", ["✕ gone" if host.state == "gone" else host.state for host in track.hosts]),
        ("cores busy", ".2f", [host.cpu for host in track.hosts]),
        ("machine busy", ".0%", [host.busy for host in track.hosts]),
        ("memory MB", ",.0f", [host.memory for host in track.hosts]),
        ("MB/s out", ",.2f", [host.sent for host in track.hosts]),
        ("MB/s in", ",.2f", [host.received for host in track.hosts]),
        ("waited", ".1%", [host.waited for host in track.hosts]),
        ("made others wait", ".1%", [host.made_wait if several else None for host in track.hosts]),
    ]
    known = [each for each in columns if any(cell is not None for cell in each[2])]
    table = Table(
        key="hosts-seen",
        title="Now" if track.under_way else "At the end",
        columns=tuple(title for title, _, _ in known),
        rows=tuple(zip(*(cells for _, _, cells in known), strict=True)),
        formats=tuple(style for _, style, _ in known),
    )
    curves = [host for host in track.hosts if host.curve] if track.under_way else []
    figure = Figure(
        key="cores",
        title="Busy cores of each host, last minute and a half",
        caption="",
        x=Axis(title="time since it began", format="clock"),
        y=Axis(title="cores", minimum=0.0),
        series=tuple(
            Series(
                name=host.name,
                look=look,
                x=tuple(round(at, 1) for at, _ in host.curve),
                y=tuple(round(value, 3) for _, value in host.curve),
            )
            for look, host in enumerate(curves)
        ),
    )
    return Section(key="hosts", title="Hosts", blocks=(table, figure) if curves else (table,))
