"""Loss, and where there are classes accuracy and top-5, on the test data, by all ranks together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from paceline.data.base import Source
from paceline.data.feed import evaluation_batches
from paceline.errors import DataError
from paceline.local.base import (
    Job,
    LocalStrategy,
    StepResult,
    autocast,
    placed,
)
from paceline.training.carried import Carried
from paceline.training.team import Team, added_up, agreed_names, means_of

LOSS, HITS = ":loss", ":hits"
"""Under which sums are added up that every step has; the user's names have no colon first."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """How well the model does."""

    loss: float
    """The mean of the batches' losses, by their weights."""
    accuracy: float | None
    """None where there are no classes, as `top5`."""
    top5: float | None
    metrics: dict[str, float | None] = field(default_factory=dict)
    """What else the step reports."""


def existing(value: float) -> float | None:
    """None for what does not exist, as the accuracy of a regression: JSON has no NaN."""
    return None if math.isnan(value) else value


def evaluate(
    strategy: LocalStrategy,
    job: Job,
    source: Source,
    team: Team,
    shares: Sequence[float],
    carried: Carried,
) -> Score:
    """Score the current weights on all of `source`; every rank calls it and gets the same answer.

    What the model has `carried` stays the training's; it reads the test data from its beginning.

    `shares` are the ranks' parts where all are there; a part of the test set is never scored for
    the whole: where a rank was lost on the way, those who are left divide it again.
    """
    divided: list[float] | None = None
    total = 0.0
    while True:
        before, divided = divided, team.evaluation_shares(list(shares))
        if divided == before:
            raise DataError(
                f"an evaluation covered {total:.0f} samples, but the test data says that it has"
                f" {len(source)}: give it a length that is true"
            )
        alike = carried.is_there
        with carried.set_aside():
            tally = _tally(strategy, job, source, team.context.rank, divided, alike=alike)
        names = agreed_names(team, job.step, tally.sums, ["top5"])
        # All at once: a rank that is lost between two sums would be in one of them.
        own = {LOSS: (tally.loss_sum, tally.weight), HITS: (tally.correct, float(tally.samples))}
        sums = added_up(team, [LOSS, HITS, *names], own | tally.sums, "evaluate")
        (loss, weight), (correct, total) = sums.pop(LOSS), sums.pop(HITS)
        means = means_of(sums)
        if total == len(source):
            return Score(
                loss=loss / weight if weight else math.nan,
                accuracy=means.get("accuracy", existing(correct / total)),
                top5=means.pop("top5"),
                metrics=means,
            )


def _tally(
    strategy: LocalStrategy,
    job: Job,
    source: Source,
    rank: int,
    shares: Sequence[float],
    *,
    alike: bool,
) -> StepResult:
    """Everything that is reported, of a rank's part; `alike`: in batches as the training's."""
    model = strategy.model
    found = StepResult()
    batch_size = job.batch_size if alike else max(32, min(job.batch_size, 256))
    model.eval()
    with torch.no_grad():
        for batch in evaluation_batches(source, batch_size=batch_size, worker=rank, shares=shares):
            values = placed(job, batch.samples.values)
            with autocast(job):
                measure = job.step(model, values)
            found += StepResult.of(measure, batch.count, 0.0)
    model.train()
    return found


def has_classes(strategy: LocalStrategy, job: Job, source: Source) -> bool:
    """Whether evaluations will have an accuracy: the untrained model on one or two samples."""
    found = source.samples(np.arange(min(2, len(source))), epoch=0, augment=False)
    model = strategy.model
    model.eval()
    with torch.no_grad(), torch.random.fork_rng(), autocast(job):
        measure = job.step(model, placed(job, found.values))
    model.train()
    return "accuracy" in measure.sums or not math.isnan(measure.correct)
