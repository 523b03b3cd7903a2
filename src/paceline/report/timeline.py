"""The timeline of one typical update: what every rank did when, on one clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from paceline.report.figure import Axis, Figure, Section, Series, Table
from paceline.report.load import RunData
from paceline.report.observed import MOST_SERIES, rank_name, rounded
from paceline.schema.events import RankSession, Span

SPAN_LOOKS = {
    "compute": 0, "forward": 0, "backward": 5, "exchange": 1, "wait": 3, "read": 2,
    "optimizer": 7, "checkpoint": 4, "evaluate": 6, "start_up": 6,
    "proof": 8,
}  # fmt: skip
"""One look per kind of work, the same in every figure."""


def timeline_section(run: RunData) -> Section:
    """What every rank did in one typical update, on one clock."""
    title = "Timeline of one update"
    workers = [session for session in run.sessions if session.start.role == "worker"]
    update = typical_update(workers)
    if update is None:
        return Section(key="timeline", title=title, text=("No update was recorded by every rank.",))
    chosen = [
        (session, [s for s in session.spans if s.update == update])
        for session in workers[:MOST_SERIES]
    ]
    origin = min(session.common(span.start) for session, spans in chosen for span in spans)
    end = max(session.common(span.end) for session, spans in chosen for span in spans)
    chosen += [
        (session, _between(session, origin, end))
        for session in run.sessions[:MOST_SERIES]
        if session.start.role == "server"
    ]
    series, lanes = _timeline_series(chosen, origin)
    doubts = [past.start.uncertainty for past in run.sessions]
    doubt = max(doubts + [each.uncertainty for past in run.sessions for each in past.clocks])
    clock = (
        f" Clocks of the hosts were brought together to within {doubt * 1000:.2g} ms."
        if doubt
        else ""
    )
    figure = Figure(
        key="timeline",
        title=f"Update {update}",
        caption="The update whose length is the median of all that every rank recorded. An exchange"
        f" that ran behind the backward pass has a lane of its own.{clock}",
        x=Axis(title="rank", kind="category"),
        y=Axis(title="milliseconds since the update began", minimum=0.0),
        series=series,
        horizontal=True,
        order=lanes,
    )
    return Section(key="timeline", title=title, blocks=(figure, _timeline_table(chosen, origin)))


def _between(session: RankSession, origin: float, end: float) -> list[Span]:
    """What a rank did in a part of the common time: a server works for all updates alike."""
    found = []
    for span in session.spans:
        start = max(session.common(span.start), origin)
        seconds = min(session.common(span.end), end) - start
        if seconds > 0:
            shift = span.start - session.common(span.start)
            found.append(replace(span, start=start + shift, seconds=seconds))
    return found


def typical_update(sessions: Sequence[RankSession]) -> int | None:
    """The update of median length among those that every rank recorded whole."""
    lengths: dict[int, list[float]] = {}
    for session in sessions:
        ends: dict[int, tuple[float, float]] = {}
        for span in session.spans:
            if span.update is not None and span.name not in ("evaluate", "checkpoint", "start_up"):
                low, high = ends.get(span.update, (span.start, span.end))
                ends[span.update] = (min(low, span.start), max(high, span.end))
        for update, (low, high) in ends.items():
            lengths.setdefault(update, []).append(high - low)
    whole = sorted(
        (max(each), update) for update, each in lengths.items() if len(each) == len(sessions)
    )
    return whole[len(whole) // 2][1] if whole else None


def _inner(spans: Sequence[Span]) -> list[Span]:
    """Without `compute` where forward and backward say it in more detail."""
    detailed = any(span.name in ("forward", "backward") for span in spans)
    return [span for span in spans if not (detailed and span.name == "compute")]


def _timeline_series(
    chosen: Sequence[tuple[RankSession, list[Span]]], origin: float
) -> tuple[tuple[Series, ...], tuple[str, ...]]:
    blocks: dict[str, list[tuple[str, float, float, str]]] = {}
    lanes: list[str] = []
    for session, spans in chosen:
        lane = rank_name(session)
        hidden = f"{lane}, behind"
        lanes.append(lane)
        if any(span.hidden_seconds > 0 for span in spans):
            lanes.append(hidden)
        for span in _inner(spans):
            where = hidden if span.hidden_seconds > 0 else lane
            start = (session.common(span.start) - origin) * 1000
            name = span.name.replace("_", " ")
            blocks.setdefault(name, []).append(
                (where, start, span.seconds * 1000, _span_label(span))
            )
    ordered = sorted(blocks.items(), key=lambda item: min(start for _, start, _, _ in item[1]))
    series = tuple(
        Series(
            name=name,
            shape="bar",
            look=SPAN_LOOKS.get(name.replace(" ", "_"), 6),
            x=tuple(lane for lane, _, _, _ in each),
            y=tuple(rounded(length) for _, _, length, _ in each),
            base=tuple(rounded(start) for _, start, _, _ in each),
            labels=tuple(label for _, _, _, label in each),
        )
        for name, each in ordered
    )
    return series, tuple(lanes)


def _span_label(span: Span) -> str:
    parts = [span.detail] if span.detail else []
    if span.waited_for:
        parts.append("for rank " + ", ".join(map(str, span.waited_for)))
    if span.bytes_sent:
        parts.append(f"{span.bytes_sent / 1e6:.2f} MB sent")
    return ", ".join(parts)


def _timeline_table(chosen: Sequence[tuple[RankSession, list[Span]]], origin: float) -> Table:
    rows = tuple(
        (
            session.rank,
            session.start.host,
            span.name.replace("_", " "),
            (session.common(span.start) - origin) * 1000,
            span.seconds * 1000,
            _span_label(span),
        )
        for session, spans in chosen
        for span in sorted(_inner(spans), key=lambda s: s.start)
    )
    return Table(
        key="timeline",
        title="Spans of the update",
        columns=("rank", "host", "span", "begins (ms)", "takes (ms)", "detail"),
        rows=rows,
        formats=("d", "", "", ",.2f", ",.2f", ""),
        folded=True,
    )
