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
    losses = [leg for leg in run.legs if leg.left or leg.lost_seconds]
    came = [host for leg in run.legs for host in leg.came]
    if losses:
        text.append(_losses_text(losses))
    if came:
        text.append(f"Hosts that came while it trained: {_counted(came)}.")
    together = {node.host for leg in run.legs for node in leg.plan.nodes}
    hosts = (_hosts(run.legs),) if len(together) > 1 else ()
    return Section(
        key="legs",
        title="How it was trained: legs",
        text=tuple(text),
        blocks=(_band(run.legs), *hosts, _table(run.legs)),
    )


def _losses_text(losses: list[Leg]) -> str:
    """Who was lost, and what it cost."""
    left = [host for leg in losses for host in leg.left]
    seconds = sum(leg.lost_seconds for leg in losses)
    times = f"{len(losses)} time" + "s" * (len(losses) > 1)
    who = f" (lost: {_counted(left)})" if left else ""
    return f"Training was broken off {times}{who}, which took {seconds:,.1f} s until it went on."


def _counted(names: list[str]) -> str:
    """Names, those that occur more than once with how often.

    >>> _counted(["c", "b", "c"])
    'c (2 times), b'
    """
    each = ((name, names.count(name)) for name in dict.fromkeys(names))
    return ", ".join(name + (f" ({count} times)" if count > 1 else "") for name, count in each)


def _hosts(legs: tuple[Leg, ...]) -> Figure:
    """Who trained when, who was lost and what that cost all, and who came."""
    trained = [(node.host, leg) for leg in legs for node in leg.plan.nodes]
    lost = [(host, leg) for leg in legs for host in leg.left]
    came = [(host, leg) for leg in legs for host in leg.came]
    series = [
        Series(
            name="trains",
            shape="bar",
            x=tuple(host for host, _ in trained),
            y=tuple(leg.setup_seconds + leg.seconds for _, leg in trained),
            base=tuple(leg.began_at for _, leg in trained),
            labels=tuple(f"{leg.updates} updates with {leg.name}" for _, leg in trained),
        )
    ]
    if lost:
        ends = [leg.began_at + leg.setup_seconds + leg.seconds for _, leg in lost]
        series.append(
            Series(
                name="is lost, until the others go on",
                shape="bar",
                look=1,
                x=tuple(host for host, _ in lost),
                y=tuple(leg.lost_seconds for _, leg in lost),
                base=tuple(ends),
                labels=tuple(leg.ended for _, leg in lost),
            )
        )
    if came:
        series.append(
            Series(
                name="has come, is taken over to",
                shape="bar",
                look=2,
                x=tuple(host for host, _ in came),
                y=tuple(leg.setup_seconds for _, leg in came),
                base=tuple(leg.began_at for _, leg in came),
                labels=tuple(f"before update {leg.first + 1}" for _, leg in came),
            )
        )
    return Figure(
        key="hosts-over-time",
        title="Hosts over time",
        caption="Which host trained when. A gap is a host that stood by, or was not there.",
        x=Axis(title="", kind="category"),
        y=Axis(title="seconds", minimum=0.0),
        series=tuple(series),
        horizontal=True,
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
        columns=("plan", "updates", "role", "seconds per update", "taking over", "hosts", "why"),
        rows=tuple(
            (
                leg.name,
                leg.updates,
                TITLES[leg.role],
                leg.update_seconds,
                leg.setup_seconds,
                _comings(leg),
                leg.ended or leg.began,
            )
            for leg in legs
        ),
        formats=("", "d", "", ",.4f", ",.2f", "", ""),
    )


def _comings(leg: Leg) -> str:
    """Who came before a leg, and who was lost in it."""
    words = [f"{host} came" for host in leg.came] + [f"{host} was lost" for host in leg.left]
    cost = f" ({leg.lost_seconds:,.1f} s)" if leg.lost_seconds else ""
    return "; ".join(words) + cost
