"""CPU, memory, threads, idle time and network while a set-up trained, from its ranks' samples."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.report.figure import Axis, Cell, Figure, Section, Series, Table
from paceline.report.load import RunData
from paceline.report.observed import by_host, thin
from paceline.schema.events import RankSession, Sample
from paceline.schema.ledger import TITLES
from studies.lerat.speeds import SETUPS, Variant, bytes_per_update, find
from studies.outcome import Outcomes, StepOutcome

Points = list[tuple[float, float]]
TRAINING = ("compute", "optimizer", "communication", "waiting", "data")
"""Categories of the ledger that belong to updates."""
_ASIDE = ("start_up", "evaluate", "checkpoint")
_STEP_SECONDS = 0.5


@dataclass(frozen=True)
class Watched:
    """A set-up's run with the time in which it made updates."""

    setup: Variant
    outcome: StepOutcome
    run: RunData
    began: float
    ended: float
    """On the first rank's clock."""

    def samples(self, session: RankSession) -> list[Sample]:
        """Those taken while updates were made."""
        return [s for s in session.samples if self.began <= session.common(s.time) <= self.ended]

    @property
    def sessions(self) -> list[RankSession]:
        return [session for session in self.run.sessions if self.samples(session)]

    def summed(self, value: Callable[[Sample], float]) -> Points:
        """All ranks together over time: each rank's newest sample at every half second."""
        lines = [
            [(s.common(each.time) - self.began, value(each)) for each in self.samples(s)]
            for s in self.sessions
        ]
        if not lines:
            return []
        points, moment = [], max(line[0][0] for line in lines)
        while moment <= self.ended - self.began:
            points.append((moment, sum(_at(line, moment) for line in lines)))
            moment += _STEP_SECONDS
        return points


def _at(line: Points, moment: float) -> float:
    return [value for time, value in line if time <= moment][-1]


def watch(outcomes: Outcomes, work: str) -> list[Watched]:
    """The set-ups of a workload whose runs have samples."""
    found = []
    for setup in SETUPS:
        outcome = find(outcomes, work, setup.key)
        if outcome is None or outcome.run is None or not outcome.done:
            continue
        spans = [
            (session.common(span.start), session.common(span.end))
            for session in outcome.run.sessions
            for span in session.spans
            if span.update is not None and span.name not in _ASIDE
        ]
        if spans:
            began, ended = min(start for start, _ in spans), max(end for _, end in spans)
            found.append(
                Watched(setup=setup, outcome=outcome, run=outcome.run, began=began, ended=ended)
            )
    return found


def core_time(outcomes: Outcomes, work: str) -> float | None:
    """Part of a core that the run on one core got; well below 1 where others used the machine."""
    for each in watch(outcomes, work):
        if each.setup.key == "baseline":
            values = [s.cpu for session in each.sessions for s in each.samples(session)]
            return statistics.fmean(values) if values else None
    return None


def resources_section(outcomes: Outcomes, work: str, model: str) -> Section | None:
    """The study's figures over time, and a table of means."""
    watched = watch(outcomes, work)
    if not watched:
        return None
    kinds: tuple[tuple[str, str, str, str, Callable[[Sample], float]], ...] = (
        ("cpu", "CPU", "busy cores", "Processor time of all ranks per second of wall time.",
         lambda s: s.cpu),
        ("memory", "Memory", "resident memory (MB)", "Resident memory of all ranks together; what"
         " ranks share is counted in each.", lambda s: s.resident / 1e6),
        ("threads", "Threads", "threads", "Threads of all ranks together, idle ones included.",
         lambda s: float(s.threads)),
    )  # fmt: skip
    every = watched[0].outcome.step.settings.get("observe.samples_every", 1.0)
    figures = [
        _over_time(f"{work}-{key}", f"{name}: {model}", unit, f"{caption} Sampled every {every:g} s"
                   " while updates were made.",
                   [(w.setup.short, w.summed(value)) for w in watched])
        for key, name, unit, caption, value in kinds
    ]  # fmt: skip
    return Section(
        key=f"{work}-resources",
        title=f"Resources and waiting: {model}",
        text=(
            "The study took these with pidstat and sar; here every rank samples itself and its"
            " machine. Idle and waiting for disks are parts of the whole machine's core time;"
            " emulated hosts see the machine that emulates them.",
        ),
        blocks=(_ledger_figure(work, model, watched), *figures, _table(work, model, watched)),
    )


