"""The shared page on which the ranks of one machine say that they are there.

A blocking MPI collective that a rank never joins can neither be left nor be timed out, and while it
waits it takes a whole core. So every collective first waits here, asleep after a moment, and enters
MPI when all ranks have come: what is left takes no longer than the bytes need. And when a deadline
passes, the page says who is missing.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from paceline.backends.mpi.deadline import Deadline, Patience
from paceline.backends.mpi.wire import all_agree, share_text
from paceline.errors import RunError

__all__ = ["ArrivalBoard", "shared_board"]

# One line of the cache per rank: the counter, and beside it what the rank has come for, in two
# words used by turns. A rank can be one collective ahead of another, never two.
_WORDS_PER_LINE = 8
_OPERATIONS = (
    "",
    "all_reduce",
    "reduce",
    "reduce_scatter",
    "broadcast",
    "all_gather",
    "all_to_all",
    "gather",
    "scatter",
    "barrier",
)
_SIZE_BITS = 48
_SETTLE_SECONDS = 0.01


class ArrivalBoard:
    """One counter per rank in shared memory: how many collectives it has come to."""

    def __init__(self, page: mmap.mmap, rank: int, size: int) -> None:
        self._page = page
        self._counters = memoryview(page).cast("q")
        self._rank = rank
        self._size = size
        self._sequence = 0

    def arrive(self, deadline: Deadline, operation: str, size: int = 0) -> None:
        """Say that this rank is here, and for what, and wait until every other one is.

        `size` in bytes is given where it must be the same on every rank.
        """
        self._sequence += 1
        sequence = self._sequence
        counters = self._counters
        mine = self._rank * _WORDS_PER_LINE
        turn = 1 + sequence % 2
        purpose = (_OPERATIONS.index(operation) << _SIZE_BITS) + size
        counters[mine + turn] = purpose
        counters[mine] = sequence
        patience: Patience | None = None
        for rank in range(self._size):
            slot = rank * _WORDS_PER_LINE
            while counters[slot] < sequence:
                patience = patience or Patience(deadline)
                if not patience.pause():
                    raise deadline.error(self.missing())
            if counters[slot + turn] != purpose:
                # Where memory is weakly ordered the counter may be seen before the purpose.
                time.sleep(_SETTLE_SECONDS)
            if counters[slot + turn] != purpose:
                raise self._mismatch(deadline, rank, purpose, counters[slot + turn])

    @staticmethod
    def _mismatch(deadline: Deadline, rank: int, mine: int, theirs: int) -> RunError:
        def words(purpose: int) -> str:
            operation, size = divmod(purpose, 1 << _SIZE_BITS)
            return _OPERATIONS[operation] + (f" of {size} bytes" if size else "")

        place = deadline.place
        return RunError(
            f"ranks call different collectives: {place} is in {words(mine)}, but "
            f"{place.world([rank])} is in {words(theirs)}; every rank must call the same, in the "
            "same order"
        )

    def missing(self) -> list[int]:
        """The ranks that have not come to the current collective."""
        return [
            rank
            for rank in range(self._size)
            if self._counters[rank * _WORDS_PER_LINE] < self._sequence
        ]

    def close(self) -> None:
        """Give the memory back."""
        self._counters.release()
        self._page.close()


def shared_board(comm: Any) -> ArrivalBoard | None:
    """A board for all ranks of `comm`, or None when they do not share memory after all.

    The file is gone from the directory before this returns, so nothing can be left behind.
    """
    size = comm.Get_size()
    length = max(size * _WORDS_PER_LINE * 8, mmap.PAGESIZE)
    path = ""
    if comm.Get_rank() == 0:
        directory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        with contextlib.suppress(OSError):
            descriptor, path = tempfile.mkstemp(prefix="paceline-mpi-", dir=directory)
            os.ftruncate(descriptor, length)
            os.close(descriptor)
    path = share_text(comm, path)
    page = _map(path, length) if path else None
    everyone = all_agree(comm, page is not None)
    if comm.Get_rank() == 0 and path:
        Path(path).unlink(missing_ok=True)
    if not everyone:
        if page is not None:
            page.close()
        return None
    assert page is not None
    return ArrivalBoard(page, comm.Get_rank(), size)


def _map(path: str, length: int) -> mmap.mmap | None:
    try:
        with Path(path).open("r+b") as file:
            return mmap.mmap(file.fileno(), length)
    except OSError:
        return None
