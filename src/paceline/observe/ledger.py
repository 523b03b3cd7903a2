"""Where every second went: each rank's wall time, booked once; pure, no torch.

A rank's session is cut at every beginning and end of a span. Each piece is booked under the
span that lies in it and comes first in `PRIORITY`, or as "other" where there is none. The pieces
have no gap and no overlap, so the bookings sum to the wall time by construction.

    compute  |-----------------------|            compute, but not what lies in it:
    wait              |-----|                     waiting
    exchange                     |---------|      exposed communication only after compute...
    backward                 |---|                ...since forward and backward hide an exchange

Who is waited for: the rank that came last, told by the one who waited (`waited_for`) or, where
it cannot know, read from when the ranks came to the same exchange on the common clock.
"""

from __future__ import annotations

import heapq
import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from paceline.schema.events import RankSession, Span, read_run
from paceline.schema.ledger import CATEGORIES, ExchangeTotals, Ledger, RankLedger

PRIORITY: Final = (
    "proof",  # the plan is proved on a copy before training begins
    "start_up",  # everything before the first update is start-up, whatever it was
    "wait",  # the training thread says itself that it stands still
    "forward",
    "backward",  # what runs beside the passes costs no time: a hidden exchange
    "exchange",
    "read",
    "optimizer",
    "compute",  # a coarse span around finer ones
    "checkpoint",
    "evaluate",
    "handover",  # from one leg to the next
    "stand_by",  # while other ranks train
)
_RANK_OF: Final = {name: number for number, name in enumerate(PRIORITY)}
_CATEGORY_OF: Final = {
    "proof": "proof",
    "start_up": "start_up",
    "wait": "waiting",
    "forward": "compute",
    "backward": "compute",
    "exchange": "communication",
    "read": "data",
    "optimizer": "optimizer",
    "compute": "compute",
    "checkpoint": "checkpoint",
    "evaluate": "evaluation",
    "handover": "finding",
    "stand_by": "standing_by",
}


def ledger_of(run: Path) -> Ledger:
    """The ledger of a run directory."""
    return make_ledger(read_run(run))


def make_ledger(ranks: Mapping[int, Sequence[RankSession]]) -> Ledger:
    """Book the sessions of every rank; sessions of the same number belong together."""
    arrivals = Arrivals(ranks)
    return Ledger(
        ranks=tuple(
            add_up(
                [book(session, arrivals.explain(session, number)) for number, session in past],
            )
            for past in (list(enumerate(sessions)) for _, sessions in sorted(ranks.items()))
            if past
        )
    )


def book(session: RankSession, spans: Sequence[Span] | None = None) -> RankLedger:
    """One session's wall time, by category."""
    spans = session.spans if spans is None else spans
    began, ended = session.began, session.ended
    seconds = dict.fromkeys(CATEGORIES, 0.0)
    waited: dict[int, float] = defaultdict(float)
    updates: dict[int, dict[str, float]] = defaultdict(lambda: dict.fromkeys(CATEGORIES, 0.0))
    first = min((span.start for span in spans), default=ended)
    for span, start, end in pieces(spans, began, ended):
        length = end - start
        if span is None:
            # Before anything was recorded, a rank was getting ready.
            seconds["start_up" if end <= first else "other"] += length
            continue
        seconds[_CATEGORY_OF[span.name]] += length
        if span.update is not None:
            updates[span.update][_CATEGORY_OF[span.name]] += length
        if span.name == "wait":
            for other in span.waited_for:
                waited[other] += length / len(span.waited_for)
    counted = count_exchange(session)
    return RankLedger(
        rank=session.rank,
        host=session.start.host,
        wall=ended - began,
        seconds=seconds,
        waited_for=dict(waited),
        hidden=counted.hidden if session.exchanged else _hidden(spans, session, seconds),
        per_update={
            name: statistics.median(update[name] for update in updates.values())
            for name in (CATEGORIES if updates else ())
        },
        exchange=counted,
        role=session.start.role,
    )


def _hidden(spans: Sequence[Span], session: RankSession, seconds: Mapping[str, float]) -> float:
    """Of what the spans show of exchanges, the part that was booked as something else."""
    shown = sum(
        max(min(span.end, session.ended) - max(span.start, session.began), 0.0)
        for span in spans
        if span.name == "exchange"
    )
    return max(shown - seconds["communication"], 0.0)


def count_exchange(session: RankSession) -> ExchangeTotals:
    """What a session's updates exchanged, added up."""
    lines = [line for line in session.exchanged if line.update is not None]
    return ExchangeTotals(
        updates=len(lines),
        bytes_sent=sum(line.bytes_sent for line in lines),
        bytes_received=sum(line.bytes_received for line in lines),
        messages_sent=sum(line.messages_sent for line in lines),
        messages_received=sum(line.messages_received for line in lines),
        seconds=sum(line.seconds for line in lines),
        hidden=sum(line.hidden_seconds for line in lines),
        waited=sum(line.waited_seconds for line in lines),
        outside=sum(
            line.bytes_sent + line.bytes_received
            for line in session.exchanged
            if line.update is None
        ),
    )


