"""Loss, accuracy and top-5 on the test data, each rank reading its own part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.data.base import Source
from paceline.data.feed import evaluation_batches
from paceline.local.base import Job, LocalStrategy, autocast, full_precision, layout, scored
from paceline.train.team import Team


@dataclass(frozen=True, kw_only=True)
class Score:
    """How well the model does."""

    loss: float
    accuracy: float
    top5: float


def evaluate(
    strategy: LocalStrategy, job: Job, source: Source, team: Team, shares: Sequence[float]
) -> Score:
    """Score the current weights on `source`; every rank calls it and gets the same answer."""
    model = strategy.model
    loss_sum = 0.0
    correct = top5 = samples = 0
    model.eval()
    with torch.no_grad():
        batches = evaluation_batches(
            source,
            batch_size=max(32, min(job.batch_size, 256)),
            worker=team.context.rank,
            shares=shares,
        )
        for batch in batches:
            targets = batch.targets.to(job.device)
            with autocast(job):
                outputs = full_precision(scored(model, layout(job, batch.inputs)))
            loss_sum += float(job.loss(outputs, targets)) * batch.count
            samples += batch.count
            hits = _ranked_hits(outputs, targets)
            correct += hits[0]
            top5 += hits[1]
    model.train()
    total_loss, total_correct, total_top5, total = team.sum(
        [loss_sum, correct, top5, samples], "evaluate"
    )
    return Score(loss=total_loss / total, accuracy=total_correct / total, top5=total_top5 / total)


def _ranked_hits(outputs: object, targets: torch.Tensor) -> tuple[int, int]:
    """How many targets are the first guess, and how many among the first five."""
    if not isinstance(outputs, torch.Tensor):
        return 0, 0
    if outputs.dim() != 2 or targets.dim() != 1 or targets.is_floating_point():
        return 0, 0
    guesses = outputs.topk(min(5, outputs.shape[1]), dim=1).indices
    hits = guesses == targets.unsqueeze(1)
    return int(hits[:, 0].sum()), int(hits.any(dim=1).sum())
