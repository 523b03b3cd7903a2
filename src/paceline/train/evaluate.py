"""Loss, and where there are classes accuracy and top-5, on the test data, by all ranks together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from paceline.data.base import Source
from paceline.data.feed import evaluation_batches
from paceline.errors import DataError
from paceline.local.base import (
    Job,
    LocalStrategy,
    are_classes,
    autocast,
    full_precision,
    layout,
    scored,
)
from paceline.train.team import Team


@dataclass(frozen=True, kw_only=True)
class Score:
    """How well the model does."""

    loss: float
    """The mean of the batches' losses, weighted by their samples."""
    accuracy: float | None
    """None where there are no classes, as `top5`."""
    top5: float | None


def existing(value: float) -> float | None:
    """None for what does not exist, as the accuracy of a regression: JSON has no NaN."""
    return None if math.isnan(value) else value


def evaluate(
    strategy: LocalStrategy, job: Job, source: Source, team: Team, shares: Sequence[float]
) -> Score:
    """Score the current weights on all of `source`; every rank calls it and gets the same answer.

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
        sums = _sums(strategy, job, source, team.context.rank, divided)
        loss, correct, top5, total = team.sum(sums, "evaluate")
        if total == len(source):
            return Score(
                loss=loss / total, accuracy=existing(correct / total), top5=existing(top5 / total)
            )


def _sums(
    strategy: LocalStrategy, job: Job, source: Source, rank: int, shares: Sequence[float]
) -> list[float]:
    """Losses, right first guesses, right among five, and samples of a rank's part."""
    model = strategy.model
    sums = [0.0, 0.0, 0.0, 0.0]
    batch_size = max(32, min(job.batch_size, 256))
    model.eval()
    with torch.no_grad():
        for batch in evaluation_batches(source, batch_size=batch_size, worker=rank, shares=shares):
            targets = batch.targets.to(job.device)
            with autocast(job):
                outputs = full_precision(scored(model, layout(job, batch.inputs)))
            loss = float(job.loss(outputs, targets)) * batch.count
            found = (loss, *_ranked_hits(outputs, targets), batch.count)
            sums = [old + new for old, new in zip(sums, found, strict=True)]
    model.train()
    return sums


def _ranked_hits(outputs: Any, targets: torch.Tensor) -> tuple[float, float]:
    """How many targets are the first guess, and among the first five; NaN without classes."""
    if not are_classes(outputs, targets):
        return math.nan, math.nan
    guesses = outputs.topk(min(5, outputs.shape[1]), dim=1).indices
    hits = guesses == targets.unsqueeze(1)
    return float(hits[:, 0].sum()), float(hits.any(dim=1).sum())


def has_classes(strategy: LocalStrategy, job: Job, source: Source) -> bool:
    """Whether evaluations will have an accuracy: the untrained model on one or two samples."""
    inputs, targets = source.fetch(np.arange(min(2, len(source))), epoch=0, augment=False)
    model = strategy.model
    model.eval()
    with torch.no_grad(), torch.random.fork_rng(), autocast(job):
        outputs = full_precision(scored(model, layout(job, inputs)))
    model.train()
    return are_classes(outputs, targets)
