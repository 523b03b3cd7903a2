"""The legs of a run: which plan trained when, and what finding the fastest took."""

from __future__ import annotations

from paceline.report.figure import Axis, Figure, Section, Series, Table
from paceline.report.load import RunData
from paceline.schema.legs import Leg

TITLES = {
    "first": "the first",
    "trial": "tried",
    "check": "checked against",
    "keep": "kept",
}


def legs_section(run: RunData) -> Section | None:
    """A band of legs over time; None where the training was not made of any."""
    if not run.legs:
        return None
    spent, saved = run.number("finding_seconds"), run.number("saved_seconds")
    last = run.legs[-1]
    text = [f"The training was {len(run.legs)} legs, the last of them with {last.name}."]
    if spent is not None and saved is not None:
        text.append(
            f"Finding the fastest way took {spent:,.1f} s"
            + (f" and saved {saved:,.1f} s." if saved > 0 else "; nothing faster was found.")
        )
    return Section(
        key="legs",
        title="How it was trained: legs",
        text=tuple(text),
        blocks=(_band(run.legs), _table(run.legs)),
    )


def _band(legs: tuple[Leg, ...]) -> Figure:
    names = tuple(dict.fromkeys(leg.name for leg in legs))
    series = []
    for look, name in enumerate(names):
        mine = [leg for leg in legs if leg.name == name]
        series.append(
            Series(
                name=name,
                shape="bar",
                look=look,
                x=("training",) * len(mine),
                y=tuple(leg.setup_seconds + leg.seconds for leg in mine),
                base=tuple(leg.began_at for leg in mine),
                labels=tuple(f"{leg.updates} updates, {TITLES[leg.role]}" for leg in mine),
            )
        )
    return Figure(
        key="legs",
        title="Legs over time",
        caption="Which plan trained when, from the moment the training was asked for. What one took"
        " to be built and to take over is part of it.",
        x=Axis(title="", kind="category"),
        y=Axis(title="seconds", minimum=0.0),
        series=tuple(series),
        horizontal=True,
    )


def _table(legs: tuple[Leg, ...]) -> Table:
    return Table(
        key="legs",
        title="Every leg",
        columns=("plan", "updates", "role", "seconds per update", "taking over", "why"),
        rows=tuple(
            (
                leg.name,
                leg.updates,
                TITLES[leg.role],
                leg.update_seconds,
                leg.setup_seconds,
                leg.ended or leg.began,
            )
            for leg in legs
        ),
        formats=("", "d", "", ",.4f", ",.2f", ""),
    )
