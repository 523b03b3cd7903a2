"""One node's copy of the weights, between the thread that trains and those that mix. No network.

The thread that trains never waits for another node: after each of its updates it takes over what
mixing has come to meanwhile, and shows its weights. Others see the weights as shown, with what is
still to be taken over.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.exchange.servers.staleness import Staleness
from paceline.local.shared import divided, memory_view


def part_of(own: float, other: float) -> float:
    """How far a node goes towards another's copy when the two mix, by their shares.

    Both change by parts that keep the mean over both, weighted with shares, where it was:
    own (b - a) other / (own + other) + other (a - b) own / (own + other) = 0.

    >>> part_of(1.0, 1.0), part_of(3.0, 1.0)
    (0.5, 0.25)
    """
    return other / (own + other)


class Mixture:
    """A flat copy of the weights as they were shown last, and what is to be added to them."""

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        self._weights = list(weights)
        elements = sum(weight.numel() for weight in weights)
        self._shown, self._change = torch.empty(elements), torch.zeros(elements)
        self._is_changed = False
        self._lock = threading.Lock()
        self.clock = 0
        self.staleness = Staleness()

    @property
    def elements(self) -> int:
        return len(self._shown)

    @torch.no_grad()
    def show(self, clock: int) -> None:
        """Called by the thread that trains: take over what mixing came to, and show the result."""
        with self._lock:
            for weight, change in divided(self._change, self._weights) if self._is_changed else ():
                memory_view(weight.data, weight).add_(change)
            for weight, shown in divided(self._shown, self._weights):
                shown.copy_(memory_view(weight.data, weight))
            if self._is_changed:
                self._change.zero_()
                self._is_changed = False
            self.clock = clock

    def copy(self) -> tuple[torch.Tensor, int]:
        """The weights as others see them, and after how many updates."""
        with self._lock:
            return self._shown + self._change, self.clock

    def answer(self, other: torch.Tensor, part: float) -> tuple[torch.Tensor, int]:
        """Go a part of the way towards another's copy; what this one was before."""
        with self._lock:
            mine = self._shown + self._change
            self._approach(mine, other, part)
            return mine, self.clock

    def meet(self, sent: torch.Tensor, clock: int, other: torch.Tensor, part: float) -> None:
        """Go a part of the way that lay between the two when `sent` left, at update `clock`."""
        with self._lock:
            self._approach(sent, other, part)
            self.staleness.add(self.clock - clock)

    def _approach(self, mine: torch.Tensor, other: torch.Tensor, part: float) -> None:
        self._change.add_(other - mine, alpha=part)
        self._is_changed = True

    @torch.no_grad()
    def become(self, mean: torch.Tensor) -> None:
        """Called by the thread that trains: these are the weights now."""
        with self._lock:
            for weight, part in divided(mean, self._weights):
                memory_view(weight.data, weight).copy_(part)
            self._shown.copy_(mean)
            self._change.zero_()
            self._is_changed = False


@dataclass
class NodeStatus:
    """One other node."""

    host: str
    clock: int = 0
    state: str = "training"
    """Or "done", or "lost"."""
    staleness: dict[str, int] = field(default_factory=dict)


class Roll:
    """What one node knows of the others."""

    def __init__(self, hosts: Mapping[int, str]) -> None:
        self._entries = {node: NodeStatus(host) for node, host in hosts.items()}
        self._lock = threading.Lock()
        self._told = [0.0, 0.0, 0.0]
        self._sum: torch.Tensor | None = None
        self._shares = 0.0
        self.news: list[str] = []

    @property
    def nodes(self) -> list[int]:
        """The others, by number."""
        return list(self._entries)

    def hear(self, node: int, word: dict[str, Any]) -> None:
        """Remember what a node says of itself."""
        with self._lock:
            entry = self._entries[node]
            entry.clock, entry.staleness = word["clock"], word["staleness"]
            self._told = [a + b for a, b in zip(self._told, word["told"], strict=True)]

    def finish(self, node: int, weights: torch.Tensor | None, share: float) -> None:
        """A node has ended its training, with these weights where they are kept."""
        with self._lock:
            self._entries[node].state = "done"
            if weights is None:
                return
            part = weights * share
            self._sum = part if self._sum is None else self._sum + part
            self._shares += share

    def lose(self, node: int, how: str, update: int) -> None:
        """Go on without a node."""
        with self._lock:
            entry = self._entries[node]
            if entry.state != "training":
                return
            entry.state = "lost"
            left = 1 + sum(other.state == "training" for other in self._entries.values())
            self.news.append(
                f"node {node} on {entry.host} {how} at update {update}; going on with {left}"
                f" node{'s' * (left > 1)}"
            )

    @property
    def training(self) -> int:
        """Nodes that have neither ended nor been lost."""
        return sum(entry.state == "training" for entry in self._entries.values())

    @property
    def progress(self) -> int:
        """Updates that the others have done, as far as they have told."""
        return sum(entry.clock for entry in self._entries.values())

    @property
    def clocks(self) -> dict[str, int]:
        """Updates of every other node, as far as it has told; for JSON."""
        return {str(node): entry.clock for node, entry in sorted(self._entries.items())}

    def take_told(self) -> list[float]:
        """Losses, right answers and samples that the others have told since the last call."""
        with self._lock:
            told, self._told = self._told, [0.0, 0.0, 0.0]
            return told

    def staleness(self, own: Staleness) -> Staleness:
        """Of the mixes of all nodes."""
        found = Staleness()
        with self._lock:
            for counts in (own.encoded(), *(entry.staleness for entry in self._entries.values())):
                found.merge(counts)
        return found

    def mean_with(self, own: torch.Tensor, share: float) -> torch.Tensor | None:
        """The mean of `own` and of all copies that have come in since the last call, by shares."""
        with self._lock:
            if self._sum is None:
                return None
            mean = (self._sum + own * share) / (self._shares + share)
            self._sum, self._shares = None, 0.0
            return mean
