"""Candidates that are all built and make one update each in turns.

A machine whose speed changes from minute to minute is the same for all of them.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from typing import Protocol

from paceline.errors import UserError
from paceline.measure.entries import Entry
from paceline.schema import Candidate, NodePlan

TOGETHER = 4
"""Finalists of long updates, of each precision, that are built together, at most."""
COLD = 3
"""So many updates each of them makes to warm up,"""
LEAST, MOST = 5, 8
"""then so many that are timed, more than the first number only if there is time;"""
LOOK, LEFT = 2, 1.04
"""and who is so many times slower than the best after so many of them is left there."""


class Alternation(Protocol):
    """Keeps several candidates built, to make one update of any of them; then takes all down."""

    def build(self, entry: Candidate) -> None: ...

    def update(self, entry: Candidate) -> float: ...

    def close(self) -> None: ...


def groups_of(finalists: Sequence[Entry], *, near: float, room_mb: float) -> list[list[Entry]]:
    """Who is to be built at once: each precision by itself, unless the best of both come near.

    Finalists come fastest first. Of a group those that fit into memory together.
    """
    # A process is in one process group at a time: of those that need one the fastest.
    over_group = [e for e in finalists if _needs_group(e.candidate.node)]
    over_group.sort(key=lambda e: e.fastest)
    chosen = [e for e in finalists if e not in over_group[1:]]
    plain = [e for e in chosen if e.candidate.precision == "fp32"]
    others = [e for e in chosen if e not in plain]
    groups = [group for group in (plain, others) if len(group) > 1]
    if plain and others and 1 / near <= plain[0].fastest / others[0].fastest <= near:
        groups = [plain + others]
    return [_fitting(group, room_mb) for group in groups]


def _fitting(group: list[Entry], room_mb: float) -> list[Entry]:
    """The first ones of a group that fit into memory together."""
    taken = itertools.accumulate(e.memory_mb or 0.0 for e in group)
    return [e for e, mb in zip(group, taken, strict=True) if mb <= room_mb]


def alternate(alternation: Alternation, group: list[Entry], *, late: Callable[[], bool]) -> None:
    """Time updates of all of a group in turns."""
    parts: dict[str, float] = {}
    running = [e for e in group if _build(alternation, e)]
    for entry in running * COLD:
        alternation.update(entry.candidate)
    for number in range(MOST):
        if len(running) < 2 or (number >= LEAST and late()):
            break
        for entry in running:
            entry.alternated.append(alternation.update(entry.candidate))
            entry.alternations += 1
        if number + 1 == LOOK:
            best = min(min(e.alternated) for e in running)
            parts = {e.candidate.name: min(e.alternated) / best for e in running}
            running = [e for e in running if parts[e.candidate.name] <= LEFT]
    alternation.close()
    _even_out([e.alternated for e in running])
    for entry in group:
        if entry.alternated and entry not in running:  # as far behind as it was when it left
            entry.alternated = [parts[entry.candidate.name] * min(e.typical for e in running)]


def follow_drift(group: list[Entry], everyone: Sequence[Entry]) -> None:
    """Let earlier times of the others be what they would have been when these were timed."""
    changes = [e.typical / e.fastest for e in group if e.alternated]
    precisions = {e.candidate.precision for e in group}
    for entry in everyone:
        timed_before = entry.times and not entry.alternated
        if changes and timed_before and entry.candidate.precision in precisions:
            entry.drift = statistics.median(changes) * entry.fastest / entry.median


def _build(alternation: Alternation, entry: Entry) -> bool:
    try:
        alternation.build(entry.candidate)
    except UserError as error:
        entry.failed = str(error)
        return False
    return True


def _even_out(everyone: list[list[float]]) -> None:
    """Take out of times that were timed in rounds what made whole rounds faster or slower.

    >>> times = [[1.0, 1.0, 2.0], [1.5, 1.5, 3.0]]
    >>> _even_out(times)
    >>> [[round(seconds, 2) for seconds in some] for some in times]
    [[1.0, 1.0, 1.0], [1.5, 1.5, 1.5]]
    """
    if len(everyone) < 2:
        return  # nothing would be left of the only one's noise
    rounds = [statistics.geometric_mean(times) for times in zip(*everyone, strict=True)]
    for times in everyone:
        for number, seconds in enumerate(times):
            times[number] = seconds / rounds[number] * statistics.median(rounds)


def _needs_group(node: NodePlan) -> bool:
    return node.strategy in ("pipeline", "hybrid") or (
        node.strategy == "processes" and node.sync == "ddp"
    )
