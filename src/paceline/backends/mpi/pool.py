"""All-reduce of large tensors by the ranks of one machine, in memory that they share.

Where ranks outnumber cores, MPI's own all-reduce of large messages can be slower than sockets:
its steps are a chain of waits between pairs, and each wait may find the other rank without a core.
Here every rank puts a piece into shared memory, adds up its own slice of everyone's, and takes the
whole result: two meetings per piece, and every byte is added once, in the order of ranks, so that
all get the same result to the last bit.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from mpi4py import MPI

from paceline.backends.mpi.wire import all_agree, share_text

if TYPE_CHECKING:
    from paceline.backends.mpi.arrival import ArrivalBoard
    from paceline.backends.mpi.deadline import Deadline

PIECE_BYTES = 1 << 20
_TYPES = {torch.float32: np.float32, torch.float64: np.float64}
_FUNCTIONS: list[tuple[Any, np.ufunc]] = [  # MPI's operations cannot be keys
    (MPI.SUM, np.add),
    (MPI.PROD, np.multiply),
    (MPI.MIN, np.minimum),
    (MPI.MAX, np.maximum),
]


def map_together(comm: Any, length: int, purpose: str) -> mmap.mmap | None:
    """Memory that all ranks of `comm` share, or None when they do not share any.

    The file is gone from the directory before this returns, so nothing can be left behind.
    """
    path = ""
    if comm.Get_rank() == 0:
        directory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        with contextlib.suppress(OSError):
            descriptor, path = tempfile.mkstemp(prefix=f"paceline-{purpose}-", dir=directory)
            try:
                # Taken now: a page that is missing later would end the process.
                os.posix_fallocate(descriptor, 0, length)
            except OSError:
                Path(path).unlink(missing_ok=True)
                path = ""
            os.close(descriptor)
    path = share_text(comm, path)
    page = _map(path, length) if path else None
    everyone = all_agree(comm, page is not None)
    if comm.Get_rank() == 0 and path:
        Path(path).unlink(missing_ok=True)
    if everyone:
        return page
    if page is not None:
        page.close()
    return None


def _map(path: str, length: int) -> mmap.mmap | None:
    try:
        with Path(path).open("r+b") as file:
            return mmap.mmap(file.fileno(), length)
    except OSError:
        return None


class SharedPool:
    """Room for two pieces of every rank and two results, used by turns."""

    def __init__(self, memory: mmap.mmap, board: ArrivalBoard, rank: int, size: int) -> None:
        self._memory, self._board, self._rank, self._size = memory, board, rank, size
        self._bytes = np.frombuffer(memory, dtype=np.uint8)

    @staticmethod
    def room(size: int) -> int:
        """Bytes of shared memory that `size` ranks need."""
        return 2 * (size + 1) * PIECE_BYTES

    def takes(self, flat: torch.Tensor, operation: Any) -> bool:
        """Whether this type and operation can be done here."""
        return flat.dtype in _TYPES and any(operation == known for known, _ in _FUNCTIONS)

    def all_reduce(self, flat: torch.Tensor, operation: Any, deadline: Deadline) -> None:
        """Reduce a contiguous vector over all ranks, in place."""
        values = flat.numpy()
        function = next(function for known, function in _FUNCTIONS if known == operation)
        width = flat.element_size()
        most = PIECE_BYTES // width
        for turn, start in enumerate(range(0, len(values), most)):
            part = values[start : start + most]
            rows = [self._row(turn, rank, part) for rank in range(self._size)]
            result = self._row(turn, self._size, part)
            np.copyto(rows[self._rank], part)
            self._board.meet(deadline)
            low = len(part) * self._rank // self._size
            high = len(part) * (self._rank + 1) // self._size
            own = result[low:high]
            function(rows[0][low:high], rows[1][low:high], out=own)
            for row in rows[2:]:
                function(own, row[low:high], out=own)
            self._board.meet(deadline)
            np.copyto(part, result)

    def _row(self, turn: int, number: int, like: np.ndarray) -> np.ndarray:
        start = (turn % 2 * (self._size + 1) + number) * PIECE_BYTES
        return self._bytes[start : start + like.nbytes].view(like.dtype)

    def close(self) -> None:
        """Give the memory back."""
        del self._bytes
        self._memory.close()
