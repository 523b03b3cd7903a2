"""Says who is missing when a collective is overdue, and what that rank is doing, in time.

Each rank has a watch: a thread that looks, about twice a second, whether the rank is still at
the same place as before. When it has been there for far longer than an update takes, it leaves
word for the others: where it is, since when, whether it waits itself, and the stack of the
training thread. So the one that is waited for tells without being asked, and no signal is sent.
A rank that waits then reads what the others said: who has not arrived is who does not wait, or
waits at an earlier update, or gives no sign at all. This happens before the collective's own
deadline, which ends the run.
"""

from __future__ import annotations

import collections
import socket
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final

from paceline.observe.mailbox import Posts
from paceline.observe.recorder import Recorder, Say
from paceline.schema import RankContext
from paceline.text import listed

Place = tuple[str, int]
"""What a rank is doing, and at which update."""

_STACK_DEPTH: Final = 8
FRAMES_THAT_WAIT: Final = (
    ("paceline/local/board.py", "barrier", ""),
    ("paceline/exchange/network.py", "wait", ""),
    ("paceline/exchange/turns.py", "wait", "the sum of gradients"),
    ("paceline/exchange/servers/client.py", "", ""),
    ("paceline/backends/mpi/work.py", "wait", ""),
    ("torch/distributed/distributed_c10d.py", "", ""),
)
"""Code that does nothing but wait for other ranks: the end of its file's name, its function (any
where empty), and what it waits in (where empty: as it says itself, or the function's name)."""


@dataclass(frozen=True, kw_only=True)
class StallSettings:
    """When a collective is overdue."""

    deadline: float = 60.0
    """`train.deadline`: what ends the run. A stall is reported at half of it at the latest."""
    factor: float = 10.0
    """Overdue is what takes this many times the median update..."""
    least: float = 5.0
    """...but no less than this many seconds: a pause is not a stall."""
    tick: float = 0.5
    """Seconds between two looks."""

    def limit(self, update_seconds: float | None) -> float:
        """Seconds at one place that are too many.

        >>> StallSettings().limit(0.01), StallSettings().limit(1.0), StallSettings().limit(9.0)
        (5.0, 10.0, 30.0)
        """
        latest = self.deadline / 2
        if update_seconds is None:  # the first update may compile, allocate, read
            return latest
        return min(max(self.least, self.factor * update_seconds), latest)


_LONG_PHASES: Final = ("evaluate", "checkpoint", "proof", "start-up", "")
"""Phases whose length says nothing about a stall: only half of the deadline does."""


class RankProgress:
    """Where a rank is, how long already, and how long an update takes; seen from outside."""

    def __init__(self, now: float) -> None:
        self.place: Place = ("start-up", -1)
        self.since = now
        self._update_since: float | None = None
        self._durations: collections.deque[float] = collections.deque(maxlen=64)

    def see(self, place: Place, now: float) -> bool:
        """Note the current place; True when it is a new one."""
        if place == self.place:
            return False
        updates = place[1] - self.place[1]
        if updates > 0:
            if self._update_since is not None:
                self._durations.append((now - self._update_since) / updates)
            self._update_since = now
        self.place, self.since = place, now
        return True

    @property
    def update_seconds(self) -> float | None:
        """Median of the last updates; None while there are too few."""
        return statistics.median(self._durations) if len(self._durations) >= 3 else None


class StallWatch:
    """One rank's watch. It must be made in the thread that trains.

    `place` says where this rank is; with a board, `board_place(board)`. Without one, call
    `enter` and leave `place` out.
    """

    def __init__(
        self,
        context: RankContext,
        posts: Posts,
        *,
        place: Callable[[], Place] | None = None,
        recorder: Recorder | None = None,
        settings: StallSettings | None = None,
        say: Say = print,
    ) -> None:
        self.context, self.posts = context, posts
        self.settings = settings or StallSettings()
        self._place = place or (lambda: self._entered)
        self._recorder, self._say = recorder or Recorder(), say
        self._entered: Place = ("start-up", -1)
        self._waiting: str | None = None
        self._trainer = threading.get_ident()
        self._host = socket.gethostname()
        self._progress = RankProgress(time.monotonic())
        self._reported: float | None = None  # how old the stall was when it was last spoken of
        self._overdue = False
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self.posts.post(context.rank, self._word(None))

    # --- called by the training thread ---------------------------------------

    def enter(self, phase: str, update: int) -> None:
        """Say where this rank is."""
        self._entered = (phase, update)

    @contextmanager
    def waiting(self, operation: str) -> Iterator[None]:
        """Around a collective that the watch cannot see in the stack, such as an exchange."""
        self._waiting = operation
        try:
            yield
        finally:
            self._waiting = None

    def start(self) -> StallWatch:
        """Begin to look; a rank that is alone has nobody to wait for."""
        if self.context.world_size > 1 and self._thread is None:
            self._thread = threading.Thread(target=self._work, name="paceline-watch", daemon=True)
            self._thread.start()
        return self

    def close(self) -> None:
        self._closing.set()
        if self._thread is not None:
            self._thread.join()

    def __enter__(self) -> StallWatch:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- the thread that looks -----------------------------------------------

    def _work(self) -> None:
        while not self._closing.wait(self.settings.tick):
            self.look(time.monotonic())

    def look(self, now: float) -> str | None:
        """One look; what was found to report, if anything."""
        progress = self._progress
        before, age = progress.place, now - progress.since
        if progress.see(self._place(), now):
            if self._overdue:
                self._over(before, age)
            return None
        usual = None if before[0] in _LONG_PHASES else progress.update_seconds
        limit = self.settings.limit(usual)
        if age <= limit:
            return None
        state = self._state(age)
        self._overdue = True
        self.posts.post(self.context.rank, self._word(state))
        # Others notice at about the same time: they get two more looks to leave word.
        patience = limit + 2 * self.settings.tick
        if state["operation"] is None or age < (2 * self._reported if self._reported else patience):
            return None
        self._reported = age
        return self._report(state)

    def _over(self, place: Place, age: float) -> None:
        self._overdue = False
        self.posts.post(self.context.rank, self._word(None))
        if self._reported is not None:
            self._reported = None
            self._recorder.note(
                "stall over", f"update {place[1]} went on after about {age:.1f} s", ()
            )

    def _word(self, state: dict[str, Any] | None) -> dict[str, Any]:
        return {"rank": self.context.rank, "host": self._host, "time": time.time(), "state": state}

    def _state(self, age: float) -> dict[str, Any]:
        frame = sys._current_frames().get(self._trainer)
        phase, update = self._progress.place
        return {
            "phase": phase,
            "update": update,
            "operation": self._waiting or (waits_in(frame) if frame is not None else None),
            "seconds": age,
            "stack": describe(frame) if frame is not None else "",
        }

    def _report(self, own: dict[str, Any]) -> str | None:
        words = {
            rank: self.posts.read(rank) or {}
            for rank in range(self.context.world_size)
            if rank != self.context.rank
        }
        words[self.context.rank] = self._word(own)
        found = Stall(own=own, words=words, deadline=self.settings.deadline)
        text = found.text(self._progress.update_seconds)
        self._recorder.note("stall", text, ranks=found.missing)
        # One of those who wait speaks for all.
        if self.context.rank == min(found.arrived):
            self._say(text)
        return text


