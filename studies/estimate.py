"""How long an experiment takes: by what its steps took elsewhere, and what they take here.

Before anything has run here, `paceline forecast` says how fast this machine is, from one of the
experiment's own trainings; afterwards the steps that are done say it better.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.report.load import finite
from paceline.schema import write_json
from paceline.schema.plain import parse_json
from paceline.text import duration
from studies.outcome import StepOutcome, read_object
from studies.running import PACELINE, Work, prepare
from studies.spec import StudyStep

WORTH_PREDICTING = 600.0
"""Seconds from which on an experiment is worth the half minute that a prediction takes."""
PREDICTION_SECONDS = 180.0


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
    how: str = "as seen so far"
    """Where the factor comes from."""

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
        return f"{text}, at {self.factor:.2f} of the time of a machine of 2 cores, {self.how}"


def estimate(
    outcomes: Sequence[StepOutcome], *, again: bool = False, predicted: float | None = None
) -> Estimate:
    """From the seconds of the file; the steps that are done say how this machine differs.

    Without any, `predicted` does: seconds here / seconds of the file, by the predictor.
    """
    done = [each for each in outcomes if each.done]
    left = list(outcomes) if again else [each for each in outcomes if not each.done]
    ratios = [each.seconds / each.step.seconds for each in done if each.step.seconds]
    factor = statistics.median(ratios) if ratios else predicted
    known = [each.step.seconds for each in left if each.step.seconds]
    return Estimate(
        seconds=sum(known) * (factor or 1.0),
        steps=len(left),
        unknown=len(left) - len(known),
        factor=factor,
        how="as seen so far" if ratios else "by paceline forecast",
    )


def predicted_factor(outcomes: Sequence[StepOutcome], out: Path) -> float | None:
    """How much longer a training takes here than the file says, by `paceline forecast`.

    None where steps that are done know it better, where too little is left to be run, or where
    there is no training on this machine alone to go by. The answer is kept in OUT.
    """
    left = sum(each.step.seconds for each in outcomes if not each.done)
    known = any(each.done and each.step.seconds for each in outcomes)
    steps = [each.step for each in outcomes if _predictable(each.step)]
    if known or left < WORTH_PREDICTING or not steps:
        return None
    step = max(steps, key=lambda each: each.seconds)
    kept = out / "predicted.json"
    before = read_object(kept)
    if before.get("fingerprint") != step.fingerprint:
        before = {"fingerprint": step.fingerprint, "seconds": None}
        with contextlib.suppress(OSError):  # a folder that cannot be written is refused later
            before["seconds"] = _predict(step, out)
            write_json(kept, before)
    seconds = finite(before["seconds"])
    return None if seconds is None else seconds / step.seconds


def _predictable(step: StudyStep) -> bool:
    return step.kind == "train" and not step.hosts and step.seconds >= 60


def _predict(step: StudyStep, out: Path) -> float | None:
    """Seconds from the first update to the last."""
    work = Work(step=step, out=out / "predicted")
    work.folder.mkdir(parents=True, exist_ok=True)
    prepare(work)
    words = ["forecast", str(work.config), "--nodes", "1", "--link", "1Gbit/s,0.2ms", "--json"]
    with contextlib.suppress(subprocess.TimeoutExpired, ValueError, LookupError):
        done = subprocess.run(
            [*PACELINE, *words], capture_output=True, text=True, timeout=PREDICTION_SECONDS
        )
        return finite(parse_json(done.stdout)["rows"][0]["end_seconds"])
    return None