def _over_time(
    key: str, title: str, unit: str, caption: str, lines: Sequence[tuple[str, Points]]
) -> Figure:
    series = []
    for place, (name, points) in enumerate(lines):
        x, y = thin(points)
        if x:
            series.append(Series(name=name, x=x, y=y, look=place))
    return Figure(
        key=key,
        title=title,
        caption=caption,
        x=Axis(title="seconds since the first update began", minimum=0.0),
        y=Axis(title=unit, minimum=0.0),
        series=tuple(series),
    )


def _ledger_figure(work: str, model: str, watched: Sequence[Watched]) -> Figure:
    names = tuple(w.setup.title for w in watched)
    series = []
    for place, category in enumerate(TRAINING):
        parts = []
        for each in watched:
            ledger = each.run.ledger
            whole = sum(ledger.total(name) for name in TRAINING) if ledger else 0.0
            parts.append(ledger.total(category) / whole if ledger and whole else None)
        series.append(
            Series(name=TITLES[category], shape="bar", look=place, x=names, y=tuple(parts))
        )
    return Figure(
        key=f"{work}-ledger",
        title=f"Where the time of updates went: {model}",
        caption="Part of the wall time of all ranks, start-up, evaluation and checkpoints left out;"
        " from the spans in rank-*/events.jsonl.",
        x=Axis(title="set-up", kind="category"),
        y=Axis(title="part of the time", format="percent", minimum=0.0, maximum=1.0),
        series=tuple(series),
        stacked=True,
        horizontal=True,
    )


def _table(work: str, model: str, watched: Sequence[Watched]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for each in watched:
        sessions = each.sessions
        hosts = list(by_host(sessions).values())
        machine = [sample for session in hosts for sample in each.samples(session)]
        sent = bytes_per_update(each.outcome)
        rows.append(
            (
                each.setup.title,
                len(each.run.sessions),
                sum(statistics.fmean(s.cpu for s in each.samples(x)) for x in sessions) or None,
                sum(max(s.resident for s in each.samples(x)) for x in sessions) / 1e6 or None,
                sum(max(s.threads for s in each.samples(x)) for x in sessions) or None,
                statistics.fmean(s.idle for s in machine) if machine else None,
                statistics.fmean(s.iowait for s in machine) if machine else None,
                sent / 1e6 if sent else 0.0,
                _peak(each) if each.setup.place == "hosts" else 0.0,
            )
        )
    return Table(
        key=f"{work}-resources",
        title=f"Means while updates were made: {model}",
        columns=("set-up", "processes", "busy cores", "largest memory (MB)", "threads", "idle",
                 "waiting for disks", "MB sent per host and update", "peak MB/s sent by a host"),
        rows=tuple(rows),
        formats=("", "d", ".2f", ",.0f", "d", ".1%", ".2%", ",.2f", ",.1f"),
    )  # fmt: skip


def rates(each: Watched) -> dict[str, tuple[Points, Points]]:
    """MB per second sent and received by each host, by the kernel's counters, loopback left out."""
    found = {}
    for host, session in by_host(each.sessions).items():
        sent: Points = []
        received: Points = []
        samples = each.samples(session)
        for old, new in itertools.pairwise(samples):
            seconds = new.time - old.time
            moment = session.common(new.time) - each.began
            for points, attribute in ((sent, "bytes_sent"), (received, "bytes_received")):
                change = sum(
                    getattr(traffic, attribute) - getattr(old.network[name], attribute)
                    for name, traffic in new.network.items()
                    if name != "lo" and name in old.network
                )
                if seconds > 0:
                    points.append((moment, change / seconds / 1e6))
        found[host] = (sent, received)
    return found


def _peak(each: Watched) -> float | None:
    values = [rate for sent, _ in rates(each).values() for _, rate in sent]
    return max(values, default=None)


def peak_rate(outcomes: Outcomes, work: str) -> float | None:
    """The highest MB/s that a host sent in a two-host run of Paceline's."""
    peaks = [_peak(each) for each in watch(outcomes, work) if each.setup.place == "hosts"]
    return max((peak for peak in peaks if peak is not None), default=None)


def network_figure(outcomes: Outcomes, work: str, model: str) -> Figure | None:
    """Network over time for the two-host set-ups that were sampled."""
    lines = []
    for each in watch(outcomes, work):
        if each.setup.place != "hosts":
            continue
        host, (sent, received) = next(iter(rates(each).items()), ("", ([], [])))
        name = each.setup.short.removeprefix("2 hosts, ")
        lines += [(f"{name}: {host} sent", sent), (f"{name}: {host} received", received)]
    if not any(points for _, points in lines):
        return None
    return _over_time(
        f"{work}-network",
        f"Network: {model}",
        "MB/s",
        "What the first host's interface sent and received, by the kernel's counters, between two"
        " samples. Peers are not sampled; their totals are in the table of two hosts.",
        lines,
    )
