"""Collectives between machines: every byte by non-blocking sends, asleep between tests.

A blocking MPI collective over a network spins on a core for as long as the wire needs, which is
what the computation would use. Here the thread posts sends and receives, and sleeps between tests.
Reductions are a scatter of pieces, a sum in the order of ranks (the same bits on every rank), and
a gather: each rank sends 2 (n-1)/n of the tensor, as a ring does, in two steps instead of 2 (n-1).
Large tensors go in blocks, several at a time, so that the wire is busy while a sum is computed.

All tensors here are flat, contiguous and on the CPU; counts are in elements.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from mpi4py import MPI

from paceline.backends.mpi.deadline import Deadline, Patience
from paceline.backends.mpi.dtypes import Reduction, buffer, move

# Below this many bytes everybody sends everything to everybody: one step.
_SMALL_BYTES = 16 << 10
_PIECE_BYTES = 512 << 10
_BLOCKS_AT_A_TIME = 4
_TAGS = 16_000
# MPI moves bytes only while it is called: a longer sleep lets the wire run dry.
_LONGEST_SLEEP = 150e-6

Step = list[tuple[int, Any]]
"""Requests in flight, each with the rank at the other end."""


class NetworkTransport:
    """Collectives out of Isend and Irecv."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self._rank: int = comm.Get_rank()
        self._size: int = comm.Get_size()
        self._stranded: list[Any] = []
        self._others = [
            (self._rank + step) % self._size for step in range(1, self._size)
        ]  # each rank begins with another neighbour, so that no one is hit by all at once

    # -- moving pieces -------------------------------------------------------------------------

    def _receive(self, flat: torch.Tensor, peer: int, tag: int) -> tuple[int, Any]:
        return peer, self._comm.Irecv(buffer(flat), source=peer, tag=tag)

    def _send(self, flat: torch.Tensor, peer: int, tag: int) -> tuple[int, Any]:
        return peer, self._comm.Isend(buffer(flat), dest=peer, tag=tag)

    def _swap(
        self,
        incoming: Sequence[torch.Tensor | None],
        outgoing: Sequence[torch.Tensor | None],
        tag: int,
    ) -> Step:
        """Post one receive from and one send to every other rank; None means nothing."""
        step: Step = []
        for peer in self._others:
            room = incoming[peer]
            if room is not None:
                step.append(self._receive(room, peer, tag))
        for peer in self._others:
            piece = outgoing[peer]
            if piece is not None:
                step.append(self._send(piece, peer, tag))
        return step

    def _only(
        self, peer: int | None = None, piece: torch.Tensor | None = None
    ) -> list[torch.Tensor | None]:
        """A piece for, or from, one rank; nothing for the others."""
        return [piece if rank == peer else None for rank in range(self._size)]

    def _run(self, blocks: Iterator[Iterator[Step]], deadline: Deadline) -> None:
        """Drive blocks to their end, a few at a time, and sleep while nothing moves."""
        active: deque[tuple[Iterator[Step], Step]] = deque()
        patience = Patience(deadline, longest=_LONGEST_SLEEP)
        waiting: Iterator[Step] | None = next(blocks, None)
        while waiting is not None or active:
            while waiting is not None and len(active) < _BLOCKS_AT_A_TIME:
                first = next(waiting, None)
                if first is not None:
                    active.append((waiting, first))
                waiting = next(blocks, None)
            moved = False
            for _ in range(len(active)):
                block, step = active.popleft()
                if not MPI.Request.Testall([request for _, request in step]):
                    active.append((block, step))
                    continue
                moved = True
                following = next(block, None)
                if following is not None:
                    active.append((block, following))
            if moved:
                patience.reset()
            elif active and not patience.pause():
                # MPI may still write into these tensors: they must outlive the exception.
                self._stranded.append(active)
                raise deadline.error(self._silent(active))

    @staticmethod
    def _silent(active: deque[tuple[Iterator[Step], Step]]) -> list[int]:
        """The ranks whose messages have not come or gone."""
        peers = {peer for _, step in active for peer, request in step if not request.Test()}
        return sorted(peers)

    # -- reductions ----------------------------------------------------------------------------

    def all_reduce(self, flat: torch.Tensor, how: Reduction, deadline: Deadline) -> None:
        """Reduce `flat` over all ranks, in place."""
        if self._size > 1 and flat.numel():
            self._run(self._reduce_blocks(flat, how, None), deadline)
        how.finish(flat, self._size)

    def reduce(self, flat: torch.Tensor, how: Reduction, root: int, deadline: Deadline) -> None:
        """Reduce `flat` into the root's; the others' stays as it is."""
        target = flat if self._rank == root else flat.clone()
        if self._size > 1 and flat.numel():
            self._run(self._reduce_blocks(target, how, root), deadline)
        if self._rank == root:
            how.finish(flat, self._size)

    def _reduce_blocks(
        self, flat: torch.Tensor, how: Reduction, root: int | None
    ) -> Iterator[Iterator[Step]]:
        if flat.numel() * flat.element_size() <= _SMALL_BYTES:
            yield self._small_block(flat, how)
            return
        length = _PIECE_BYTES // flat.element_size() * self._size
        for index, block in enumerate(torch.split(flat, length)):
            yield self._large_block(block, how, root, 2 * (index % (_TAGS // 2)))

    def _small_block(self, flat: torch.Tensor, how: Reduction) -> Iterator[Step]:
        parts = [torch.empty_like(flat) for _ in range(self._size)]
        parts[self._rank] = flat
        yield self._swap(parts, [flat] * self._size, 0)
        how.combine(parts, flat)

    def _large_block(
        self, block: torch.Tensor, how: Reduction, root: int | None, tag: int
    ) -> Iterator[Step]:
        pieces = torch.tensor_split(block, self._size)
        mine = pieces[self._rank]
        parts = [torch.empty_like(mine) for _ in range(self._size)]
        parts[self._rank] = mine
        yield self._swap(parts, pieces, tag)
        how.combine(parts, mine)
        everyone = range(self._size)
        to = [mine if root is None or peer == root else None for peer in everyone]
        come = [pieces[peer] if root in (None, self._rank) else None for peer in everyone]
        yield self._swap(come, to, tag + 1)

    def reduce_scatter(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        counts: Sequence[int],
        how: Reduction,
        deadline: Deadline,
    ) -> None:
        """Reduce `source`, cut into `counts`, and keep this rank's piece in `output`."""
        pieces = torch.split(source, list(counts))
        parts = [torch.empty_like(output) for _ in range(self._size)]
        parts[self._rank] = pieces[self._rank]
        self._once(parts, pieces, deadline)
        how.combine(parts, output)
        how.finish(output, self._size)

    # -- moves ---------------------------------------------------------------------------------

    def _once(
        self,
        incoming: Sequence[torch.Tensor | None],
        outgoing: Sequence[torch.Tensor | None],
        deadline: Deadline,
    ) -> None:
        def block() -> Iterator[Step]:
            yield self._swap(incoming, outgoing, 0)

        self._run(iter([block()]), deadline)

    def broadcast(self, flat: torch.Tensor, root: int, deadline: Deadline) -> None:
        """The root's `flat` on every rank: a piece to each, then every piece to all."""
        nothing = self._only()
        is_root = self._rank == root
        if flat.numel() * flat.element_size() <= _SMALL_BYTES:
            if is_root:
                self._once(nothing, [flat] * self._size, deadline)
            else:
                self._once(self._only(root, flat), nothing, deadline)
            return
        pieces = torch.tensor_split(flat, self._size)
        mine = pieces[self._rank]

        def block() -> Iterator[Step]:
            if is_root:
                yield self._swap(nothing, pieces, 0)
            else:
                yield self._swap(self._only(root, mine), nothing, 0)
            to = [None if peer == root else mine for peer in range(self._size)]
            yield self._swap(nothing if is_root else pieces, to, 1)

        self._run(iter([block()]), deadline)

    def all_gather(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        counts: Sequence[int],
        deadline: Deadline,
    ) -> None:
        """Every rank's `source`, one after the other, in `output`."""
        pieces = torch.split(output, list(counts))
        move(pieces[self._rank], source)
        self._once(pieces, [source] * self._size, deadline)

    def all_to_all(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_counts: Sequence[int],
        source_counts: Sequence[int],
        deadline: Deadline,
    ) -> None:
        """Piece i of `source` goes to rank i; piece i of `output` comes from it."""
        incoming, outgoing = (
            torch.split(output, list(output_counts)),
            torch.split(source, list(source_counts)),
        )
        move(incoming[self._rank], outgoing[self._rank])
        self._once(incoming, outgoing, deadline)

    def gather(
        self,
        output: torch.Tensor | None,
        source: torch.Tensor,
        counts: Sequence[int],
        root: int,
        deadline: Deadline,
    ) -> None:
        """Every rank's `source`, one after the other, in the root's `output`."""
        if output is None:
            self._once(self._only(), self._only(root, source), deadline)
            return
        pieces = torch.split(output, list(counts))
        move(pieces[root], source)
        self._once(pieces, self._only(), deadline)

    def scatter(
        self,
        output: torch.Tensor,
        source: torch.Tensor | None,
        counts: Sequence[int],
        root: int,
        deadline: Deadline,
    ) -> None:
        """Piece i of the root's `source` in the `output` of rank i."""
        if source is None:
            self._once(self._only(root, output), self._only(), deadline)
            return
        pieces = torch.split(source, list(counts))
        move(output, pieces[root])
        self._once(self._only(), pieces, deadline)

    def barrier(self, deadline: Deadline) -> None:
        """Nobody goes on before all have sent a sign."""
        signs = [torch.zeros(1, dtype=torch.uint8) for _ in range(self._size)]
        self._once(signs, [torch.ones(1, dtype=torch.uint8)] * self._size, deadline)

    def close(self) -> None:
        """Nothing is held."""
