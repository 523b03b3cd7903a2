"""One node's copy of the weights, between the thread that trains and those that mix. No network.

The thread that trains never waits for another node: after each of its updates it takes over what
mixing has come to meanwhile, and shows its weights. Others see the weights as shown, with what is
still to be taken over.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

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
