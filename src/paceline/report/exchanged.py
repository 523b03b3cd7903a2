"""What agreeing between nodes cost: bytes, messages, seconds, counted alike by every exchange."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.report.figure import Axis, Cell, Figure, Section, Series, Table
from paceline.report.load import RunData
from paceline.schema.ledger import ExchangeTotals, RankLedger

COLUMNS = (
    "MB sent", "MB received", "messages sent", "messages received", "communicating (ms)",
    "hidden (ms)", "waiting (ms)",
)  # fmt: skip
"""Per update, the same for every exchange."""
FORMATS = (",.3f", ",.3f", ",.1f", ",.1f", ",.2f", ",.2f", ",.2f")

HOW = (
    "Counted by the exchange at every update. Communicating is the time while anything was on its"
    " way between nodes; hidden is the part of it under computing, waiting the part for which"
    " the computation stood still, be it for bytes or for nodes that came later."
)


def per_update(counted: ExchangeTotals) -> tuple[float, ...]:
    """The numbers of `COLUMNS`."""
    updates = max(counted.updates, 1)
    return (
        counted.bytes_sent / updates / 1e6,
        counted.bytes_received / updates / 1e6,
        counted.messages_sent / updates,
        counted.messages_received / updates,
        counted.seconds / updates * 1e3,
        counted.hidden / updates * 1e3,
        counted.waited / updates * 1e3,
    )


def leaders(run: RunData) -> list[RankLedger]:
    """The ranks that exchange with other nodes."""
    return [rank for rank in run.ledger.ranks if rank.exchange.updates] if run.ledger else []


def mean_exchange(run: RunData) -> ExchangeTotals | None:
    """What a worker of the run exchanged, the mean over its nodes; None for what has no events."""
    found = [rank for rank in leaders(run) if rank.role == "worker"]
    if not found:
        return None
    whole = sum((rank.exchange for rank in found), ExchangeTotals())
    count = len(found)
    return ExchangeTotals(
        updates=round(whole.updates / count),
        bytes_sent=round(whole.bytes_sent / count),
        bytes_received=round(whole.bytes_received / count),
        messages_sent=round(whole.messages_sent / count),
        messages_received=round(whole.messages_received / count),
        seconds=whole.seconds / count,
        hidden=whole.hidden / count,
        waited=whole.waited / count,
        outside=round(whole.outside / count),
    )


def exchanged_section(run: RunData) -> Section | None:
    """Bytes, messages and seconds of every node's leader; None where there is one node."""
    ranks = leaders(run)
    if not ranks:
        return None
    counted = [per_update(rank.exchange) for rank in ranks]
    names = tuple(rank.name for rank in ranks)
    rows: list[tuple[Cell, ...]] = [
        (rank.rank, rank.host, rank.exchange.updates, *numbers)
        for rank, numbers in zip(ranks, counted, strict=True)
    ]
    seconds = sum(rank.exchange.seconds for rank in ranks)
    hidden = sum(rank.exchange.hidden for rank in ranks)
    # A training in legs may have ended on one node.
    met = [leg.plan.exchange for leg in run.legs if len(leg.plan.nodes) > 1]
    text = [f"Nodes agree by {run.exchange or ', '.join(dict.fromkeys(met))}."]
    if seconds:
        text.append(f"{hidden / seconds:.0%} of the communication was hidden under computing.")
    moved = sum(r.exchange.bytes_sent + r.exchange.bytes_received for r in ranks)
    outside = sum(r.exchange.outside for r in ranks)
    if moved + outside:
        text.append(
            f"{outside / (moved + outside):.1%} of all bytes were for no update (start-up,"
            " evaluation, checkpoints) and are not in these numbers."
        )
    return Section(
        key="exchanged",
        title="What agreeing cost",
        text=(" ".join(text),),
        blocks=(
            _bar_figure(
                "exchange-time", ("Communication of each update", HOW, "ms per update"), names,
                (("hidden under computing", 0, [n[5] for n in counted]),
                 ("computing stood still", 1, [n[6] for n in counted])), stacked=True,
            ),
            _bar_figure(
                "exchange-bytes",
                ("Bytes of each update",
                 "Bytes handed to the network for each update, as the exchange counts them; a sum"
                 " by a library is counted as a ring.", "MB per update"), names,
                (("sent", 0, [n[0] for n in counted]), ("received", 2, [n[1] for n in counted])),
                stacked=False,
            ),
            Table(
                key="exchanged", title="Exchange of each update",
                columns=("rank", "host", "updates", *COLUMNS),
                rows=tuple(rows), formats=("d", "", ",d", *FORMATS),
            ),
        ),
    )  # fmt: skip


