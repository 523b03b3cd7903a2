"""When a training has reached what it was asked for, and when it never will."""

from __future__ import annotations

import math

from paceline.errors import ConfigError
from paceline.schema.config import Until
from paceline.training.evaluate import Score

EXPLODED = 1000.0
"""A loss this many times the first one is not training any more."""


class Goal:
    """The best evaluation so far, held against `train.until`.

    Judged by what `train.monitor` names. Left to itself: models that tell classes apart by their
    test accuracy, all others by their test loss.
    """

    def __init__(self, until: Until, monitor: str = "auto") -> None:
        self._until = until
        self._name, _, self._way = monitor.partition(":")
        self.best_accuracy: float | None = None
        """None where there are no classes."""
        self.best_loss: float | None = None
        """The lowest test loss; with classes not that of the highest accuracy."""
        self.best_value: float | None = None
        """The best of what is monitored, where it is named."""
        self.since_best = 0
        """Evaluations since the best one."""

    def note(self, score: Score | None) -> bool:
        """True when this is the best evaluation so far."""
        if score is None:
            return False
        lower = math.isfinite(score.loss) and (
            self.best_loss is None or score.loss < self.best_loss
        )
        if lower:
            self.best_loss = score.loss
        if score.accuracy is None:
            self.check(classes=False)
            self.best_accuracy, better = None, lower
        else:
            better = self.best_accuracy is None or score.accuracy > self.best_accuracy
            if better:
                self.best_accuracy = score.accuracy
        if self._way:
            better = self._note_monitored(score)
        self.since_best = 0 if better else self.since_best + 1
        return better

    def _note_monitored(self, score: Score) -> bool:
        known = {"loss": score.loss, "accuracy": score.accuracy, "top5": score.top5}
        known |= score.metrics
        if self._name not in known:
            listed = ", ".join(name for name, value in known.items() if value is not None)
            raise ConfigError(
                f"train.monitor = '{self._name}:{self._way}' names nothing that evaluations report:"
                f" use one of {listed}, or let the step or workload.metrics report it"
            )
        value = known[self._name]
        if value is None or not math.isfinite(value):
            return False
        best = self.best_value
        if best is None or (value > best if self._way == "max" else value < best):
            self.best_value = value
            return True
        return False

    def check(self, *, classes: bool) -> None:
        """Refuse a goal that what is trained cannot have."""
        if self._until.accuracy is not None and not classes:
            raise ConfigError(
                f"train.until.accuracy = {self._until.accuracy:g} needs outputs (samples, classes)"
                " and targets that are class numbers, which this model and data do not have: use"
                " train.until.loss or train.until.patience"
            )

    def reached(self) -> str | None:
        """Which goal of `train.until` has been reached, if any."""
        until, accuracy, loss = self._until, self.best_accuracy, self.best_loss
        if until.accuracy is not None and accuracy is not None and accuracy >= until.accuracy:
            return f"test accuracy {accuracy:.2%} reached: train.until.accuracy is met"
        if until.loss is not None and loss is not None and loss <= until.loss:
            return f"test loss {loss:.4g} reached: train.until.loss is met"
        best = self.best_value
        if until.value is not None and best is not None:
            enough = best >= until.value if self._way == "max" else best <= until.value
            if enough:
                return f"test {self._name} {best:.4g} reached: train.until.value is met"
        if until.patience is not None and self.since_best >= until.patience:
            what = "higher test accuracy" if accuracy is not None else "lower test loss"
            if self._way:
                what = f"{'higher' if self._way == 'max' else 'lower'} test {self._name}"
            return f"no {what} in {self.since_best} evaluations: train.until.patience is met"
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