def pieces(
    spans: Iterable[Span], began: float, ended: float
) -> Iterable[tuple[Span | None, float, float]]:
    """`began` to `ended` in pieces, each with the span that it is booked under, in order.

    >>> inner = Span(name="wait", start=1.0, seconds=1.0)
    >>> outer = Span(name="compute", start=0.0, seconds=3.0)
    >>> [(span and span.name, end) for span, start, end in pieces([inner, outer], 0.0, 4.0)]
    [('compute', 1.0), ('wait', 2.0), ('compute', 3.0), (None, 4.0)]
    """
    inside = []
    for number, span in enumerate(spans):
        # An exchange that was told to be hidden counts only from where it no longer was.
        hidden = min(span.hidden_seconds, span.seconds) if span.name == "exchange" else 0.0
        start, end = max(span.start + hidden, began), min(span.end, ended)
        if start < end:
            inside.append((start, _RANK_OF[span.name], number, end, span))
    inside.sort(key=lambda entry: entry[0])
    bounds = sorted({began, ended, *(e[0] for e in inside), *(e[3] for e in inside)})
    active: list[tuple[int, int, float, Span]] = []
    coming = 0
    for start, end in itertools.pairwise(bounds):
        while coming < len(inside) and inside[coming][0] <= start:
            _, priority, number, until, span = inside[coming]
            heapq.heappush(active, (priority, number, until, span))
            coming += 1
        # One that is over may stay deeper in the heap: it is dropped when it comes to the top.
        while active and active[0][2] <= start:
            heapq.heappop(active)
        yield (active[0][3] if active else None), start, end


class Arrivals:
    """When each rank came to each exchange that all take part in, on the common clock.

    An exchange is known by session, update, detail and its number among those. It is used only
    where every rank of the run has it, or one rank of every node (their leaders); it then begins
    in earnest when the last rank has come.
    """

    def __init__(self, ranks: Mapping[int, Sequence[RankSession]]) -> None:
        self._node = {
            rank: past[-1].start.node
            for rank, past in ranks.items()
            if past and past[-1].start.role == "worker"
        }
        self._came: dict[tuple[int, int | None, str, int], dict[int, float]] = defaultdict(dict)
        if len(self._node) < 2:
            return
        for past in ranks.values():
            for number, session in enumerate(past):
                for key, span in _collectives(session, number):
                    self._came[key][session.rank] = session.common(span.start)

    def explain(self, session: RankSession, number: int) -> list[Span]:
        """The session's spans, exchanges divided into waiting for the last rank and the rest."""
        if not self._came:
            return list(session.spans)
        keys = {id(span): key for key, span in _collectives(session, number)}
        result: list[Span] = []
        for span in session.spans:
            key = keys.get(id(span))
            came = self._came.get(key, {}) if key is not None else {}
            result += _divide(span, session, came) if self._all(came) else [span]
        return result

    def _all(self, came: Mapping[int, float]) -> bool:
        nodes = set(self._node.values())
        by_leaders = {self._node[rank] for rank in came} == nodes and len(came) == len(nodes) > 1
        return by_leaders or len(came) == len(self._node) > 1


def _collectives(
    session: RankSession, number: int
) -> Iterable[tuple[tuple[int, int | None, str, int], Span]]:
    """The spans that ranks may have waited in without knowing for whom, with their names."""
    seen: dict[tuple[int | None, str], int] = defaultdict(int)
    for span in session.spans:
        if span.name == "exchange" and not span.hidden_seconds and span.update is not None:
            ordinal = seen[span.update, span.detail]
            seen[span.update, span.detail] += 1
            yield (number, span.update, span.detail, ordinal), span


def _divide(span: Span, session: RankSession, came: Mapping[int, float]) -> list[Span]:
    last = max(came, key=lambda rank: came[rank])
    waiting = min(came[last] - session.common(span.start), span.seconds)
    if last == session.rank or waiting <= 0:
        return [span]
    wait = Span(
        name="wait",
        start=span.start,
        seconds=waiting,
        update=span.update,
        waited_for=(last,),
        detail=span.detail,
    )
    rest = replace(span, start=span.start + waiting, seconds=max(span.seconds - waiting, 0.0))
    return [wait, rest]


def add_up(parts: Sequence[RankLedger]) -> RankLedger:
    """The sessions of one rank together, or pieces of one."""
    waited: dict[int, float] = defaultdict(float)
    for part in parts:
        for rank, seconds in part.waited_for.items():
            waited[rank] += seconds
    return RankLedger(
        rank=parts[-1].rank,
        host=parts[-1].host,
        wall=sum(part.wall for part in parts),
        seconds={name: sum(part.seconds[name] for part in parts) for name in CATEGORIES},
        waited_for=dict(waited),
        hidden=sum(part.hidden for part in parts),
        per_update=parts[-1].per_update,
        exchange=sum((part.exchange for part in parts), ExchangeTotals()),
        role=parts[-1].role,
    )