@dataclass(frozen=True, kw_only=True)
class Stall:
    """What all ranks said of themselves when one of them found itself waiting too long."""

    own: dict[str, Any]
    words: dict[int, dict[str, Any]]
    deadline: float

    @property
    def arrived(self) -> list[int]:
        """The ranks that wait where the asking one does."""
        return [r for r in sorted(self.words) if self._arrived(self.words[r].get("state"))]

    def _arrived(self, state: dict[str, Any] | None) -> bool:
        return (
            state is not None
            and state.get("operation") is not None
            and state["update"] >= self.own["update"]
        )

    @property
    def missing(self) -> list[int]:
        """The ranks that have not arrived."""
        return [rank for rank in sorted(self.words) if rank not in self.arrived]

    def text(self, update_seconds: float | None) -> str:
        """The report, for people."""
        own = self.own
        usual = f" (an update usually takes {update_seconds:.3g} s)" if update_seconds else ""
        head = (
            f"stall: {ranks_in_words(self.arrived)} waited {own['seconds']:.0f} s in"
            f" {own['operation']!r} of update {own['update']}{usual}"
        )
        left = max(self.deadline - own["seconds"], 0.0)
        end = f"the wait is given up after another {left:.0f} s if nothing changes (train.deadline)"
        if not self.missing:
            places = ", ".join(
                f"rank {rank} on host {self.words[rank].get('host')}" for rank in self.arrived
            )
            return f"{head}, and all have arrived ({places}): the network is cut or stuck; {end}"
        lines = [f"{head} for:"]
        for rank in self.missing:
            lines += self._describe(rank)
        return "\n".join([*lines, end])

    def _describe(self, rank: int) -> list[str]:
        word = self.words[rank]
        name = f"  rank {rank} on host {word['host']}" if "host" in word else f"  rank {rank}"
        state = word.get("state")
        if state is None:
            return [f"{name}, which gives no sign: stopped, cut off, or only just moving on"]
        doing = (
            f"waits in {state['operation']!r}"
            if state.get("operation")
            else f"is in {state['phase'] or 'start-up'!r}"
        )
        return [
            f"{name}, which {doing} of update {state['update']} since {state['seconds']:.0f} s:",
            *(f"    {line}" for line in str(state["stack"]).splitlines()),
        ]


def ranks_in_words(ranks: Sequence[int]) -> str:
    """
    >>> ranks_in_words([2]), ranks_in_words([0, 1, 3])
    ('rank 2 has', 'ranks 0, 1 and 3 have')
    """
    names = listed([str(rank) for rank in ranks])
    return f"rank {names} has" if len(ranks) == 1 else f"ranks {names} have"


def board_place(board: Any) -> Callable[[], Place]:
    """This rank's place as it says it on its node's board."""
    return lambda: (board.phase(board.rank), board.update(board.rank))


def describe(frame: FrameType) -> str:
    calls = traceback.extract_stack(frame)[-_STACK_DEPTH:]
    return "".join(traceback.format_list(calls)).rstrip()


def waits_in(frame: FrameType) -> str | None:
    """The operation in which a thread waits for other ranks; None when it does not."""
    found: str | None = None
    current: FrameType | None = frame
    for _ in range(_STACK_DEPTH):
        if current is None:
            break
        name, function = current.f_code.co_filename, current.f_code.co_name
        for file, wanted, operation in FRAMES_THAT_WAIT:
            if name.endswith(file) and wanted in ("", function):
                if said := operation or _said(current):
                    return said
                found = found or function
        current = current.f_back
    return found


def _said(frame: FrameType) -> str | None:
    """The name of the operation, where the code that waits in it has one."""
    name = frame.f_locals.get("name") or getattr(frame.f_locals.get("self"), "_operation", None)
    return name if isinstance(name, str) else None
