"""A model with a dropout between linear layers that notes which values it dropped."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn


class NotedDropout(nn.Dropout):
    """Writes every mask to the folder in MASKS: `update-process.pt`."""

    updates = 0

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        result = super().forward(values)
        if self.training:
            name = f"{self.updates}-{os.getpid()}.pt"
            torch.save(result.detach() != 0, Path(os.environ["MASKS"]) / name)
            self.updates += 1
        return result


NotedDropout.__name__ = "Dropout"  # chains of linear layers know layers by their name


def build(channels: int = 1, classes: int = 10) -> nn.Module:
    """Two linear layers with a dropout between them; no ReLU, so that only it makes zeros."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(channels * 28 * 28, 32), NotedDropout(0.5), nn.Linear(32, classes)
    )
