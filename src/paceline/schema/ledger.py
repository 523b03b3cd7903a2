"""The time ledger: where every second of every rank went; no torch.

`observe.ledger` makes it from events; the report and the commands show it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Final, Literal

from paceline.text import rank_name

CATEGORIES: Final = (
    "compute",
    "optimizer",
    "communication",
    "waiting",
    "data",
    "evaluation",
    "checkpoint",
    "proof",
    "start_up",
    "finding",
    "standing_by",
    "other",
)
TITLES: Final = {
    "compute": "compute",
    "optimizer": "optimizer",
    "communication": "exposed communication",
    "waiting": "waiting for others",
    "data": "data",
    "evaluation": "evaluation",
    "checkpoint": "checkpoint",
    "proof": "proof of the plan",
    "start_up": "start-up",
    "finding": "finding the fastest way",
    "standing_by": "standing by",
    "other": "other",
}


@dataclass(frozen=True, kw_only=True)
class ExchangeTotals:
    """What a rank exchanged with other nodes in its updates, counted alike by every exchange."""

    updates: int = 0
    """Updates that were counted; what follows is their sum."""
    bytes_sent: int = 0
    bytes_received: int = 0
    messages_sent: int = 0
    messages_received: int = 0
    seconds: float = 0.0
    """While anything was on its way: `hidden` and `waited` together."""
    hidden: float = 0.0
    """Under computing."""
    waited: float = 0.0
    """While the computation stood still."""
    outside: int = 0
    """Bytes sent and received for no update: start-up, evaluation, checkpoints, sums of epochs."""

    def __add__(self, other: ExchangeTotals) -> ExchangeTotals:
        return ExchangeTotals(
            **{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        )


@dataclass(frozen=True, kw_only=True)
class RankLedger:
    """One rank's wall time."""

    rank: int
    host: str
    wall: float
    """Seconds of all sessions of the rank."""
    seconds: Mapping[str, float]
    """By category; sums to `wall`."""
    waited_for: Mapping[int, float] = field(default_factory=dict)
    """Of the waiting: for which rank how long. May sum to less: not every wait has a name."""
    hidden: float = 0.0
    """Seconds of exchange that cost nothing, since something else was going on."""
    per_update: Mapping[str, float] = field(default_factory=dict)
    """By category: the median over the updates of the newest session."""
    exchange: ExchangeTotals = field(default_factory=lambda: ExchangeTotals())
    """What the rank's exchange with other nodes counted."""
    role: Literal["worker", "server"] = "worker"

    @property
    def name(self) -> str:
        return rank_name(self.rank, self.host, self.role)

    @property
    def shares(self) -> dict[str, float]:
        """By category, 0 to 1."""
        return {name: value / self.wall if self.wall else 0.0 for name, value in self.items()}

    def items(self) -> Iterable[tuple[str, float]]:
        return ((name, self.seconds.get(name, 0.0)) for name in CATEGORIES)


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """The wall time of all ranks of a run."""

    ranks: tuple[RankLedger, ...]

    @property
    def workers(self) -> list[RankLedger]:
        """The ranks that compute; servers stand by for them."""
        return [rank for rank in self.ranks if rank.role == "worker"]

    def made_wait(self, rank: int) -> float:
        """Which part (0 to 1) of their wall time the other workers waited for this rank."""
        others = [other for other in self.workers if other.rank != rank]
        wall = sum(other.wall for other in others)
        waited = sum(other.waited_for.get(rank, 0.0) for other in others)
        return waited / wall if wall else 0.0

    @property
    def slowest(self) -> RankLedger | None:
        """The rank that made the others wait longest; None where nobody waited."""
        found = max(self.ranks, key=lambda rank: self.made_wait(rank.rank), default=None)
        return found if found is not None and self.made_wait(found.rank) > 0 else None

    @property
    def coordination_to_computation(self) -> float | None:
        """(exposed communication + waiting) / (compute + optimizer), summed over all workers."""
        computation = self.total("compute") + self.total("optimizer")
        if not computation:
            return None
        return (self.total("communication") + self.total("waiting")) / computation

    def total(self, category: str) -> float:
        return sum(rank.seconds.get(category, 0.0) for rank in self.workers)

    def sentences(self, least: float = 0.01) -> list[str]:
        """Who made the others wait, the longest first; parts below `least` are not worth it."""
        order = sorted(self.ranks, key=lambda rank: -self.made_wait(rank.rank))
        others = "the others" if len(self.workers) > 2 else "the other"
        return [
            f"Rank {rank.rank} on host {rank.host} made {others} wait"
            f" {self.made_wait(rank.rank):.0%} of the time."
            for rank in order
            if self.made_wait(rank.rank) >= least
        ]
