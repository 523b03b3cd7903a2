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
    """

    def __init__(self, network: Network, flat: torch.Tensor) -> None:
        self._network = network
        self._adding = network.size - 1  # steps of scatter-reduce; as many of all-gather follow
        whole = cut(flat, network.size)
        self._chunks = [segments(chunk) for chunk in whole]
        longest = max(whole, key=lambda chunk: chunk.numel())
        self._room = [torch.empty_like(segment) for segment in segments(longest)]
        self._sent: dict[tuple[int, int], Pending] = {}
        self._coming: dict[tuple[int, int], Pending] = {}

    def run(self) -> None:
        """Add up, in place."""
        last = 2 * self._adding - 1
        for index in range(len(self._leaving(0))):
            self._send(0, index)
        for index in range(len(self._arriving(0))):
            self._receive(0, index)
        for step in range(last + 1):
            # Chunks may differ by an element, and so by a segment.
            following = len(self._arriving(step + 1)) if step < last else 0
            arriving = self._arriving(step)
            for index, segment in enumerate(arriving):
                self._coming.pop((step, index)).settle()
                if step < self._adding:
                    segment.add_(self._room[index][: segment.numel()])
                if step < last:
                    self._send(step + 1, index)
                if index < following:
                    self._receive(step + 1, index)
            for index in range(len(arriving), following):
                self._receive(step + 1, index)
        for pending in self._sent.values():
            pending.settle()

    def _leaving(self, step: int) -> list[torch.Tensor]:
        return self._chunks[(self._network.rank - step) % self._network.size]

    def _arriving(self, step: int) -> list[torch.Tensor]:
        return self._chunks[(self._network.rank - step - 1) % self._network.size]

    def _send(self, step: int, index: int) -> None:
        right = (self._network.rank + 1) % self._network.size
        self._sent[step, index] = self._network.send(self._leaving(step)[index], right, TAG)

    def _receive(self, step: int, index: int) -> None:
        left = (self._network.rank - 1) % self._network.size
        place = self._arriving(step)[index]
        if step < self._adding:
            place = self._room[index][: place.numel()]
        else:  # the sum lands on the part that this node sent before: that must have left
            self._sent.pop((step - self._adding, index)).settle()
        self._coming[step, index] = self._network.receive(place, left, TAG)


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
