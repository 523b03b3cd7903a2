"""`ring`: scatter-reduce and all-gather written out on messages, so that their bytes can be seen.

Nodes 0, 1, 2; the vector is cut into chunks a, b, c; each sends to its right neighbour:

    scatter-reduce   step 0:   0 sends a,  1 sends b,  2 sends c; the receiver adds it to its own
                     step 1:   0 sends c,  1 sends a,  2 sends b; now the sum of two
                               0 has the whole sum of b, 1 of c, 2 of a
    all-gather       step 2:   0 sends b,  1 sends c,  2 sends a; the receiver keeps it
                     step 3:   0 sends a,  1 sends b,  2 sends c; everyone has all three

Every node sends 2 (N-1) chunks of 1/N: 2 (N-1)/N of the vector, however many nodes there are.
"""

from __future__ import annotations

import itertools

import torch

from paceline.exchange.network import Network, Pending
from paceline.exchange.turns import InTurn

TAG = 1801
"""Messages of rings; other messages between nodes have other numbers."""
SEGMENT = 2**20
"""Bytes that travel as one message: one is added and sent on while the next arrives."""


class Ring(InTurn):
    """One ring per bucket."""

    name = "ring"
    summary = "scatter-reduce and all-gather on messages: 2 (N-1)/N of the gradient per node"

    def carry_out(self, flat: torch.Tensor, number: int) -> None:
        if self.network.size > 1:
            _Round(self.network, flat).run()


class _Round:
    """One vector's way around the ring.

    The segments of a step are posted at once, and each goes on to the next step as soon as it has
    come: both directions of the link are busy all the time, and adding is hidden under them.
    Messages between two neighbours arrive in the order in which they were posted.

    Receives are posted a step ahead, into one of two rooms. Gloo sends nothing before the receiver
    has said that it is ready, and that word would wait behind the data that goes the same way:
    posted after the sends, directions take turns, and two nodes need half as long again.
    """

    def __init__(self, network: Network, flat: torch.Tensor) -> None:
        self._network = network
        self._adding = network.size - 1  # steps of scatter-reduce; as many of all-gather follow
        self._steps = 2 * self._adding
        whole = cut(flat, network.size)
        self._chunks = [segments(chunk) for chunk in whole]
        longest = segments(max(whole, key=lambda chunk: chunk.numel()))
        self._rooms = [[torch.empty_like(segment) for segment in longest] for _ in range(2)]
        self._sent: dict[tuple[int, int], Pending] = {}
        self._coming: dict[tuple[int, int], Pending] = {}

    def run(self) -> None:
        """Add up, in place."""
        for step in range(2):
            for index in range(len(self._arriving(step))):
                self._receive(step, index)
        for index in range(len(self._leaving(0))):
            self._send(0, index)
        for step in range(self._steps):
            # Chunks may differ by an element, and so by a segment.
            later = step + 2
            following = len(self._arriving(later)) if later < self._steps else 0
            arriving = self._arriving(step)
            for index, segment in enumerate(arriving):
                self._arrive(step, index, segment)
                if index < following:
                    self._receive(later, index)
                if step + 1 < self._steps:
                    self._send(step + 1, index)
            for index in range(len(arriving), following):
                self._receive(later, index)
        for pending in self._sent.values():
            pending.settle()

    def _leaving(self, step: int) -> list[torch.Tensor]:
        return self._chunks[(self._network.rank - step) % self._network.size]

    def _arriving(self, step: int) -> list[torch.Tensor]:
        return self._chunks[(self._network.rank - step - 1) % self._network.size]

    def _place(self, step: int, index: int) -> torch.Tensor:
        return self._rooms[step % 2][index][: self._arriving(step)[index].numel()]

    def _send(self, step: int, index: int) -> None:
        right = (self._network.rank + 1) % self._network.size
        self._sent[step, index] = self._network.send(self._leaving(step)[index], right, TAG)

    def _receive(self, step: int, index: int) -> None:
        left = (self._network.rank - 1) % self._network.size
        self._coming[step, index] = self._network.receive(self._place(step, index), left, TAG)

    def _arrive(self, step: int, index: int, segment: torch.Tensor) -> None:
        self._coming.pop((step, index)).settle()
        if step < self._adding:
            segment.add_(self._place(step, index))
        else:  # the sum lands on the part that this node sent before: that must have left
            self._sent.pop((step - self._adding, index)).settle()
            segment.copy_(self._place(step, index))


def cut(flat: torch.Tensor, parts: int) -> list[torch.Tensor]:
    """A vector in chunks whose lengths differ by one element at most.

    >>> [len(chunk) for chunk in cut(torch.zeros(8), 3)]
    [2, 3, 3]
    """
    bounds = [flat.numel() * number // parts for number in range(parts + 1)]
    return [flat[start:end] for start, end in itertools.pairwise(bounds)]


def segments(chunk: torch.Tensor) -> list[torch.Tensor]:
    """A chunk in segments of at most SEGMENT bytes; none where it is empty."""
    return list(torch.split(chunk, SEGMENT // chunk.element_size())) if chunk.numel() else []
