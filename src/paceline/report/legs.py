"""The legs of a run: which plan trained when, and what finding the fastest took."""

from __future__ import annotations

import re

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
    """Who trained when with which plan; None where one host trained by one plan all the time."""
    hosts = run.track.hosts if run.track else ()
    now = run.track.leg if run.track else None
    if not run.legs and not now:
        if len(hosts) < 2:
            return None
        return Section(key="legs", title="Who was there when", blocks=(_band(run),))
    spent, saved = run.number("finding_seconds"), run.number("saved_seconds")
    text = []
    if now is not None:
        text.append(f"Now: {now[1]}.")
    elif run.legs:
        last = run.legs[-1]
        text.append(f"The training was {len(run.legs)} legs, the last of them with {last.name}.")
    if spent is not None and saved is not None and now is None:
        text.append(
            f"Finding the fastest way took {spent:,.1f} s"
            + (f" and saved at least {saved:,.1f} s." if saved else "; nothing faster was found.")
        )
    losses = [leg for leg in run.legs if leg.left or leg.lost_seconds]
    came = [host for leg in run.legs for host in leg.came]
    if losses:
        text.append(_losses_text(losses))
    if came:
        text.append(f"Hosts that came while it trained: {_counted(came)}.")
    table = (_table(run.legs, folded=run.under_way),) if run.legs else ()
    return Section(
        key="legs",
        title="Legs: which way trained when",
        text=tuple(text),
        blocks=(_band(run), *table),
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


class _Blocks:
    """Blocks of one look over time, each in the row of a host."""

    def __init__(self, name: str, look: int) -> None:
        self.name, self.look = name, look
        self.blocks: list[tuple[str, float, float, str]] = []

    def add(self, row: str, begins: float, ends: float, label: str) -> None:
        self.blocks.append((row, begins, max(0.0, ends - begins), label))

    def series(self) -> Series:
        return Series(
            name=self.name,
            shape="bar",
            look=self.look,
            x=tuple(row for row, *_ in self.blocks),
            y=tuple(round(seconds, 3) for _, _, seconds, _ in self.blocks),
            base=tuple(round(begins, 3) for _, begins, *_ in self.blocks),
            labels=tuple(label for *_, label in self.blocks),
        )


def _band(run: RunData) -> Figure:
    """A row for each host: the legs it trained in by plan, its losses, its comings."""
    seen = run.track.hosts if run.track else ()
    named = dict.fromkeys(
        [node.host for leg in run.legs for node in leg.plan.nodes]
        + [host for leg in run.legs for host in (*leg.left, *leg.came)]
    )
    hosts = named | dict.fromkeys(host.name for host in seen)
    # A plan of one machine need not know its name.
    one = len(named) < 2 and len(seen) < 2
    gone = [host for host in seen if host.state == "gone"]
    bands: dict[str, _Blocks] = {}

    def add(name: str, host: str, begins: float, ends: float, label: str) -> None:
        band = bands.setdefault(name, _Blocks(name, len(bands)))
        band.add("training" if one else host, begins, ends, label)

    for leg in run.legs:
        ends = leg.began_at + leg.setup_seconds + leg.seconds
        label = f"{leg.updates} updates, {TITLES[leg.role]}" + (leg.began and f": {leg.began}")
        for host in dict.fromkeys(node.host for node in leg.plan.nodes):
            add(leg.name, host, leg.began_at, ends, label)
    if run.track and run.track.leg:
        for plan, host in _now(run, run.track.leg[1], list(bands)):
            add(plan, host, *_since(run, run.track.leg[0]), "under way")
    if not run.legs and not (run.track and run.track.leg):
        for each in seen:
            there = each.state == "there" and run.track
            ends = run.track.seconds if there and run.track else each.until
            add("trains", each.name, each.began, ends, "")
    for leg in run.legs:
        ends = leg.began_at + leg.setup_seconds + leg.seconds
        for host in leg.left:
            add("is lost, until the others go on", host, ends, ends + leg.lost_seconds, leg.ended)
    for leg in run.legs:
        for host in leg.came:
            taken = leg.began_at + leg.setup_seconds
            label = f"before update {leg.first + 1}"
            add("has come, is taken over to", host, leg.began_at, taken, label)
    series = tuple(band.series() for band in bands.values())
    if gone:
        series += (
            Series(
                name="✕ gone",
                shape="points",
                look=4,
                x=tuple("training" if one else host.name for host in gone),
                y=tuple(round(host.until, 3) for host in gone),
            ),
        )
    return Figure(
        key="legs",
        title="Legs over time" if run.legs else "Hosts over time",
        caption="Which plan trained when, from the moment the training was asked for. What one took"
        " to be built and to take over is part of it."
        + ("" if one else " A gap is a host that stood by, or was not there."),
        x=Axis(title="", kind="category"),
        y=Axis(title="time since it began", minimum=0.0, format="clock"),
        series=series,
        horizontal=True,
        order=("training",) if one else tuple(hosts),
    )


def _now(run: RunData, text: str, known: list[str]) -> list[tuple[str, str]]:
    """Plan and host of the leg under way, as far as its words tell."""
    assert run.track is not None
    name = text.partition(" with ")[2] or text
    plan = next((each for each in known if name == each or name.startswith(f"{each}:")), name)
    there = [host.name for host in run.track.hosts if host.state == "there"]
    words = re.split(r"[\s,]+", name.partition(":")[0])
    return [(plan, host) for host in [h for h in there if h in words] or there]


def _since(run: RunData, began: float) -> tuple[float, float]:
    """From when to when the leg under way has trained."""
    assert run.track is not None
    ends = [leg.began_at + leg.setup_seconds + leg.seconds for leg in run.legs]
    begins = max([began, *ends])
    return begins, max(begins, run.track.seconds)


def _table(legs: tuple[Leg, ...], *, folded: bool) -> Table:
    return Table(
        key="legs",
        title="What was tried, and why it was kept",
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
        folded=folded,
    )


def _comings(leg: Leg) -> str:
    """Who came before a leg, and who was lost in it."""
    words = [f"{host} came" for host in leg.came] + [f"{host} was lost" for host in leg.left]
    cost = f" ({leg.lost_seconds:,.1f} s)" if leg.lost_seconds else ""
    return "; ".join(words) + cost
