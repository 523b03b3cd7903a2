"""The rules of a race: who runs, for how long, and who drops out.

Pure but for the trial it is given, so that the rules are tested with times made
up. Three rounds (when `thorough`, nobody stops early, and only the finals count as its time):

1. every structure with plain numerics; one that is far behind stops early;
2. the structures near the front with every other precision and layout (only the best one when
   the time is up already);
3. finals: the front runners of each precision again and again, interleaved so
   that noise hits all alike, until their order is clear or the time is up. The first of these
   rounds takes in all whom one turn may have put behind by chance.

Where updates are long there are few of them in a race: options of a structure that cannot catch up
are left out, who was timed only once has a second turn before the front is known, the front is
short, and there is more time. Turns of minutes apart would not tell those apart who are close: the
finalists are all built and make one update each in turns. Where memory does not allow that, they
have turns like others, and the first round of them is whole.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from paceline.errors import UserError
from paceline.measure.alternate import (
    TOGETHER,
    Alternation,
    alternate,
    follow_drift,
    groups_of,
)
from paceline.measure.entries import Entry
from paceline.plan.candidates import candidate, is_calmer, is_level, is_near
from paceline.schema import Candidate, NodePlan
from paceline.text import rate

RULES = 7
"""To be raised with any change of these rules: races kept before are then run anew."""
FAR_BEHIND = 1.6
"""A candidate this many times slower than the best is not tried further."""
FRONT_NEAR = 1.4
"""Only structures at most this many times slower than the best are tried with other numerics."""
NEAR = 1.12
"""Finals take those at most this many times slower than the best of their precision,"""
NEAR_FIRST = 1.45
"""but first those that one turn, on a machine whose speed wanders, put no further behind,"""
NEAR_LONG = 1.08
"""and of long updates, which vary less, only those at most this many times slower."""
FINALISTS, FINALISTS_FIRST = 3, 6
"""Of each precision, at most."""
FINALS = 400
"""Finals may last as many updates of the fastest plain candidate, however late it is,"""
FINALS_PART = 1.4
"""but not longer than so many times the time that the race was given,"""
ROUNDS = 8
"""and not more rounds."""
LONG_UPDATE = 0.5
"""Seconds: where updates take longer, time goes to the front runners."""
HOPELESS = 1.25
"""Of long updates: one this many times slower than the best has no option that could win.

A pipeline of 2 stages stands idle for 20% of the time with 4 micro-batches and 11% with 8.
"""
FRONT = 3
"""So many structures of long updates are tried with other numerics."""
AGAIN = 2.0
"""Who was timed only once has a second turn later, unless it was so many times slower."""
UPDATES = 150
"""A race may last as many updates of its fastest plain candidate, if that is longer,"""
LONGEST = 400.0
"""but not longer than these seconds."""
WARMUP = 2
"""Updates at least before those that are timed."""
TURN, TURN_LONG = 5, 2
"""Updates that are timed in a turn, at least; long ones at most."""
TURN_SECONDS = 0.6
"""A turn of short updates lasts about this long: a moment's disturbance must not decide it."""
LONGEST_TURN = 20
"""Updates of a turn."""


class Trial(Protocol):
    """Runs one candidate: seconds of each timed step, and peak memory in MB."""

    def __call__(
        self, entry: Candidate, *, warmup: int, steps: int, give_up: float | None
    ) -> tuple[list[float], float | None]: ...


def _anyone(entry: Entry) -> bool:
    return True


