"""Where the time of every rank went."""

from __future__ import annotations

from paceline.report.figure import Axis, Cell, Figure, Section, Series, Table
from paceline.report.load import RunData
from paceline.report.observed import NO_EVENTS
from paceline.schema.ledger import CATEGORIES, TITLES, Ledger

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
