"""Time limits: who waited for whom, and what happens when nobody came."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mpi4py import MPI

from paceline.errors import DeadlineError

# Past a deadline a thread that sits inside MPI cannot be called back. A waiter outside gives up
# after WAITER_GRACE; when there is none, the watchdog ends the process after WATCHDOG_GRACE.
WAITER_GRACE = 2.0
WATCHDOG_GRACE = 10.0

_SPINS = 500
_FIRST_SLEEP = 50e-6
_LONGEST_SLEEP = 1e-3


@dataclass(frozen=True)
class GroupPlace:
    """Where a rank stands: its group, and the group's ranks in the world."""

    group: str
    rank: int
    world_ranks: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.world_ranks)

    def world(self, ranks: Iterable[int]) -> str:
        """Ranks of the group as a sentence names them.

        >>> GroupPlace("default", 0, (4, 5, 6)).world([1, 2])
        'ranks 5, 6'
        """
        names = [str(self.world_ranks[rank]) for rank in ranks]
        return f"rank{'s' if len(names) != 1 else ''} {', '.join(names)}"

    def __str__(self) -> str:
        inside = "" if self.group in ("", "0", "default") else f" (group {self.group!r})"
        return f"rank {self.world_ranks[self.rank]}{inside}"


class Deadline:
    """The moment by which one operation has to be finished."""

    __slots__ = ("end", "operation", "place", "seconds", "spins")

    def __init__(
        self, operation: str, place: GroupPlace, seconds: float, *, background: bool = False
    ) -> None:
        self.operation = operation
        # A thread that spins in the background takes the interpreter from the computation.
        self.spins = 0 if background else _SPINS
        self.place = place
        self.seconds = seconds
        self.end = time.monotonic() + seconds

    def passed(self, grace: float = 0.0) -> bool:
        """Whether the time is over, `grace` seconds included."""
        return time.monotonic() > self.end + grace

    def error(self, missing: Sequence[int] = ()) -> DeadlineError:
        """The exception for this operation; `missing` are ranks of the group."""
        waited = f"waiting for {self.place.world(missing)}" if missing else "inside MPI"
        return DeadlineError(
            f"{self.operation} on {self.place} timed out after {self.seconds:g} s {waited}: "
            "such a rank has ended, hangs or is in another operation; if it is only slow, "
            "give init_process_group a longer timeout"
        )


class Patience:
    """Wait for others: look often at first, then sleep longer and longer.

    A rank that waits must not take the core that the awaited rank computes on.
    """

    __slots__ = ("_deadline", "_longest", "_sleep", "_spins")

    def __init__(self, deadline: Deadline, *, longest: float = _LONGEST_SLEEP) -> None:
        self._deadline = deadline
        self._spins = deadline.spins
        self._sleep = _FIRST_SLEEP
        self._longest = longest

    def pause(self) -> bool:
        """Wait a moment; False when the deadline has passed."""
        if self._spins > 0:
            self._spins -= 1
            os.sched_yield()
            return True
        time.sleep(self._sleep)
        self._sleep = min(self._sleep * 1.5, self._longest)
        return not self._deadline.passed()

    def reset(self) -> None:
        """Something moved: sleep briefly again."""
        self._sleep = _FIRST_SLEEP


class Watchdog:
    """Ends the process when a blocking MPI call outlives its deadline by far."""

    def __init__(self) -> None:
        self._watched: dict[int, Deadline] = {}
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def enter(self, deadline: Deadline) -> None:
        self._watched[id(deadline)] = deadline
        if self._thread is None:
            self._start()

    def leave(self, deadline: Deadline) -> None:
        self._watched.pop(id(deadline), None)

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._watch, name="paceline-mpi-watchdog", daemon=True
                )
                self._thread.start()

    def _watch(self) -> None:
        while True:
            time.sleep(1.0)
            for deadline in list(self._watched.values()):
                if deadline.passed(WATCHDOG_GRACE):
                    print(f"paceline: {deadline.error()}", file=sys.stderr, flush=True)
                    MPI.COMM_WORLD.Abort(1)


WATCHDOG = Watchdog()


class _Exit:
    """Decides at exit whether MPI can still be finalised by all ranks together."""

    def __init__(self) -> None:
        self.broken = False
        self.open_groups = 0
        self._registered = False

    def register(self) -> None:
        if not self._registered:
            self._registered = True
            atexit.register(self._leave)

    def _leave(self) -> None:
        # MPI_Finalize waits for every rank. After a failure the others are not coming (or wait
        # for us in a collective), so that only Abort ends the job.
        raised = self.open_groups > 0 and getattr(sys, "last_value", None) is not None
        if (self.broken or raised) and MPI.Is_initialized() and not MPI.Is_finalized():
            sys.stdout.flush()
            sys.stderr.flush()
            MPI.COMM_WORLD.Abort(1)


EXIT = _Exit()


def end_process_at_exit() -> None:
    """Remember that MPI is no longer usable: leave through Abort instead of Finalize."""
    EXIT.broken = True
