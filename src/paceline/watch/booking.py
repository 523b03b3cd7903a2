"""The ledger of a run so far, booked piece by piece: what was booked is not looked at again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from paceline.observe.ledger import add_up, make_ledger
from paceline.schema.events import Clock, End, Exchanged, RankSession, Span, Start
from paceline.schema.ledger import Ledger, RankLedger

MOST_SPANS = 4_000
"""Of a rank that are kept until the other ranks have come as far."""


@dataclass
class RankBook:
    """One rank's session: what is booked, and what is not yet."""

    start: Start
    spans: list[Span] = field(default_factory=list)
    exchanged: list[Exchanged] = field(default_factory=list)
    clocks: list[Clock] = field(default_factory=list)
    until: float = 0.0
    """Booked up to here."""
    booked: RankLedger | None = None
    last: int = -1
    """The newest update that a span was of."""

    def __post_init__(self) -> None:
        self.until = self.start.began

    def begin_of(self, update: int) -> float | None:
        """When the first span of an update, or of a later one, began."""
        found = [s.start for s in self.spans if s.update is not None and s.update >= update]
        return min(found, default=None)

    def piece(self, cut: float) -> RankSession:
        """What happened between what is booked and `cut`, as a session of its own."""
        spans = tuple(span for span in self.spans if span.start < cut)
        exchanged = tuple(line for line in self.exchanged if line.time <= cut)
        self.spans = [span for span in self.spans if span.end > cut]
        self.exchanged = [line for line in self.exchanged if line.time > cut]
        return RankSession(
            start=replace(self.start, began=self.until, time=self.until),
            spans=spans,
            exchanged=exchanged,
            clocks=tuple(self.clocks),
            end=End(time=cut),
        )


def book(books: Mapping[int, RankBook], *, alive: set[int]) -> Ledger:
    """Book what all ranks that are `alive` have behind them; the ledger so far."""
    seen = [books[rank].last for rank in alive if books[rank].last >= 0]
    common = min(seen, default=-1)
    pieces: dict[int, list[RankSession]] = {}
    first: set[int] = set()
    for rank, each in books.items():
        crowded = len(each.spans) > MOST_SPANS
        cut = each.begin_of(each.last if crowded or rank not in alive else common)
        if cut is not None and cut > each.until:
            if each.booked is None:
                first.add(rank)
            pieces[rank] = [each.piece(cut)]
            each.until = cut
    for made in make_ledger(pieces).ranks:
        each = books[made.rank]
        if made.rank not in first:  # a gap later on is no start-up
            seconds = dict(made.seconds)
            seconds["other"] += seconds["start_up"]
            seconds["start_up"] = 0.0
            made = replace(made, seconds=seconds)
        each.booked = made if each.booked is None else add_up([each.booked, made])
    return Ledger(ranks=tuple(b.booked for _, b in sorted(books.items()) if b.booked))