Bars = Sequence[tuple[str, int, Sequence[float]]]
"""Name, look and heights of each series."""


def _bar_figure(
    key: str, words: tuple[str, str, str], names: Sequence[str], bars: Bars, *, stacked: bool
) -> Figure:
    """A row of bars for each name; `words` are title, caption and unit."""
    title, caption, unit = words
    return Figure(
        key=key,
        title=title,
        caption=caption,
        x=Axis(title="", kind="category"),
        y=Axis(title=unit, minimum=0.0),
        series=tuple(
            Series(name=name, shape="bar", look=look, x=tuple(names), y=tuple(heights))
            for name, look, heights in bars
        ),
        stacked=stacked,
        horizontal=True,
    )


def exchange_section(runs: Sequence[RunData]) -> Section | None:
    """Exchanges side by side: speed, traffic and time, where several runs have one."""
    known = [run for run in runs if run.exchange and run.speed]
    if len(known) < 2:
        return None
    figures = []
    if len({run.exchange for run in known}) > 1:  # else the speed of each run says the same
        figures.append(
            Figure(
                key="exchange-speed",
                title="Speed by exchange",
                caption="Median over the epochs of each run.",
                x=Axis(title="run", kind="category"),
                y=Axis(title="images/s", minimum=0.0),
                series=_by_exchange(known),
                horizontal=True,
                order=tuple(run.name for run in known),
            )
        )
    counted = [(run, per_update(found)) for run in known if (found := mean_exchange(run))]
    if counted:
        labels = [run.name for run, _ in counted]
        figures += [
            _bar_figure(
                "exchange-time",
                ("Communication of each update by exchange", f"Mean of the nodes. {HOW}",
                 "ms per update"), labels,
                (("hidden under computing", 0, [n[5] for _, n in counted]),
                 ("computing stood still", 1, [n[6] for _, n in counted])), stacked=True,
            ),
            _bar_figure(
                "exchange-traffic",
                ("Traffic by exchange",
                 "Bytes handed to the network for each update, mean of the nodes.",
                 "MB per update and node"), labels,
                (("sent", 0, [n[0] for _, n in counted]),
                 ("received", 2, [n[1] for _, n in counted])), stacked=False,
            ),
        ]  # fmt: skip
    numbers: dict[str, tuple[float | None, ...]] = {run.name: found for run, found in counted}
    table = Table(
        key="exchange",
        title="Exchanges, per node and update",
        columns=("exchange", "run", "hosts", "images/s", *COLUMNS),
        rows=tuple(
            (
                run.exchange,
                run.name,
                run.hosts,
                run.speed,
                *numbers.get(run.name, (_sent(run), *(None,) * (len(COLUMNS) - 1))),
            )
            for run in known
        ),
        formats=("", "", "d", ",.0f", *FORMATS),
    )
    return Section(key="exchange", title="Exchanges compared", blocks=(*figures, table))


def _by_exchange(runs: Sequence[RunData]) -> tuple[Series, ...]:
    """One look per exchange."""
    kinds = list(dict.fromkeys(run.exchange for run in runs))
    return tuple(
        Series(
            name=kind,
            shape="bar",
            look=place,
            x=tuple(run.name for run in runs if run.exchange == kind),
            y=tuple(run.speed for run in runs if run.exchange == kind),
        )
        for place, kind in enumerate(kinds)
    )


def _sent(run: RunData) -> float | None:
    """MB that a node sent for an update, of runs without events."""
    sent = [value for value in run.column("bytes_sent") if value is not None]
    updates = run.number("updates")
    return sum(sent) / updates / run.hosts / 1e6 if sent and updates else None
