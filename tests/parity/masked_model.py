"""A model with a dropout between linear layers, and a note of which values were dropped."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

_drop = functional.dropout
_numbers = itertools.count()


def _noted_dropout(values: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
    """Write every mask to the folder in MASKS: `number-process.pt`.

    Below the layer: between split layers stands exactly an nn.Dropout. The updates of a proof drop
    nothing and are not noted, nor are evaluations.
    """
    result = _drop(values, *arguments, **named)
    kept = result.detach() != 0
    if not kept.all():
        name = f"{next(_numbers)}-{os.getpid()}.pt"
        torch.save(kept, Path(os.environ["MASKS"]) / name)
    return result


if "PACELINE_NODE" in os.environ:  # in the processes that train, not in the test's own
    functional.dropout = _noted_dropout


def build(channels: int = 1, classes: int = 10) -> nn.Module:
    """Two linear layers with a dropout between them; no ReLU, so that only it makes zeros."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(channels * 28 * 28, 32), nn.Dropout(0.5), nn.Linear(32, classes)
    )
