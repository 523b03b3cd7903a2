"""From the outputs of a model to what they say: the likeliest classes, with probabilities."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline.errors import ModelError
from paceline.schema.signature import Signature

TOP = 5
"""Guesses that are told of a sample, as top-5 accuracy counts them."""


@dataclass(frozen=True, kw_only=True)
class Guess:
    label: str
    probability: float


def probabilities(outputs: np.ndarray) -> np.ndarray:
    """Softmax over the last axis: what cross entropy trains the outputs to be the logarithm of.

    >>> probabilities(np.array([[0.0, 0.0]]))
    array([[0.5, 0.5]])
    """
    wide = outputs.astype(np.float64)
    raised = np.exp(wide - wide.max(axis=-1, keepdims=True))
    return np.asarray(raised / raised.sum(axis=-1, keepdims=True))


def top_guesses(outputs: np.ndarray, signature: Signature, count: int = TOP) -> list[list[Guess]]:
    """The likeliest classes of every sample, the likeliest first; of equals the first class."""
    if np.isnan(outputs).any():
        raise ModelError(
            "the model gives outputs that are no numbers (nan), of which no class can be told:"
            " look for nan in the inputs and in the weights"
        )
    found = []
    for row in probabilities(outputs):
        best = np.argsort(-row, kind="stable")[:count]
        found.append(
            [Guess(label=signature.label(int(n)), probability=float(row[n])) for n in best]
        )
    return found
