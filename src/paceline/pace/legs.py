"""Legs of a loop of one's own: between two batches the pilot decides who works on the next ones.

The first rank leads and works in every leg. A rank that a leg does not need waits in its loader, in
a broadcast of the first rank's next order; when it is needed again, it is given everything that
was handed to `pace.prepare`, as the first rank has it by then.
"""

from __future__ import annotations

import dataclasses
import itertools
import socket
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.errors import UnsupportedError, UserError
from paceline.local.cores import pin, set_threads, visible_cores
from paceline.pace.bodies import Bodies, differing
from paceline.pace.carrying import Carrying
from paceline.pace.meter import Meter
from paceline.pace.ranks import Ranks
from paceline.pace.teams import Members, Seat, options, seats_of, team_name, teams
from paceline.plan.pilot import Decision, Knowledge, next_leg, typical
from paceline.schema import Plan
from paceline.schema.legs import Leg
from paceline.training.shares import fairer_shares

BUDGET = 0.05
"""Part of the expected time that finding the fastest way may cost, as `pilot.budget` is by
default."""
FEWEST_TIMED = 3
"""Batches that tell the speeds of ranks at the end of a leg."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """What comes next: who works, up to which batch, and each one's share."""

    until: int
    members: Members
    shares: tuple[float, ...]
    """Of the members."""


@dataclass(kw_only=True)
class _Under:
    """The leg that is under way."""

    began: float
    setup: float
    asked: list[float] = field(default_factory=list)
    """When each batch was asked for, and the end."""
    busy: list[float] = field(default_factory=list)
    """Seconds that this rank had computed by then."""
    samples: list[int] = field(default_factory=list)
    """Of each whole batch."""