class Contest:
    """One race."""

    def __init__(
        self,
        trial: Trial,
        *,
        batch_size: int,
        seconds: float = 40.0,
        thorough: bool = False,
        say: Callable[[str], None] = lambda text: None,
        clock: Callable[[], float] = time.monotonic,
        alternation: Alternation | None = None,
        room_mb: float = math.inf,
    ) -> None:
        self._trial, self._batch, self._say, self._clock = trial, batch_size, say, clock
        self._start, self._seconds = clock(), seconds
        self._thorough = thorough
        self._alternation, self._room_mb = alternation, room_mb
        self._entries: dict[str, Entry] = {}

    def run(
        self, nodes: Sequence[NodePlan], numerics: Sequence[tuple[str, str]]
    ) -> list[Candidate]:
        """All candidates with their times, the simplest first: as given, plain numerics before."""
        plain, others = numerics[0], numerics[1:]
        given = self._seconds
        for node in nodes:
            self._attempt_unless_hopeless(candidate(node, *plain))
        if not self._thorough:
            self._look_again()
        best = self._best_time(_anyone)
        front = [
            node
            for node in nodes
            if node.strategy != "sequential"
            and (
                self._thorough
                or self._entries[candidate(node, *plain).name].fastest <= FRONT_NEAR * best
            )
        ]
        front.sort(key=lambda node: self._entries[candidate(node, *plain).name].fastest)
        if self._long() and not self._thorough:
            front = front[:FRONT]
        if not self._thorough:
            self._seconds = max(self._seconds, min(UPDATES * best, LONGEST))
        for variant in others:
            late = self._late() and not self._thorough
            for node in (front[:1] if late else front) or nodes[:1]:
                self._attempt(candidate(node, *variant))
        end = self._clock() + given
        if not self._thorough:
            least = self._clock() + min(FINALS * best, FINALS_PART * given)
            end = max(self._start + self._seconds, least)
        self._finals(end)
        order = [candidate(node, *variant).name for variant in numerics for node in nodes]
        return sorted(self._results(), key=lambda entry: order.index(entry.name))

    def _attempt_unless_hopeless(self, entry: Candidate) -> None:
        """Try a structure, unless it is another option of one that is far behind already."""
        best = self._best_time(_anyone)
        for other in self._entries.values():
            node = other.candidate.node
            same = dataclasses.replace(node, micro_batches=entry.node.micro_batches) == entry.node
            behind = other.fastest > HOPELESS * best and other.fastest > LONG_UPDATE
            if same and behind and other.times and not self._thorough:
                reason = f"not tried: {other.candidate.name} is far behind already"
                self._entries[entry.name] = Entry(entry, failed=reason)
                return
        self._attempt(entry)

    def _look_again(self) -> None:
        """A second turn for who was timed once: a single disturbance must not put them out."""
        best = self._best_time(_anyone)
        for entry in list(self._entries.values()):
            baseline = entry.candidate.node.strategy == "sequential"
            if len(entry.times) == 1 and not baseline and entry.fastest <= AGAIN * best:
                self._attempt(entry.candidate)

    def _attempt(self, entry: Candidate, *, final: bool = False) -> None:
        as_many = min(LONGEST_TURN, round(TURN_SECONDS / self._best_time(_anyone)))
        steps = TURN_LONG if self._long() else max(TURN, as_many)
        record = self._entries.setdefault(entry.name, Entry(entry))
        if record.failed:
            return
        best = self._best_time(lambda other: other.candidate.precision == entry.precision)
        give_up = None if best == float("inf") else FAR_BEHIND * best
        if entry.node.strategy == "sequential" or self._thorough:
            give_up = None  # the baseline of every speedup is always measured
        try:
            times, memory = self._trial(entry, warmup=WARMUP, steps=steps, give_up=give_up)
        except UserError as error:  # a refusal; a rank that failed ends the race's ranks
            record.failed = str(error)
            self._say(f"{entry.name}: {error}")
            return
        record.times += times
        record.turns.append(statistics.median_low(times))
        record.finals += final
        record.memory_mb = memory if memory is not None else record.memory_mb
        if give_up is not None and min(times) > give_up:
            record.stopped = "stopped early: far behind"
        self._say(f"{entry.name}: {rate(self._batch / record.typical)} images/s")

    def _best_time(self, chosen: Callable[[Entry], bool]) -> float:
        return min(
            (e.fastest for e in self._entries.values() if chosen(e) and not e.failed),
            default=float("inf"),
        )

    def _late(self) -> bool:
        return self._is_past(self._start + self._seconds)

    def _is_past(self, end: float) -> bool:
        return self._clock() > end

    def _long(self) -> bool:
        """Whether updates are long, as far as is known."""
        return LONG_UPDATE < self._best_time(_anyone) < float("inf")

    def _finals(self, end: float) -> None:
        if self._alternation is not None and self._long() and not self._thorough:
            finalists = self._contenders(first=False, most=TOGETHER)
            groups = groups_of(finalists, near=NEAR_LONG, room_mb=self._room_mb)
            if all(len(group) > 1 for group in groups):
                self._alternate(self._alternation, groups, end)
                return
        for rounds in range(ROUNDS):
            contenders = self._contenders(first=rounds == 0)
            enough = 1 if self._long() else 2
            due = self._long() and not self._thorough and rounds == 0  # however late it is
            if not contenders or (rounds >= enough and self._clear(contenders)):
                return
            for entry in contenders:
                if self._is_past(end) and not due:
                    return
                self._attempt(entry.candidate, final=True)

    def _alternate(self, alternation: Alternation, groups: list[list[Entry]], end: float) -> None:
        for number, group in enumerate(groups):
            # Each group has its part of the time that is left.
            left = max(0.0, end - self._clock()) / (len(groups) - number)
            alternate(alternation, group, late=partial(self._is_past, self._clock() + left))
            follow_drift(group, list(self._entries.values()))
            for entry in group:
                shown = entry.failed or f"{rate(self._batch / entry.typical)} images/s"
                self._say(f"{entry.candidate.name}: {shown}")

    def _contenders(self, *, first: bool, most: int = FINALISTS) -> list[Entry]:
        """Those near the best of their precision; nobody whom nobody else comes near."""
        near = NEAR_LONG if self._long() else NEAR
        if first and not self._long():
            near, most = NEAR_FIRST, FINALISTS_FIRST
        result: list[Entry] = []
        for precision in ("fp32", "bf16"):
            group = [
                e
                for e in self._entries.values()
                if e.candidate.precision == precision and e.times and not e.failed
            ]
            group.sort(key=lambda e: e.fastest)
            if group:
                result += [e for e in group if e.fastest <= near * group[0].fastest][:most]
        return [
            e
            for e in result
            if any(e is not f and 1 / near <= e.fastest / f.fastest <= near for f in result)
        ]

    def _clear(self, contenders: list[Entry]) -> bool:
        """True when, in each precision, the best is apart from the second by their quartiles."""
        for precision in ("fp32", "bf16"):
            group = sorted(
                (e for e in contenders if e.candidate.precision == precision),
                key=lambda e: e.typical,
            )
            if len(group) > 1 and group[0].quartiles()[1] >= group[1].quartiles()[0]:
                return False
        return True

    def _results(self) -> list[Candidate]:
        base = next(
            (e for e in self._entries.values() if e.candidate.name == "sequential" and e.times),
            None,
        )
        results = []
        for entry in self._entries.values():
            if entry.failed or not entry.times:
                results.append(dataclasses.replace(entry.candidate, reason=entry.failed))
                continue
            low, high = entry.quartiles()
            results.append(
                dataclasses.replace(
                    entry.candidate,
                    images_per_second=self._batch / entry.typical,
                    low=self._batch / high,
                    high=self._batch / low,
                    error=entry.error,
                    trials=len(entry.times) + entry.alternations,
                    speedup=base.typical / entry.typical if base else None,
                    memory_mb=entry.memory_mb,
                    reason=entry.stopped,
                )
            )
        return results


def pick(candidates: Sequence[Candidate], allowed: Sequence[str]) -> Candidate | None:
    """The fastest candidate whose numerics are allowed; of near equals, the simplest structure.

    Candidates come simplest first, so "simplest" is "earliest"; of one structure, the fastest.
    One that moves far less data between the cores comes before it, unless clearly slower: where
    cores come to lie further apart, training may meet more slow minutes than the race did.
    """
    usable = [
        c
        for c in candidates
        if c.images_per_second is not None and not c.out and (c.exact or c.precision in allowed)
    ]
    if not usable:
        return None
    best = max(usable, key=lambda c: c.images_per_second or 0.0)
    near = [c for c in usable if is_near(c, best)]
    structures = [c.node for c in candidates]
    simplest = min(near, key=lambda c: (structures.index(c.node), -(c.images_per_second or 0.0)))
    calmer = [
        c
        for c in usable
        if c.precision == simplest.precision and is_calmer(c, simplest) and is_level(c, simplest)
    ]
    return max(calmer, key=lambda c: c.images_per_second or 0.0, default=simplest)
