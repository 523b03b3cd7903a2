"""Collectives inside one machine: wait until all ranks are there, then call MPI and block.

MPI's blocking collectives through shared memory are several times faster than its non-blocking
ones, which is why the waiting is done beforehand (see `arrival`). All tensors here are flat,
contiguous and on the CPU; counts are in elements.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from mpi4py import MPI

from paceline.backends.mpi.arrival import ArrivalBoard
from paceline.backends.mpi.deadline import WATCHDOG, Deadline
from paceline.backends.mpi.dtypes import Reduction, buffer, move
from paceline.backends.mpi.pool import SharedPool

# Larger all-reduces go in pieces that stay in the cache between MPI's steps: twice as fast at
# 64 MB and above (docs/decisions/0003-mpi-backend.md).
_CHUNK_BYTES = 1 << 20
_CHUNK_FROM_BYTES = 8 << 20
_POOL_FROM_BYTES = 1 << 18
"""From here on the shared pool is faster than MPI where there is one."""


def _vector(flat: torch.Tensor, counts: Sequence[int]) -> list[Any]:
    """Pieces of these sizes, one after the other, as MPI wants them: with where each starts."""
    memory, _, datatype = buffer(flat)
    starts = list(itertools.accumulate(counts, initial=0))[:-1]
    return [memory, (list(counts), starts), datatype]


class NodeTransport:
    """Blocking MPI behind a board on which everyone has arrived."""

    def __init__(self, comm: Any, board: ArrivalBoard, pool: SharedPool | None = None) -> None:
        self._comm = comm
        self._board = board
        self._pool = pool
        self._rank: int = comm.Get_rank()
        self._size: int = comm.Get_size()

    def _together(
        self, deadline: Deadline, operation: str, call: Callable[[], None], same: int = 0
    ) -> None:
        self._board.arrive(deadline, operation, same)
        WATCHDOG.enter(deadline)
        try:
            call()
        finally:
            WATCHDOG.leave(deadline)

    def all_reduce(self, flat: torch.Tensor, how: Reduction, deadline: Deadline) -> None:
        """Reduce `flat` over all ranks, in place."""

        def call() -> None:
            if self._size == 1 or flat.numel() == 0:
                return
            pool = self._pool if flat.nbytes >= _POOL_FROM_BYTES and not how.through else None
            if pool is not None and pool.takes(flat, how.operation):
                pool.all_reduce(flat, how.operation, deadline)
                return
            for piece in self._pieces(flat, how):
                self._reduce_piece(piece, how, None)

        self._together(deadline, "all_reduce", call, flat.numel() * flat.element_size())
        how.finish(flat, self._size)

    def reduce(self, flat: torch.Tensor, how: Reduction, root: int, deadline: Deadline) -> None:
        """Reduce `flat` into the root's; the others' stays as it is."""

        def call() -> None:
            if self._size > 1 and flat.numel():
                for piece in self._pieces(flat, how):
                    self._reduce_piece(piece, how, root)

        self._together(deadline, "reduce", call, flat.numel() * flat.element_size())
        if self._rank == root:
            how.finish(flat, self._size)

    def _pieces(self, flat: torch.Tensor, how: Reduction) -> Sequence[torch.Tensor]:
        width = 4 if how.through else flat.element_size()
        if flat.numel() * width < _CHUNK_FROM_BYTES:
            return (flat,)
        return torch.split(flat, _CHUNK_BYTES // width)

    def _reduce_piece(self, piece: torch.Tensor, how: Reduction, root: int | None) -> None:
        wide = piece
        if how.through is not None:
            wide = torch.empty(piece.numel(), dtype=how.through)
            move(wide, piece)
        memory = buffer(wide, how.datatype)
        if root is None:
            self._comm.Allreduce(MPI.IN_PLACE, memory, op=how.operation)
        elif root == self._rank:
            self._comm.Reduce(MPI.IN_PLACE, memory, op=how.operation, root=root)
        else:
            self._comm.Reduce(memory, None, op=how.operation, root=root)
        if wide is not piece and root in (None, self._rank):
            move(piece, wide)

    def reduce_scatter(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        counts: Sequence[int],
        how: Reduction,
        deadline: Deadline,
    ) -> None:
        """Reduce `source`, cut into `counts`, and keep this rank's piece in `output`."""

        def call() -> None:
            given, kept = source, output
            if how.through is not None:
                given = torch.empty(source.numel(), dtype=how.through)
                kept = torch.empty(output.numel(), dtype=how.through)
                move(given, source)
            self._comm.Reduce_scatter(
                buffer(given, how.datatype),
                buffer(kept, how.datatype),
                recvcounts=list(counts),
                op=how.operation,
            )
            if kept is not output:
                move(output, kept)

        self._together(deadline, "reduce_scatter", call, source.numel() * source.element_size())
        how.finish(output, self._size)

    def broadcast(self, flat: torch.Tensor, root: int, deadline: Deadline) -> None:
        self._together(
            deadline,
            "broadcast",
            lambda: self._comm.Bcast(buffer(flat), root=root),
            flat.numel() * flat.element_size(),
        )

    def all_gather(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        counts: Sequence[int],
        deadline: Deadline,
    ) -> None:
        """Every rank's `source`, one after the other, in `output`."""

        def call() -> None:
            if len(set(counts)) == 1:
                memory, _, datatype = buffer(output)
                # mpi4py counts what comes from one rank.
                self._comm.Allgather(buffer(source), [memory, source.numel(), datatype])
            else:
                self._comm.Allgatherv(buffer(source), _vector(output, counts))

        self._together(deadline, "all_gather", call)

    def all_to_all(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_counts: Sequence[int],
        source_counts: Sequence[int],
        deadline: Deadline,
    ) -> None:
        """Piece i of `source` goes to rank i; piece i of `output` comes from it."""
        self._together(
            deadline,
            "all_to_all",
            lambda: self._comm.Alltoallv(
                _vector(source, source_counts), _vector(output, output_counts)
            ),
        )

    def gather(
        self,
        output: torch.Tensor | None,
        source: torch.Tensor,
        counts: Sequence[int],
        root: int,
        deadline: Deadline,
    ) -> None:
        """Every rank's `source`, one after the other, in the root's `output`."""
        target = None if output is None else _vector(output, counts)
        self._together(
            deadline, "gather", lambda: self._comm.Gatherv(buffer(source), target, root=root)
        )

    def scatter(
        self,
        output: torch.Tensor,
        source: torch.Tensor | None,
        counts: Sequence[int],
        root: int,
        deadline: Deadline,
    ) -> None:
        """Piece i of the root's `source` in the `output` of rank i."""
        given = None if source is None else _vector(source, counts)
        self._together(
            deadline, "scatter", lambda: self._comm.Scatterv(given, buffer(output), root=root)
        )

    def barrier(self, deadline: Deadline) -> None:
        self._board.arrive(deadline, "barrier")

    def close(self) -> None:
        """Give the shared memory back."""
        if self._pool is not None:
            self._pool.close()
        self._board.close()