class Legs:
    """Who works on which batches; every rank has one and calls it in the same order."""

    def __init__(
        self,
        ranks: Ranks,
        meter: Meter,
        hand_over: Callable[[], None],
        shares: Sequence[float],
        say: Callable[[str], None],
        carrying: Carrying,
        *,
        follow: bool = True,
    ) -> None:
        """`follow`: shares follow the measured speeds."""
        self._ranks, self._meter, self._hand_over, self._say = ranks, meter, hand_over, say
        self._carrying, self.bodies = carrying, Bodies(carrying)
        self.legs: list[Leg] = []
        self.batches_left: Callable[[int], int] = lambda _: 0
        """Of the epochs after this one, by the number of one's batches."""
        self.kept: Callable[[Sequence[Leg]], None] = lambda _: None
        """Told of all legs when one has ended."""
        self.planned: Callable[[Members, Sequence[float]], Plan] = lambda *_: Plan()
        self.position = 0
        self._seats: list[Seat] = []
        self._teams: list[Members] = []
        self._follow = follow
        self._shares: dict[Members, list[float]] = {ranks.everyone: list(shares)}
        """As every rank knows them."""
        self._fairer: dict[Members, list[float]] = {}
        """On the first rank: those of the next leg of a team."""
        self._current: Members = ranks.everyone
        self._fresh: set[int] = set(ranks.everyone)
        """Ranks that have everything as the first has it."""
        self._missed: set[int] = set()
        """Ranks that have ever stood by."""
        self._pinned = self._kept = ""
        self._speeds: list[float] = []
        self._waiting = self._seconds = 0.0
        self._handing = 0.0
        self._under: _Under | None = None
        self._unsettled = self._is_open = False
        self._started = time.perf_counter()
        self._decision = Decision(name="", updates=0, role="keep", best="")

    @property
    def shares(self) -> list[float]:
        """Of all ranks, for what they do together."""
        return self._shares[self._ranks.everyone]

    # --- an iteration of a loader, on every rank --------------------------------

    def open(self, loader: int) -> bool:
        """A loop over a loader begins; whether in legs."""
        self.settle()
        if self._is_open:
            self._refuse_away("a loader is used inside the loop of another")
            self.pin_down("a loader is used inside the loop of another")
            return False
        self.bodies.use(loader)
        if self.bodies.is_known and not self.bodies.has_trained:
            return False
        if not self._seats:
            self._sit_down()
        self._is_open = True
        return True

    def _sit_down(self) -> None:
        mine = [socket.gethostname(), torch.get_num_threads(), list(visible_cores())]
        self._seats = [
            Seat(host=host, threads=threads, cores=tuple(cores))
            for host, threads, cores in self._ranks.gather(mine)
        ]
        self._teams = teams([seat.host for seat in self._seats])
        for members in self._teams:
            self._ranks.make_team(members)
        self._ranks.sum([0.0])
        began = time.perf_counter()
        self._hand_over()
        self._handing = time.perf_counter() - began

    def next(self, at: int, total: int) -> Order | None:
        """The leg from this batch on; None: the first rank has left the loop."""
        began = time.perf_counter()
        report = self._end_leg()
        self._ranks.use(self._ranks.everyone)
        found = self._ranks.by_first(lambda: self._decide(at, total, report))
        if found is None:
            self._come_together()
            return None
        order = Order(
            until=found["until"], members=tuple(found["members"]), shares=tuple(found["shares"])
        )
        self._shares[order.members] = list(order.shares)
        if self._ranks.rank in order.members:
            self._enter(order, began)
        self._fresh = set(order.members)
        self._missed |= set(self._ranks.everyone) - self._fresh
        return order

    def _enter(self, order: Order, began: float) -> None:
        self._ranks.use(order.members)
        seat = seats_of(order.members, self._seats)[self._ranks.rank]
        if order.members != self._current or set(order.members) - self._fresh:
            self._sit(seat)
        if set(order.members) - self._fresh:
            self._hand_over()
        self._current = order.members
        self.bodies.begin_leg()
        self._under = _Under(began=began, setup=time.perf_counter() - began)

    def _sit(self, seat: Seat) -> None:
        pin(seat.cores)
        set_threads(seat.threads)

    def asks(self) -> None:
        """A batch is asked for: the body of the one before is done."""
        self.bodies.end()
        assert self._under is not None
        self._under.asked.append(time.perf_counter())
        self._under.busy.append(self._meter.busy)

    def handed(self, samples: int) -> None:
        """A batch is handed out."""
        assert self._under is not None
        self._under.samples.append(samples)
        self.bodies.begin()

    def ended(self) -> None:
        """The loader has no more batches; every rank is there."""
        self._come_to_end()

    def left(self) -> None:
        """The loop was left before its end, or has failed: nobody is waited for here."""
        self.bodies.forget()
        self._unsettled = True

    def settle(self) -> None:
        """Before anything that all ranks do together outside of the loop that was left."""
        if self._unsettled:
            self._unsettled = False
            self._come_to_end()

    def _come_to_end(self) -> None:
        report = self._end_leg()
        self._ranks.use(self._ranks.everyone)
        self._ranks.by_first(lambda: self._record(report))
        self._come_together()

    def _come_together(self) -> None:
        """Everybody has everything, and the cores that it was started with."""
        self._is_open = False
        self.bodies.forget()
        if len(self._fresh) < self._ranks.size:
            self._hand_over()
            self._fresh = set(self._ranks.everyone)
        if self._current != self._ranks.everyone or self._ranks.rank not in self._current:
            self._sit(self._seats[self._ranks.rank])
            self._current = self._ranks.everyone

    # --- what is refused ----------------------------------------------------------

    def pin_down(self, reason: str) -> None:
        """No rank stands by from now on."""
        if not self._pinned:
            self._pinned = reason
            self._say(f"paceline: no legs: {reason}; all ranks work on every batch")

    def _refuse_away(self, reason: str) -> None:
        if self._ranks.members != self._ranks.everyone:
            raise UnsupportedError(
                f"{reason} while ranks stand by, who cannot take part: use Pace(legs=False)"
            )

    def agree(self, what: str) -> None:
        """Before ranks do something together: see that they all do, if one of them has stood by."""
        if self._missed.isdisjoint(self._ranks.members):
            return
        code = float(zlib.crc32(what.encode()) % 1000)
        total, squares = self._ranks.sum([code, code * code])
        if squares * len(self._ranks.members) != total * total:
            self._refuse_other("a rank")

    def _refuse_other(self, who: str) -> None:
        raise UserError(
            f"{who} did otherwise with its batches than the first rank: the loop counts batches, or"
            " keeps something from one to the next, which ranks that stand by miss; hand it to"
            " pace.prepare, or use Pace(legs=False)"
        )

    # --- the first rank ---------------------------------------------------------

    def _end_leg(self) -> list[list[Any]]:
        """What the members of the leg that ends say of it; nothing where there is none."""
        under = self._under
        if under is None:
            return []
        self.bodies.end()
        self.agree("end")
        under.asked.append(time.perf_counter())
        under.busy.append(self._meter.busy)
        took = [later - before for before, later in itertools.pairwise(under.busy)]
        mine = [*self.bodies.report(), took[: len(under.samples)], self._carrying.held()]
        found = self._ranks.gather(mine)
        if not self._ranks.is_first:
            self._under = None
        wrong = differing([each[:2] for each in found])
        if wrong is not None:
            self._refuse_other(f"rank {self._ranks.members[wrong]}")
        self._carrying.compare([each[3] for each in found])
        return [each[2] for each in found]

    def _record(self, took: list[list[float]]) -> None:
        under, self._under = self._under, None
        if under is None or not under.samples:
            return
        members = self._current
        asked = under.asked
        times = [after - before for before, after in itertools.pairwise(asked)]
        times = times[: len(under.samples)]
        if not self.bodies.has_trained:
            return
        middle, error = typical(times)
        decision = self._decision
        setup = under.setup if decision.role != "keep" else 0.0
        self.legs.append(
            Leg(
                name=decision.name,
                plan=self.planned(members, self._shares[members]),
                first=self.position,
                updates=len(times),
                role=decision.role,
                best=decision.best,
                began=decision.reason,
                began_at=under.began - self._started,
                setup_seconds=setup + (max(0.0, times[0] - middle) if middle and setup else 0.0),
                seconds=sum(times),
                update_seconds=middle,
                error=error,
            )
        )
        self.position += len(times)
        self.kept(self.legs)
        self._learn(members, took, under, middle)

    def _learn(
        self, members: Members, took: list[list[float]], under: _Under, seconds: float | None
    ) -> None:
        """Speeds, waiting and shares, of what the members say of a leg."""
        rows = [list(row) for row in zip(*took, strict=False)][1:]
        shares = self._shares[members]
        if members == self._ranks.everyone and rows and seconds:
            batch = under.samples[0]
            middles = [typical([0.0, *column])[0] or 0.0 for column in zip(*rows, strict=True)]
            parts = [batch * share / sum(shares) for share in shares]
            self._speeds = [
                part / middle if middle else 0.0
                for part, middle in zip(parts, middles, strict=True)
            ]
            self._seconds, self._waiting = seconds, max(0.0, seconds - max(middles))
        if self._follow and len(members) > 1:
            self._fairer[members] = fairer_shares(shares, rows, FEWEST_TIMED) or shares

    def _decide(self, at: int, total: int, took: list[list[float]]) -> dict[str, Any]:
        """The next order; asked of the first rank alone."""
        batch = self._under.samples[0] if self._under and self._under.samples else 1
        if self._under is not None:
            self._record(took)
        if self.bodies.reason:
            self.pin_down(self.bodies.reason)
        everyone, left = self._ranks.everyone, total - at
        if at and not self.bodies.has_trained:  # an evaluation
            members = everyone
            self._decision = self._going_on(members, left)
        elif self._pinned:
            stayed = tuple(rank for rank in everyone if rank not in self._missed)
            members = stayed if stayed in self._teams else (0,)
            self._decision = self._going_on(members, left)
        else:
            self._decision = self._asked(batch, left, total)
            members = self._named(self._decision.name)
        # What a loop carries from batch to batch stays with its rows: their ranks keep them.
        fairer = None if self._pinned else self._fairer.get(members)
        shares = fairer or self._shares.get(members)
        return {
            "until": at + max(1, min(left, self._decision.updates)),
            "members": list(members),
            "shares": list(shares or [self.shares[member] for member in members]),
        }

    def _named(self, name: str) -> Members:
        return next(each for each in self._teams if team_name(each, self._ranks.size) == name)

    def _going_on(self, members: Members, updates: int) -> Decision:
        name = team_name(members, self._ranks.size)
        return Decision(name=name, updates=updates, role="keep", best=name, reason=self._pinned)

    def _asked(self, batch: float, left: int, total: int) -> Decision:
        """What the pilot says."""
        choice = self._options(batch)
        known = Knowledge(
            options=choice,
            updates=self.position + left + self.batches_left(total),
            legs=self.legs,
            position=self.position,
            elapsed=time.perf_counter() - self._started,
            budget=BUDGET,
            start=choice[-1].name,
        )
        decision = next_leg(known)
        if not self.legs:
            self._kept = decision.name
            return dataclasses.replace(decision, reason="all ranks begin together")
        if decision.role == "keep":
            self._tell(decision)
        return decision

    def _options(self, batch: float) -> list[Any]:
        return options(
            self._teams,
            self._seats,
            self._speeds or [0.0] * len(self._seats),
            batch=batch,
            seconds=self._seconds,
            waiting=self._waiting,
            setup=self._handing,
        )

    def _tell(self, decision: Decision) -> None:
        """A line where another team goes on, for good as far as is known.

        Trials of further teams may lie between the comparison that decided it and this leg.
        """
        before, self._kept = self._kept, decision.name
        if before == decision.name:
            return
        # Legs of one batch, as at the end of an epoch, tell no speed.
        seconds = {leg.name: leg.update_seconds for leg in self.legs if leg.update_seconds}
        if decision.name in seconds and before in seconds:
            self._say(
                f"paceline: {decision.name} from now on: {seconds[decision.name]:.3g} s per batch,"
                f" {seconds[before]:.3g} with {before}"
            )
