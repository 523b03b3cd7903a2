"""Sums of BatchNorm's statistics over nodes: small vectors, in the middle of a pass.

Every node sends its vector to every other and adds up what it has in the order of nodes, so that
all have the same bits after one way over the network. These are messages of two nodes: sums of
gradients that are under way meanwhile have an order of their own.

A node without samples does not know what the others will ask for. In updates that have such a node
what is asked for travels ahead of the numbers; and in the first ones, so that models whose nodes
take different ways are refused in a sentence. Later only that they do not fit together is noticed.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch

from paceline.errors import StrategyError
from paceline.exchange.network import Network, Pending
from paceline.local.part_sums import BEGIN, END, NOTHING, other_order

OPERATION = "the statistics of BatchNorm"
_BEGIN, _HEADS = 1903, 1904
"""Messages that say who has samples, and what is asked for; others have other numbers."""
_NUMBERS = 2000
"""Messages of n numbers have this number and n: others are not taken for them."""
CAREFUL = 2
"""Updates in which every node says what it asks for before it sends: as many as a proof has."""


class NetworkSums:
    """One node's part of sums over all nodes."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._updates = 0
        self._empty = False
        self._ahead = True
        """Whether what is asked for travels ahead of the numbers, in this update."""
        self._with_samples = list(range(network.size))

    def begin(self, *, empty: bool) -> None:
        """Before every update: whether this node has no samples in it."""
        self._updates += 1
        self._empty = empty

    def round(self, asked: int, values: torch.Tensor | None) -> tuple[int, torch.Tensor]:
        """What all nodes ask for, and its sum; every node calls it equally often."""
        started = time.perf_counter()
        try:
            if asked == BEGIN:
                assert values is not None
                return asked, self._who_is_there(values)
            if self._ahead:
                return self._with_heads(asked, values)
            assert values is not None
            if asked == END:  # all have samples: nobody waits for this word
                return asked, values
            return asked, self._at_once(asked, values)
        finally:
            spent = time.perf_counter() - started
            self._network.count_time(seconds=spent, waited=spent, operation=OPERATION)

    def _who_is_there(self, values: torch.Tensor) -> torch.Tensor:
        everyone = range(self._network.size)
        own = torch.cat([values.new_tensor([float(self._empty)]), values])
        rows = self._exchanged(own, everyone, len(own), _BEGIN)
        self._with_samples = [node for node in everyone if not rows[node, 0]]
        self._ahead = self._updates <= CAREFUL or len(self._with_samples) < len(everyone)
        return rows.sum(dim=0)[1:]

    def _with_heads(self, asked: int, values: torch.Tensor | None) -> tuple[int, torch.Tensor]:
        everyone = range(self._network.size)
        own = torch.tensor([float(asked), 0.0 if values is None else float(len(values))])
        heads = self._exchanged(own.double(), everyone, 2, _HEADS)
        asking = [node for node in everyone if int(heads[node, 0]) != NOTHING]
        for node in asking:
            if not torch.equal(heads[node], heads[asking[0]]):
                hosts = self._network.hosts
                raise StrategyError(other_order(hosts[asking[0]], hosts[node]))
        found, count = (int(number) for number in heads[asking[0]].tolist())
        rows = self._exchanged(values, asking, count, _NUMBERS + count)
        return found, rows.sum(dim=0)

    def _at_once(self, asked: int, values: torch.Tensor) -> torch.Tensor:
        own = torch.cat([values.new_tensor([float(asked)]), values])
        everyone = range(self._network.size)
        rows = self._exchanged(own, everyone, len(own), _NUMBERS + len(own))
        for node in everyone:
            if int(rows[node, 0]) != asked:
                hosts = self._network.hosts
                raise StrategyError(other_order(hosts[self._network.rank], hosts[node]))
        return rows.sum(dim=0)[1:]

    def _exchanged(
        self, own: torch.Tensor | None, senders: Iterable[int], count: int, tag: int
    ) -> torch.Tensor:
        """A row for every node, zeros for those that send nothing."""
        network = self._network
        rows = torch.zeros(network.size, count, dtype=torch.float64)
        if count == 0:
            return rows
        others = [node for node in range(network.size) if node != network.rank]
        # Gloo sends nothing before the receiver has said that it is ready: that goes first.
        pending: list[Pending] = [
            network.receive(rows[node], node, tag) for node in senders if node in others
        ]
        if own is not None:
            rows[network.rank] = own
            kept = own.contiguous()
            pending += [network.send(kept, node, tag) for node in others]
        for each in pending:
            each.settle()
        return rows
