"""How long an experiment takes: by what its steps took elsewhere, and what they take here."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.experiments.outcome import Outcome


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Seconds that the steps still to run will take."""

    seconds: float
    steps: int
    """How many are still to be run."""
    unknown: int
    """Steps of them of which nothing is known."""
    factor: float | None
    """How much longer this machine takes than the one of the file; None: not known yet."""

    @property
    def words(self) -> str:
        if not self.steps:
            return "nothing is left to be run"
        if self.unknown == self.steps:
            return f"{self.steps} steps, nobody knows yet how long they take"
        text = f"about {duration(self.seconds)} for {self.steps} steps"
        if self.unknown:
            text += f", without {self.unknown} whose time is not known"
        if self.factor is None:
            return f"{text}, as on a machine of 2 cores"
        return f"{text}, at {self.factor:.2f} of the time of a machine of 2 cores, as seen so far"


def estimate(outcomes: Sequence[Outcome], *, again: bool = False) -> Estimate:
    """From the seconds of the file; the steps that are done say how this machine differs."""
    done = [each for each in outcomes if each.done]
    left = list(outcomes) if again else [each for each in outcomes if not each.done]
    ratios = [each.seconds / each.step.seconds for each in done if each.step.seconds]
    factor = statistics.median(ratios) if ratios else None
    known = [each.step.seconds for each in left if each.step.seconds]
    return Estimate(
        seconds=sum(known) * (factor or 1.0),
        steps=len(left),
        unknown=len(left) - len(known),
        factor=factor,
    )


def duration(seconds: float) -> str:
    """Short and readable.

    >>> duration(75), duration(4.25), duration(7300)
    ('1 min 15 s', '4 s', '2 h 2 min')
    """
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds // 60:.0f} min {seconds % 60:.0f} s"
    return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:.0f} min"
