"""How well a trained model does, by the loss or the step that it was trained with."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import torch

from paceline.data.feed import evaluation_batches
from paceline.local.base import StepResult
from paceline.schema.checkpoint import read_state
from paceline.serve.trained import BATCH, Weights, open_trained
from paceline.training.carried import CARRIED
from paceline.training.given import Given, refuse_without_objects
from paceline.training.parts import make_parts
from paceline.training.team import means_of


def score(path: Path, given: Given | None, *, data: Any, weights: Weights) -> dict[str, float]:
    """Means over the run's test data, or over `data`, of everything that evaluations report.

    `given`: what the run was trained with as objects of a Python program.
    """
    trained = open_trained(path, weights=weights, factory=given.model if given else None)
    refuse_without_objects(trained.config, given)
    if data is not None:
        given = dataclasses.replace(given or Given(), data=(data, data))
    parts = make_parts(trained.config, given)
    found, size = StepResult(), BATCH
    if CARRIED in read_state(trained.checkpoint).optimizer_numbers:  # it may want batches alike
        size = trained.config.workload.global_batch(1)
    try:
        with torch.no_grad():
            for batch in evaluation_batches(parts.dataset.test, batch_size=size):
                measure = parts.step(trained.model, batch.samples.values)
                found += StepResult.of(measure, batch.count, 0.0)
    finally:
        parts.dataset.close()
    means = {name: value for name, value in means_of(found.sums).items() if value is not None}
    if not math.isnan(found.correct):
        means = {"accuracy": found.correct / found.samples, **means}
    return {
        "samples": found.samples,
        "loss": found.loss_sum / found.weight if found.weight else math.nan,
        **means,
    }
