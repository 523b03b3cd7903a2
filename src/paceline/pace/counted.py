"""Losses that are no means over samples, as far as the graph of a loss shows it.

`cross_entropy` is a mean over the targets that count: not those of `ignore_index`, each by the
weight of its class. Ranks whose parts count for different amounts would add up other gradients than
one process has, in silence; the operation itself remembers by what it divided.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from paceline.errors import ConfigError

NEAR = 64
"""Operations that are looked at, the loss's own first: a sum of several losses, scaled ones."""
OPERATIONS = ("NllLossBackward0", "NllLoss2DBackward0")
MEAN = 1
"""How these operations name the reduction 'mean'."""


def refuse_unweighed(loss: torch.Tensor, samples: float) -> None:
    """Refuse a loss without a weight that is a mean over something else than `samples`."""
    for node in near(loss):
        if node.name() not in OPERATIONS or node._saved_reduction != MEAN:
            continue
        total, targets = float(node._saved_total_weight), node._saved_target.numel()
        if total == targets and targets % samples == 0:
            continue
        if total == targets:
            what = f"{targets} targets for {samples:g} samples"
            weight = "their number, as weight=len(targets)"
        elif node._saved_weight is None:
            what = f"{total:g} of {targets} targets (ignore_index leaves out the others)"
            weight = "that number, as weight=(targets != ignore_index).sum()"
        else:
            what = f"targets by the weights of their classes, {total:g} for {targets}"
            weight = "their sum, as weight=class_weights[targets].sum()"
        raise ConfigError(
            f"pace.backward(loss): cross entropy is a mean over {what}, and not over the samples of"
            f" the batch, so that parts of it would not add up: say {weight}"
        )


def near(loss: torch.Tensor) -> list[Any]:
    waiting: deque[Any] = deque([loss.grad_fn])
    found: dict[int, Any] = {}
    while waiting and len(found) < NEAR:
        node = waiting.popleft()
        if node is not None and id(node) not in found:
            found[id(node)] = node
            waiting += [following for following, _ in node.next_functions]
    return list(found.values())
