"""Stages on nodes: where to cut, how long a step takes, and how much of it is bubble."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.cost.model import ModelCost
from paceline.cost.transfer import Wire
from paceline.errors import StrategyError


def bubble_part(stages: int, micro_batches: int) -> float:
    """Part of the time that equal stages stand idle, in GPipe and 1F1B: (S-1) / (M+S-1).

    >>> bubble_part(4, 12)
    0.2
    """
    return (stages - 1) / (micro_batches + stages - 1)


def pipeline_seconds(slowest: float, stages: int, micro_batches: int) -> float:
    """A step of M micro-batches through S stages: (M + S - 1) x the slowest stage's time.

    `slowest` is its forward and backward of one micro-batch, sending and receiving included.
    Exact for equal stages; for unequal ones an upper bound (the simulator says how far).
    """
    return (micro_batches + stages - 1) * slowest


@dataclass(frozen=True)
class Stage:
    """Layers first to end - 1, on one node."""

    first: int
    end: int
    part: float
    """Of the computing time."""
    parameter_bytes: float
    boundary_bytes: float
    """Activations per sample that leave it; 0 for the last one."""


def cut(model: ModelCost, speeds: Sequence[float]) -> tuple[Stage, ...]:
    """One stage per node, in order, so that the slowest is as fast as can be.

    Minimises max_s (sum of the parts of its layers) / speed_s over all cuts, by dynamic
    programming (layers squared times stages), remembered for the same model and speeds.
    """
    fastest = max(speeds)
    return _cut(model, tuple(round(speed / fastest, 9) for speed in speeds))


@functools.lru_cache(maxsize=256)
def _cut(model: ModelCost, speeds: tuple[float, ...]) -> tuple[Stage, ...]:
    layers, stages = model.layers, len(speeds)
    if not 1 <= stages <= len(layers):
        raise StrategyError(
            f"{len(layers)} layers cannot be cut into {stages} stages: use at most"
            f" {len(layers)} nodes for a pipeline"
        )
    elapsed = [0.0]
    for layer in layers:
        elapsed.append(elapsed[-1] + layer.forward + layer.backward)
    best: list[tuple[float, tuple[int, ...]]] = [
        (elapsed[end] / speeds[0], ()) for end in range(len(layers) + 1)
    ]
    for stage in range(1, stages):
        longer: list[tuple[float, tuple[int, ...]]] = [(math.inf, ())] * (len(layers) + 1)
        for end in range(stage + 1, len(layers) + 1):
            longer[end] = min(
                (
                    max(best[first][0], (elapsed[end] - elapsed[first]) / speeds[stage]),
                    (*best[first][1], first),
                )
                for first in range(stage, end)
            )
        best = longer
    bounds = [0, *best[len(layers)][1], len(layers)]
    return tuple(
        Stage(
            first=first,
            end=end,
            part=elapsed[end] - elapsed[first],
            parameter_bytes=sum(layer.parameter_bytes for layer in layers[first:end]),
            boundary_bytes=layers[end - 1].output_bytes if end < len(layers) else 0.0,
        )
        for first, end in itertools.pairwise(bounds)
    )


def transfer_seconds(wire: Wire, stages: Sequence[Stage], place: int, samples: float) -> float:
    """What a stage's two ends cost per micro-batch of `samples`.

    per end 2 (a + o + samples x / B), activations one way and gradients the other; the
    process that computes a stage also sends and receives, so nothing hides.
    """
    ends = [stages[place].boundary_bytes] if place + 1 < len(stages) else []
    if place:
        ends.append(stages[place - 1].boundary_bytes)
    return sum(2 * (wire.latency + wire.message + samples * x / wire.bandwidth) for x in ends)
