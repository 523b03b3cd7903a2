"""`reduce_broadcast`: the first node adds up all gradients and sends everyone the sum."""

from __future__ import annotations

import torch

from paceline.exchange.network import Pending
from paceline.exchange.ring import segments
from paceline.exchange.turns import InTurn

TAG = 1802
"""Messages of this exchange; other messages between nodes have other numbers."""


class ReduceBroadcast(InTurn):
    """Every gradient goes to the first node, and its sum comes back: buffers, not pickles.

    Written on messages, one to and one from every other node, so that what is counted is what
    moves: the first node sends and receives N-1 times the gradient, every other node once. (A
    library's own reduce and broadcast may go by a tree, and their count would be a guess.)
    """

    name = "reduce_broadcast"
    summary = "the first node adds up and sends back: N-1 times the gradient there, once elsewhere"

    def carry_out(self, flat: torch.Tensor, number: int) -> None:
        if self.network.rank == 0:
            self._gather(segments(flat))
        else:
            self._give(segments(flat))

    def _gather(self, parts: list[torch.Tensor]) -> None:
        """The first node: add every part up and send it back while the next one arrives."""
        others = range(1, self.network.size)
        rooms = [[torch.empty_like(parts[0]) for _ in others] for _ in range(min(2, len(parts)))]
        coming: dict[int, list[Pending]] = {}
        sent: list[Pending] = []

        def expect(index: int) -> None:
            places = [room[: parts[index].numel()] for room in rooms[index % 2]]
            coming[index] = [
                self.network.receive(place, node, TAG)
                for place, node in zip(places, others, strict=True)
            ]

        for index in range(len(rooms)):
            expect(index)
        for index, part in enumerate(parts):
            for pending, room in zip(coming.pop(index), rooms[index % 2], strict=True):
                pending.settle()
                part.add_(room[: part.numel()])
            if index + 2 < len(parts):
                expect(index + 2)
            sent += [self.network.send(part, node, TAG) for node in others]
        for pending in sent:
            pending.settle()

    def _give(self, parts: list[torch.Tensor]) -> None:
        """Every other node: send all parts, and let each sum land where its part was."""
        sent = [self.network.send(part, 0, TAG) for part in parts]
        coming = []
        for pending, part in zip(sent, parts, strict=True):
            pending.settle()
            coming.append(self.network.receive(part, 0, TAG))
        for pending in coming:
            pending.settle()
