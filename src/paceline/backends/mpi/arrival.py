"""The shared page on which the ranks of one machine say that they are there.

A blocking MPI collective that a rank never joins can neither be left nor be timed out, and while it
waits it takes a whole core. So every collective first waits here, asleep after a moment, and enters
MPI when all ranks have come: what is left takes no longer than the bytes need. And when a deadline
passes, the page says who is missing.
"""

from __future__ import annotations

import mmap
import time
from typing import Any

from paceline.backends.mpi.deadline import Deadline, Patience
from paceline.backends.mpi.pool import map_together
from paceline.errors import RunError

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
_MEETINGS = 3  # the word of a line that counts meetings inside collectives
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

    def meet(self, deadline: Deadline) -> None:
        """Wait for the others in the middle of a collective that all have come to."""
        counters = self._counters
        mine = self._rank * _WORDS_PER_LINE + _MEETINGS
        counters[mine] += 1
        target = counters[mine]
        patience: Patience | None = None
        for rank in range(self._size):
            slot = rank * _WORDS_PER_LINE + _MEETINGS
            while counters[slot] < target:
                patience = patience or Patience(deadline)
                if not patience.pause():
                    raise deadline.error([rank])

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

    The file behind it is gone before this returns.
    """
    size = comm.Get_size()
    length = max(size * _WORDS_PER_LINE * 8, mmap.PAGESIZE)
    page = map_together(comm, length, "mpi")
    return None if page is None else ArrivalBoard(page, comm.Get_rank(), size)
