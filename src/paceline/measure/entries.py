"""What a race knows of a candidate, and how fast that makes it."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field

from paceline.schema import Candidate

ALIKE = 3
"""Who had so many turns in the finals is judged by their mean, whatever earlier ones were like."""


@dataclass
class Entry:
    """A candidate and its times in a race."""

    candidate: Candidate
    times: list[float] = field(default_factory=list)
    turns: list[float] = field(default_factory=list)
    """The median of each turn, the finals' last."""
    finals: int = 0
    """So many of these turns were in the finals, where all have theirs one after the other."""
    alternated: list[float] = field(default_factory=list)
    """Updates in turns with those of the other finalists, as long as they would have been had the
    machine had one speed. What came before no longer counts."""
    alternations: int = 0
    """How many of them there were."""
    drift: float = 1.0
    """How many times slower the machine was for the finalists than in this one's turns."""
    memory_mb: float | None = None
    failed: str = ""
    stopped: str = ""

    @property
    def median(self) -> float:
        """Of an even number the lower one: of two, one was disturbed if they differ."""
        return statistics.median_low(self.times) if self.times else float("inf")

    @property
    def typical(self) -> float:
        """Seconds of an update: the median, or after enough finals the mean of their turns.

        Of finalists that alternated, the median of that: their rounds are evened out already.

        A machine whose speed changes for many seconds, and for some candidates more than for
        others, has no one speed that a median would find: training lasts as long as the mean.
        """
        if self.alternated:
            return statistics.median(self.alternated)
        if self.finals >= ALIKE:
            return statistics.fmean(self.turns[-self.finals :])
        return self.median * self.drift

    @property
    def error(self) -> float | None:
        """The standard error of `typical`, as a part of it; one turn does not tell."""
        turns = self.turns[-self.finals :] if self.finals >= ALIKE else self.turns
        turns = self.alternated or turns
        if len(turns) < 2:
            return None
        return statistics.stdev(turns) / math.sqrt(len(turns)) / statistics.fmean(turns)

    @property
    def fastest(self) -> float:
        """What it can do: noise only ever adds time, so elimination goes by this."""
        return min(self.times, default=float("inf"))

    def quartiles(self) -> tuple[float, float]:
        times = self.alternated or [seconds * self.drift for seconds in self.times]
        if len(times) < 2:
            return self.typical, self.typical
        low, _, high = statistics.quantiles(times, n=4, method="inclusive")
        return min(low, statistics.median_low(times)), high
