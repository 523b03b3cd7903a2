"""A model whose computing is sleeping: hosts that share cores do not slow each other down."""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn

from paceline.local.cores import quota_cores

SECONDS = 0.012
"""For each sample of a forward pass in training."""


class Sleeping(nn.Module):
    """Two layers, and time passes: with `cores`, longer while its host has fewer than these."""

    def __init__(self, *, seconds: float = SECONDS, cores: float | None = None) -> None:
        super().__init__()
        self.seconds, self.cores = seconds, cores
        self.first = nn.Linear(784, 64)
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        if self.training and self.seconds:
            slower = self.cores / (quota_cores() or self.cores) if self.cores else 1.0
            time.sleep(self.seconds * len(images) * slower)
        result: Tensor = self.head(torch.relu(self.first(images.flatten(1))))
        return result


def sleeping(seconds: float = SECONDS, cores: float | None = None) -> nn.Module:
    """What `workload.model` names."""
    return Sleeping(seconds=seconds, cores=cores)
