"""Sections that come from the samples and notes of every rank: resources, network, notes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from paceline.report.figure import Axis, Cell, Figure, Section, Series, Table
from paceline.report.load import RunData
from paceline.report.track import TIME
from paceline.schema.events import InterfaceTraffic, RankSession, Sample
from paceline.schema.ledger import CATEGORIES, TITLES, Ledger
from paceline.text import rank_name as name_of

MOST_POINTS = 300
"""Points of a series over time: more cannot be told apart on a screen."""
MOST_SERIES = 16
"""Ranks that are drawn one by one."""
WORTH_A_LINE = 0.005
"""Part of a machine's time from which on waiting for disks is drawn."""
LOOPBACK = "lo"

NO_EVENTS = (
    "The run has no events of its ranks (rank-*/events.jsonl), so nothing can be said of where the"
    " time went, of the timeline of an update, of resources or of the network."
)


def thin(
    points: Sequence[tuple[float, float]], most: int = MOST_POINTS
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """At most `most` points, each the mean of its neighbours.

    >>> thin([(0.0, 1.0), (1.0, 3.0), (2.0, 5.0), (3.0, 7.0)], most=2)
    ((0.5, 2.5), (2.0, 6.0))
    """
    size = -(-len(points) // most) if points else 1
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    return (
        tuple(rounded(statistics.fmean(x for x, _ in group)) for group in groups),
        tuple(rounded(statistics.fmean(y for _, y in group)) for group in groups),
    )


def rounded(value: float) -> float:
    return float(f"{value:.5g}")


def rank_name(session: RankSession) -> str:
    return name_of(session.rank, session.start.host, session.start.role)


def resources_section(run: RunData) -> Section:
    """CPU, memory and threads of every rank, and the idle time of every host."""
    title = "Resources over time"
    sampled = [session for session in run.sessions if session.samples]
    if not sampled:
        why = "The ranks took no samples: the run was too short."
        return Section(key="resources", title=title, text=(why,))
    origin = _origin(run.sessions)
    shown = sampled[:MOST_SERIES]
    text = (
        f"Samples of {len(sampled)} ranks; figures show the first {len(shown)}."
        if len(shown) < len(sampled)
        else "",
    )
    kinds: tuple[tuple[str, str, str, str, Callable[[Sample], float]], ...] = (
        ("cpu", "CPU of each rank", "busy cores", "Processor time of the rank's process (all its"
         " threads) per second of wall time: 2 is two cores fully busy.", lambda s: s.cpu),
        ("memory", "Memory of each rank", "resident memory (MB)", "Resident memory of the rank's"
         " process; memory that ranks share is counted in each.", lambda s: s.resident / 1e6),
        ("threads", "Threads of each rank", "threads", "Threads of the rank's process, idle ones"
         " included.", lambda s: float(s.threads)),
    )  # fmt: skip
    figures = [
        _over_time(
            key, name, unit, caption, [(rank_name(s), _read(s, origin, value)) for s in shown]
        )
        for key, name, unit, caption, value in kinds
    ]
    figures.insert(1, _hosts_figure(sampled, origin))
    return Section(
        key="resources",
        title=title,
        text=tuple(filter(None, text)),
        blocks=(*figures, _resource_table(sampled)),
    )


def _origin(sessions: Sequence[RankSession]) -> float:
    return min(session.common(session.began) for session in sessions)


def _read(
    session: RankSession, origin: float, value: Callable[[Sample], float]
) -> list[tuple[float, float]]:
    return [(session.common(s.time) - origin, value(s)) for s in session.samples]


def _over_time(
    key: str,
    title: str,
    unit: str,
    caption: str,
    lines: Sequence[tuple[str, list[tuple[float, float]]]],
    *,
    percent: bool = False,
) -> Figure:
    series = []
    for place, (name, points) in enumerate(lines):
        x, y = thin(points)
        series.append(Series(name=name, x=x, y=y, look=place))
    return Figure(
        key=key,
        title=title,
        caption=caption,
        x=TIME,
        y=Axis(title=unit, minimum=0.0, format="percent" if percent else "plain"),
        series=tuple(series),
    )


def by_host(sessions: Sequence[RankSession]) -> dict[str, RankSession]:
    """The lowest rank of every host: what a host's ranks see of it is the same."""
    found: dict[str, RankSession] = {}
    for session in sorted(sessions, key=lambda s: s.rank):
        if session.samples:
            found.setdefault(session.start.host, session)
    return found


def _hosts_figure(sampled: Sequence[RankSession], origin: float) -> Figure:
    lines = []
    for host, session in list(by_host(sampled).items())[: MOST_SERIES // 2]:
        lines.append((f"{host} busy", _read(session, origin, lambda s: s.busy)))
        if any(sample.iowait >= WORTH_A_LINE for sample in session.samples):
            lines.append((f"{host} waiting for disks", _read(session, origin, lambda s: s.iowait)))
    return _over_time(
        "hosts",
        "CPU of each machine",
        "part of all core time",
        "Core time of the whole machine, other programs included; the rest is idle. Emulated hosts"
        " on one box see the same machine.",
        lines,
        percent=True,
    )


def _resource_table(sampled: Sequence[RankSession]) -> Table:
    rows = []
    for session in sampled:
        samples, last = session.samples, session.samples[-1]
        rows.append(
            (
                session.rank,
                session.start.host,
                statistics.fmean(s.cpu for s in samples),
                statistics.fmean(s.idle for s in samples),
                statistics.fmean(s.iowait for s in samples),
                max(s.resident for s in samples) / 1e6,
                max(s.threads for s in samples),
                (last.disk_read - samples[0].disk_read) / 1e6,
                (last.disk_written - samples[0].disk_written) / 1e6,
            )
        )
    return Table(
        key="resources",
        title="Resources",
        columns=(
            "rank", "host", "mean busy cores", "machine idle", "waiting for disks",
            "largest memory (MB)", "most threads", "disk read (MB)", "disk written (MB)",
        ),
        rows=tuple(rows),
        formats=("d", "", ".2f", ".1%", ".1%", ",.0f", "d", ",.1f", ",.1f"),
    )  # fmt: skip


@dataclass(frozen=True)
class _Rates:
    """Traffic of one host between samples, loopback left out."""

    sent: list[tuple[float, float]]
    received: list[tuple[float, float]]
    packets_sent: list[tuple[float, float]]
    packets_received: list[tuple[float, float]]


def network_section(run: RunData) -> Section:
    """Bytes and packets per second of every host."""
    title = "Network"
    hosts = by_host(run.sessions)
    if not hosts:
        why = "The ranks took no samples of the network."
        return Section(key="network", title=title, text=(why,))
    origin = _origin(run.sessions)
    table = _network_table(hosts)
    rates = {host: _rates(session, origin) for host, session in hosts.items()}
    if not any(value for each in rates.values() for _, value in each.sent + each.received):
        return Section(
            key="network",
            title=title,
            text=("No byte left or reached a machine over its network while the run was sampled.",),
            blocks=(table,),
        )
    shown = list(rates.items())[: MOST_SERIES // 2]
    how = " Counters of the host's interfaces, loopback left out; other programs are included."
    kinds: tuple[tuple[str, str, str, str, Callable[[_Rates], list[tuple[float, float]]]], ...] = (
        ("traffic-sent", "Sent by each host", "MB/s", "Bytes", lambda r: r.sent),
        ("traffic-received", "Received by each host", "MB/s", "Bytes", lambda r: r.received),
        ("packets-sent", "Packets sent by each host", "packets/s", "Packets",
         lambda r: r.packets_sent),
        ("packets-received", "Packets received by each host", "packets/s", "Packets",
         lambda r: r.packets_received),
    )  # fmt: skip
    figures = [
        _over_time(
            key,
            name,
            unit,
            f"{what} over the network per second.{how}",
            [(host, points(each)) for host, each in shown],
        )
        for key, name, unit, what, points in kinds
    ]
    return Section(key="network", title=title, blocks=(*figures, table))


def _total(sample: Sample) -> InterfaceTraffic:
    parts = [t for name, t in sample.network.items() if name != LOOPBACK]
    return InterfaceTraffic(
        bytes_sent=sum(t.bytes_sent for t in parts),
        bytes_received=sum(t.bytes_received for t in parts),
        packets_sent=sum(t.packets_sent for t in parts),
        packets_received=sum(t.packets_received for t in parts),
    )


def _rates(session: RankSession, origin: float) -> _Rates:
    rates = _Rates([], [], [], [])
    for before, after in zip(session.samples, session.samples[1:], strict=False):
        seconds = after.time - before.time
        if seconds <= 0:
            continue
        old, new = _total(before), _total(after)
        at = session.common(after.time) - origin
        # A counter that began again (an interface was made anew) gives no rate.
        rates.sent.append((at, max(0, new.bytes_sent - old.bytes_sent) / seconds / 1e6))
        rates.received.append((at, max(0, new.bytes_received - old.bytes_received) / seconds / 1e6))
        rates.packets_sent.append((at, max(0, new.packets_sent - old.packets_sent) / seconds))
        rates.packets_received.append(
            (at, max(0, new.packets_received - old.packets_received) / seconds)
        )
    return rates


def _network_table(hosts: Mapping[str, RankSession]) -> Table:
    rows = []
    for host, session in hosts.items():
        first, last = session.samples[0].network, session.samples[-1].network
        for interface in last:
            if interface not in first:
                continue
            old, new = first[interface], last[interface]
            if old == new:  # nothing went through it
                continue
            rows.append(
                (
                    host,
                    interface,
                    (new.bytes_sent - old.bytes_sent) / 1e6,
                    (new.bytes_received - old.bytes_received) / 1e6,
                    new.packets_sent - old.packets_sent,
                    new.packets_received - old.packets_received,
                )
            )
    return Table(
        key="network",
        title="Network by interface",
        columns=("host", "interface", "MB sent", "MB received", "packets sent", "packets received"),
        rows=tuple(rows),
        formats=("", "", ",.2f", ",.2f", ",d", ",d"),
    )


def notes_section(run: RunData) -> Section | None:
    """What the ranks thought worth a sentence; nothing when there was nothing."""
    told = run.track.notes if run.track is not None else ()
    if run.sessions:  # they have all of it, but what was before the newest start
        told = tuple(note for note in told if note[2] == "restart")
    rows = sorted(
        (
            *told,
            *(
                (session.common(note.time) - _origin(run.sessions), session.rank, note.what,
                 note.text)
                for session in run.sessions
                for note in session.notes
                if note.what != "leg"  # these have a section of their own
            ),
        )
    )  # fmt: skip
    if not rows:
        return None
    return Section(
        key="notes",
        title="What happened on the way",
        blocks=(
            Table(
                key="notes",
                title="Notes",
                columns=("second", "rank", "what", "note"),
                rows=tuple(rows),
                formats=(",.1f", "d", "", ""),
            ),
        ),
    )


LOOKS = {
    "compute": 0, "optimizer": 7, "communication": 1, "waiting": 3, "data": 2, "evaluation": 5,
    "checkpoint": 4, "start_up": 6, "other": 8, "proof": 9, "finding": 10,
    "standing_by": 11,
}  # fmt: skip
"""One look per category, that of its spans in the timeline where it has any."""


def ledger_section(run: RunData) -> Section | None:
    """Stacked bars of the wall time of every rank."""
    title = "Where the time went"
    if run.ledger is None or not run.ledger.ranks:
        return None if run.under_way else Section(key="ledger", title=title, text=(NO_EVENTS,))
    ranks = run.ledger.ranks
    used = tuple(name for name in CATEGORIES if any(each.seconds.get(name) for each in ranks))
    series = tuple(
        Series(
            name=TITLES[name],
            shape="bar",
            look=LOOKS.get(name, 8),
            x=tuple(each.name for each in ranks),
            y=tuple(each.shares[name] for each in ranks),
            labels=tuple(f"{each.seconds.get(name, 0.0):,.2f} s" for each in ranks),
        )
        for name in used
    )
    figure = Figure(
        key="ledger",
        title="Wall time of each rank",
        caption="Every second of a rank's wall time is booked once, so the bars end at 100% by"
        " construction. Exposed communication is what was not hidden behind computing.",
        x=Axis(title="rank", kind="category"),
        y=Axis(title="part of the wall time", format="percent", minimum=0.0, maximum=1.0),
        series=series,
        stacked=True,
        horizontal=True,
    )
    text = [" ".join(run.ledger.sentences())] if run.ledger.sentences() else []
    ratio = run.ledger.coordination_to_computation
    if ratio is not None and len(ranks) > 1:
        text.append(
            f"Coordination to computation: {ratio:.2f} seconds of exposed communication and"
            " waiting for each second of computing."
        )
    return Section(
        key="ledger", title=title, text=tuple(text), blocks=(figure, _table(run.ledger, used))
    )


def _table(ledger: Ledger, names: tuple[str, ...]) -> Table:
    rows: list[tuple[Cell, ...]] = [
        (
            each.rank,
            each.host,
            each.wall,
            *(each.seconds.get(name, 0.0) for name in names),
            each.hidden,
        )
        for each in ledger.ranks
    ]
    return Table(
        key="ledger",
        title="Seconds of each rank",
        columns=(
            "rank", "host", "wall time", *(TITLES[name] for name in names),
            "hidden exchange",
        ),
        rows=tuple(rows),
        formats=("d", "", *(",.2f",) * (len(names) + 2)),
    )  # fmt: skip
