"""Who of several nodes still trains, what each has done, and what the ended ones came to."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.exchange.servers.staleness import Staleness


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
