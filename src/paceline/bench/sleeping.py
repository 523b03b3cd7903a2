"""A model whose computing is sleeping: hosts that share cores do not slow each other down."""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn

SECONDS = 0.004
"""For each sample of a forward pass in training."""


class Sleeping(nn.Module):
    """Two layers, and time passes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(784, 64)
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            time.sleep(SECONDS * len(images))
        result: Tensor = self.head(torch.relu(self.first(images.flatten(1))))
        return result


def sleeping() -> nn.Module:
    """What `workload.model` names."""
    return Sleeping()
