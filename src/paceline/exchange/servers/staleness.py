"""How old the weights were that a gradient was computed from: counted, and corrected for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping


class Staleness:
    """A histogram: how many updates were applied between the pull and the push of each update."""

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()

    def add(self, staleness: int) -> None:
        self.counts[staleness] += 1

    def merge(self, counts: Mapping[str, int]) -> None:
        """Add what another server has counted."""
        for staleness, count in counts.items():
            self.counts[int(staleness)] += count

    @property
    def updates(self) -> int:
        return sum(self.counts.values())

    @property
    def mean(self) -> float:
        total = sum(staleness * count for staleness, count in self.counts.items())
        return total / self.updates if self.updates else 0.0

    @property
    def largest(self) -> int:
        return max(self.counts, default=0)

    def encoded(self) -> dict[str, int]:
        """For JSON: staleness -> updates."""
        return {str(staleness): self.counts[staleness] for staleness in sorted(self.counts)}


def rate_correction(staleness: int) -> float:
    """What the rate of a late gradient is multiplied with.

    >>> rate_correction(0), rate_correction(3)
    (1.0, 0.25)
    """
    return 1 / (1 + staleness)
