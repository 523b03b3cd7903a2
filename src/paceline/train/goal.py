"""When a training has reached what it was asked for."""

from __future__ import annotations

from paceline.schema.config import Until
from paceline.train.evaluate import Score


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
