"""When a training has reached what it was asked for, and when it never will."""

from __future__ import annotations

import math

from paceline.schema.config import Until
from paceline.train.evaluate import Score

EXPLODED = 1000.0
"""A loss this many times the first one is not training any more."""


class Goal:
    """The best accuracy so far, held against `train.until`."""

    def __init__(self, until: Until) -> None:
        self._until = until
        self.best: float | None = None
        self.since_best = 0
        """Evaluations since the best one."""

    def note(self, score: Score | None) -> bool:
        """True when this is the best accuracy so far."""
        if score is None:
            return False
        if self.best is None or score.accuracy > self.best:
            self.best, self.since_best = score.accuracy, 0
            return True
        self.since_best += 1
        return False

    def reached(self) -> str | None:
        """Which goal of `train.until` has been reached, if any."""
        until = self._until
        if until.accuracy is not None and self.best is not None and self.best >= until.accuracy:
            return f"test accuracy {self.best:.2%} reached: train.until.accuracy is met"
        if until.patience is not None and self.since_best >= until.patience:
            return f"no better accuracy for {self.since_best} epochs: train.until.patience is met"
        return None


class LossWatch:
    """Holds every loss against the first one.

    >>> watch = LossWatch()
    >>> [watch.has_diverged(loss) for loss in (2.3, 40.0, 2301.0, float("nan"))]
    [False, False, True, True]
    """

    def __init__(self) -> None:
        self._first: float | None = None

    def has_diverged(self, loss: float) -> bool:
        """True where going on would only waste time."""
        if self._first is None:
            self._first = loss
        return not math.isfinite(loss) or loss > EXPLODED * max(1.0, abs(self._first))
