"""Shared memory of the ranks of one node: heartbeats, barriers, small sums, one large arena.

Both parts are anonymous memory whose descriptors the launcher hands down, so
there is no file, no name and no port that a killed run could leave behind.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from paceline.errors import DeadlineError, WorkerError
from paceline.text import place_name

_PHASE_BYTES = 64
_SLOTS = 32
_HEADER = 8
# Its numbers: [0] stop_at, [1] abort, [2] bytes of the announcement, [3] leg_end, [4] save_at
_ANNOUNCEMENT_BYTES = 16384
_BEAT_SECONDS = 0.25
_YIELDS = 200  # looks for the others before the first sleep
_EVERYONE, _ACTIVE, _PARTS = 0, 3, 4  # columns that count barriers
_COLUMNS = 5


def anonymous_memory(name: str) -> int:
    """A descriptor of memory that has no name in any file system."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create(f"paceline-{name}")
    else:
        with tempfile.TemporaryFile(prefix="paceline-") as file:
            descriptor = os.dup(file.fileno())
    os.set_inheritable(descriptor, True)
    return descriptor


class Board:
    """What the ranks of one node know of each other at any moment.

    Every rank writes only its own row. `int64` rows: barriers of all ranks passed,
    update, heartbeat (ns), barriers of the active ranks passed, sums over parts of a batch.
    `float64` rows: slots for small sums. Bytes: what it is doing.

    Of all ranks, the first `ranks` are active; in a race the others stand by.
    """

    def __init__(self, descriptor: int, *, ranks: int, rank: int, deadline: float = 60.0) -> None:
        self.size = ranks
        self.ranks = ranks
        self.rank = rank
        self.deadline = deadline
        size = self._size(ranks)
        if os.fstat(descriptor).st_size < size:
            os.ftruncate(descriptor, size)
        self._memory = mmap.mmap(descriptor, size)
        integers = _HEADER + ranks * _COLUMNS
        self._header = np.frombuffer(self._memory, np.int64, _HEADER)
        self._rows = np.frombuffer(self._memory, np.int64, ranks * _COLUMNS, _HEADER * 8).reshape(
            ranks, _COLUMNS
        )
        self._slots = np.frombuffer(self._memory, np.float64, ranks * _SLOTS, integers * 8).reshape(
            ranks, _SLOTS
        )
        self._phases = np.frombuffer(
            self._memory, np.uint8, ranks * _PHASE_BYTES, (integers + ranks * _SLOTS) * 8
        ).reshape(ranks, _PHASE_BYTES)
        end = (integers + ranks * _SLOTS) * 8 + ranks * _PHASE_BYTES
        self._announcement = np.frombuffer(self._memory, np.uint8, _ANNOUNCEMENT_BYTES, end)
        self._longest_gap = 0.0
        self._last_barrier: float | None = None
        self.on_wait: Callable[[str, float, float, list[int]], None] | None = None
        """Told after every barrier: its name, when (perf_counter) and how long, who came last."""
        self._beating: threading.Thread | None = None
        self._quiet = threading.Event()

    @staticmethod
    def _size(ranks: int) -> int:
        rows = (_HEADER + ranks * _COLUMNS + ranks * _SLOTS) * 8 + ranks * _PHASE_BYTES
        return rows + _ANNOUNCEMENT_BYTES

    # --- who is where -------------------------------------------------------

    def enter(self, phase: str, update: int | None = None) -> None:
        """Say what this rank is doing, for the messages of the others."""
        text = phase.encode()[: _PHASE_BYTES - 1]
        row = self._phases[self.rank]
        row[: len(text)] = np.frombuffer(text, np.uint8)
        row[len(text)] = 0
        if update is not None:
            self._rows[self.rank, 1] = update

    def phase(self, rank: int) -> str:
        """What a rank last said it was doing."""
        return bytes(self._phases[rank]).split(b"\0", 1)[0].decode(errors="replace")

    def update(self, rank: int) -> int:
        """The update that a rank last said it was at."""
        return int(self._rows[rank, 1])

    def place(self, rank: int) -> str:
        """Where a rank is, in words."""
        return place_name(self.phase(rank), self.update(rank))

    def start_heartbeat(self) -> None:
        """Show from a thread of its own that this process runs at all."""
        self._rows[self.rank, 2] = time.monotonic_ns()

        def beat() -> None:
            while not self._quiet.wait(_BEAT_SECONDS):
                self._rows[self.rank, 2] = time.monotonic_ns()

        self._beating = threading.Thread(target=beat, name="paceline-heartbeat", daemon=True)
        self._beating.start()

    def heartbeat_age(self, rank: int) -> float | None:
        """Seconds since a rank's last heartbeat; None before its first."""
        beat = int(self._rows[rank, 2])
        return None if beat == 0 else (time.monotonic_ns() - beat) / 1e9

    # --- stopping together --------------------------------------------------

    def request_stop(self) -> None:
        """Ask all ranks to stop at the same update, one that none has begun yet."""
        if not self._header[0]:
            self._header[0] = int(self._rows[:, 1].max()) + 2

    def stop_at(self, update: int) -> None:
        """Make all ranks stop at an update that was agreed on elsewhere."""
        self._header[0] = update

    def should_stop(self, updates_done: int) -> bool:
        """True when this rank has reached the update at which all stop."""
        return bool(self._header[0]) and updates_done >= int(self._header[0])

    def shorten_leg(self) -> None:
        """End the leg at an update that no rank has begun yet."""
        self.end_leg_at(int(self._rows[:, 1].max()) + 2)

    def end_leg_at(self, update: int) -> None:
        """End the leg at an update that was agreed on elsewhere."""
        self._header[3] = update

    @property
    def leg_end(self) -> int | None:
        """The update at which the leg ends before its time, if it does."""
        return int(self._header[3]) or None

    def request_save(self) -> None:
        """Ask all ranks to save after the same update, one that none has begun yet."""
        self.save_after(int(self._rows[:, 1].max()) + 2)

    def save_after(self, update: int) -> None:
        """Make all ranks save after an update that was agreed on elsewhere."""
        self._header[4] = update

    @property
    def save_at(self) -> int | None:
        """The update after which all ranks save, if they were asked to."""
        return int(self._header[4]) or None

    # --- agreeing -----------------------------------------------------------

    def barrier(
        self,
        name: str,
        members: Sequence[int] | None = None,
        *,
        column: int = _ACTIVE,
        patient: bool = False,
    ) -> None:
        """Wait until every member (by default: every active rank) has arrived as often as this.

        `patient`: without a deadline, for ranks that stand by while another works.
        """
        group = list(range(self.ranks)) if members is None else list(members)
        if len(group) == 1:
            return
        now = time.monotonic()
        if not patient and self._last_barrier is not None:
            self._longest_gap = max(self._longest_gap, now - self._last_barrier)
        limit = max(self.deadline, 10 * self._longest_gap)
        target = int(self._rows[self.rank, column]) + 1
        self._rows[self.rank, column] = target
        arrivals = self._rows[:, column]
        spins = 0
        late: list[int] = []
        began = time.perf_counter()
        while missing := [member for member in group if arrivals[member] < target]:
            late = missing
            spins += 1
            # Yielding answers within microseconds while peers are about to arrive;
            # after that, sleeping leaves the core to them.
            if spins < _YIELDS:
                os.sched_yield()
                continue
            # Longer and longer; who stands by while another works must not cost it its core.
            looks = spins - _YIELDS
            longer = 2.0 ** min(looks, 20) if patient else 1 + looks / 1000
            time.sleep(min(0.03 if patient else 0.002, 0.0001 * longer))
            if not patient and spins % 100 == 0 and time.monotonic() - now > limit:
                self._raise_deadline(name, [r for r in group if arrivals[r] < target], limit)
            if self._header[1]:
                raise WorkerError("another rank failed")
        self._last_barrier = time.monotonic()
        if late and self.on_wait is not None:
            self.on_wait(name, began, time.perf_counter() - began, late)

    def begin_parts(self) -> None:
        """Before `wait_for_parts` is used by new groups; every active rank calls it."""
        self.barrier("the groups of BatchNorm")
        self._rows[self.rank, _PARTS] = 0
        self.barrier("the groups of BatchNorm")

    def wait_for_parts(self, members: Sequence[int]) -> None:
        """Wait for those that add up statistics; counted apart, since not all ranks do."""
        self.barrier("the statistics of BatchNorm", members, column=_PARTS)

    def _raise_deadline(self, name: str, late: list[int], limit: float) -> None:
        places = ", ".join(f"rank {rank} (in {self.place(rank)})" for rank in late)
        raise DeadlineError(
            f"rank {self.rank} waited {limit:.0f} s in {name!r} of update {self.update(self.rank)}"
            f" for {places}: it hangs or is far slower; raise train.deadline if it only needs time"
        )

    def abort(self) -> None:
        """Tell every rank that waits to give up."""
        self._header[1] = 1

    def sum(self, values: Sequence[float], name: str = "sum") -> list[float]:
        """Element by element over all ranks, in rank order, the same result everywhere."""
        if len(values) > _SLOTS:
            raise ValueError(f"{len(values)} values do not fit into {_SLOTS} slots")
        self._slots[self.rank, : len(values)] = values
        self.barrier(name)
        total = self._slots[: self.ranks, : len(values)].sum(axis=0)
        self.barrier(name)
        return [float(value) for value in total]

    def announce(self, text: str | None = None) -> str:
        """The first rank's text, on every rank; the others stand by until it comes."""
        if self.rank == 0:
            data = (text or "").encode()
            if len(data) > _ANNOUNCEMENT_BYTES:
                raise ValueError(f"{len(data)} bytes do not fit into {_ANNOUNCEMENT_BYTES}")
            self._announcement[: len(data)] = np.frombuffer(data, np.uint8)
            self._header[2] = len(data)
        everyone = range(self.size)
        self.barrier("announcement", everyone, column=_EVERYONE, patient=True)
        result = bytes(self._announcement[: int(self._header[2])]).decode()
        self.barrier("announcement", everyone, column=_EVERYONE)
        return result

    def close(self) -> None:
        """Stop the heartbeat."""
        self._quiet.set()
        if self._beating is not None:
            self._beating.join()


def own_board(deadline: float) -> Board:
    """The board of a process that is its node's only rank, with its heartbeat to be started."""
    descriptor = anonymous_memory("board")
    try:
        return Board(descriptor, ranks=1, rank=0, deadline=deadline)
    finally:
        os.close(descriptor)


class Arena:
    """Large blocks of shared memory, sized by the first rank once the model is known."""

    def __init__(self, descriptor: int, board: Board) -> None:
        self._descriptor = descriptor
        self._board = board

    def allocate(self, size: int) -> Any:
        """A block of `size` bytes beside those there are, the same memory on every active rank."""
        size = -(-max(size, 1) // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        if self._board.rank == 0:
            os.ftruncate(self._descriptor, os.fstat(self._descriptor).st_size + size)
        self._board.barrier("allocate")
        start = os.fstat(self._descriptor).st_size - size
        memory = mmap.mmap(self._descriptor, size, offset=start)
        self._board.barrier("map")
        return memory

    def clear(self) -> None:
        """Give all blocks back; whoever has one must not touch it again."""
        if self._board.rank == 0:
            os.ftruncate(self._descriptor, 0)
