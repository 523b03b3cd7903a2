"""What a person sees of all ranks, and which of several failures came first.

Lines are shown as they come, with their rank before them. A traceback is held back until it is
clear whether its rank dies of it: then that of the first failure is shown, and those of the others,
which follow from it, are in their logs.
"""

from __future__ import annotations

import collections
import re
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from paceline.schema.script import RankExit
from paceline.text import duration, printable

HELD_SECONDS = 10.0
"""A rank that lives on for so long after a traceback has only printed it: an interpreter with torch
takes a second to end, and several on a busy machine."""
SILENT_SECONDS = 0.5
"""One that prints other lines so long after it has, too: a rank that ends says nothing more."""
LAST_LINES = 60
"""Lines of a rank that are kept for the report of its failure."""
SHOWN_LINES = 15
"""Of them, what is shown where there is no traceback that says more."""
MOST_NAMED = 4
"""Ranks that failed after the first one and are named; of a hundred nobody reads all."""

_TRACEBACK = re.compile(r"Traceback \(most recent call last\)|Fatal Python error|terminate called")
_CONSEQUENCE = re.compile(
    r"Connection (closed|reset) by peer|Connection refused|Broken pipe|Connection was likely closed"
    r"|ncclRemoteError|remote process exited|Socket closed|failed to recv, got 0 bytes"
    r"|gloo/transport/\w+/(pair|unbound_buffer)|DistNetworkError|Timed out (initializing|waiting)"
)
"""How torch, Gloo and NCCL say that another rank has gone."""


@dataclass
class _Said:
    """What one rank has said last."""

    lines: collections.deque[str] = field(
        default_factory=lambda: collections.deque(maxlen=LAST_LINES)
    )
    held: list[str] = field(default_factory=list)
    """The newest traceback, and what came by standard error after it."""
    held_since: float | None = None
    ended: float | None = None


class Memory:
    """The last words of every rank."""

    def __init__(self) -> None:
        self._said: dict[int, _Said] = collections.defaultdict(_Said)

    def hear(self, rank: int, text: str, is_error: bool) -> None:
        """A line that a rank has printed."""
        said = self._said[rank]
        said.lines.append(text)
        if is_error and said.held_since is None and _TRACEBACK.search(text):
            said.held_since = time.monotonic()
        if is_error and said.held_since is not None:
            said.held.append(text)
            return
        if said.held_since is not None and time.monotonic() - said.held_since > SILENT_SECONDS:
            self._let_go(rank, said)
        self.pass_on(rank, text, is_error)

    def pass_on(self, rank: int, text: str, is_error: bool) -> None:
        """What is done with a line that belongs to no failure."""

    def look(self) -> None:
        """Let go of what was held back of ranks that live on."""
        now = time.monotonic()
        for rank, said in self._said.items():
            lives = said.held_since is not None and now - said.held_since > HELD_SECONDS
            if lives and said.ended is None:
                self._let_go(rank, said)

    def let_go(self) -> None:
        """All ranks have ended well."""
        for rank, said in self._said.items():
            self._let_go(rank, said)

    def _let_go(self, rank: int, said: _Said) -> None:
        held, said.held, said.held_since = said.held, [], None
        for text in held:
            self.pass_on(rank, text, True)

    def note_end(self, end: RankExit) -> None:
        """A rank has ended; one that did so well has only printed its tracebacks."""
        said = self._said[end.rank]
        said.ended = said.ended or time.monotonic()
        if end.code == 0:
            self._let_go(end.rank, said)

    def is_consequence(self, rank: int) -> bool:
        """Whether what a rank said last speaks of another that has gone."""
        last = [line for line in self.last_lines(rank) if line.strip()]
        return any(_CONSEQUENCE.search(line) for line in last[-3:])

    def first_sign(self, rank: int) -> float:
        """When its traceback came, or else its end."""
        said = self._said[rank]
        return said.held_since or said.ended or time.monotonic()

    def last_lines(self, rank: int) -> list[str]:
        """What a report of its failure shows."""
        said = self._said[rank]
        return said.held[-LAST_LINES:] or [*said.lines][-SHOWN_LINES:]


class Screen(Memory):
    """Shows lines of all ranks."""

    def __init__(self, show: Callable[[str, bool], None]) -> None:
        """`show`: prints a line, by standard error where that is true."""
        super().__init__()
        self._show = show
        self.hosts: dict[int, str] = {}
        """Of the ranks, where there are several."""
        self._is_over = False

    def name(self, rank: int) -> str:
        """A rank as the lines call it."""
        host = self.hosts.get(rank)
        return f"{host} rank {rank}" if host else f"rank {rank}"

    def pass_on(self, rank: int, text: str, is_error: bool) -> None:
        if not self._is_over:
            self._show(f"[{self.name(rank)}] {printable(text)}", is_error)

    def note_end(self, end: RankExit) -> None:
        super().note_end(end)
        # Whatever the others print from now on follows from it.
        self._is_over = self._is_over or end.has_failed

    def first(self, failed: Collection[RankExit]) -> RankExit:
        """The cause among several failures: who does not speak of another's end, the earliest."""
        return min(
            failed, key=lambda end: (self.is_consequence(end.rank), self.first_sign(end.rank))
        )

    def report(self, first: RankExit, others: Collection[RankExit]) -> list[str]:
        """The first failure: who, how, and its last lines; then the others in a sentence."""
        lines = self.last_lines(first.rank)
        head = f"{self.name(first.rank)} failed first: it {first.how} after"
        head += f" {duration(first.seconds)}"
        shown = "".join(f"\n    {printable(line)}" for line in lines)
        found = [f"{head}; its last lines:{shown}" if lines else f"{head}, without a word"]
        rest = sorted((end for end in others if end.rank != first.rank), key=lambda end: end.rank)
        own = [end for end in rest if end.has_failed]
        told = [end for end in rest if end.ended_by_us]
        parts = [f"{self.name(end.rank)} {end.how}" for end in own[:MOST_NAMED]]
        if len(own) > MOST_NAMED:
            parts.append(f"{len(own) - MOST_NAMED} more failed")
        if told:
            parts.append(f"{len(told)} more had to be ended")
        return [*found, *([f"then {'; '.join(parts)}"] if parts else [])]
