"""A model that is another one in every process: weights and buffers drawn from NumPy, no seed.

`beginning` keeps the weights that it was built with, so that a test can train it again by hand.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn


class Unseeded(nn.Module):
    """Linear layers, a frozen one, a mask, and what all of them began with."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(784, 64).requires_grad_(False)
        self.fc = nn.Linear(64, 512)
        self.middle = nn.Linear(512, 512)
        self.head = nn.Linear(512, 10)
        generator = np.random.default_rng()
        with torch.no_grad():
            for parameter in self.parameters():
                drawn = generator.normal(0.0, 0.05, parameter.shape)
                parameter.copy_(torch.from_numpy(drawn))
        mask = torch.from_numpy(generator.random(512)) < 0.5
        self.register_buffer("mask", mask)
        weights = torch.cat([p.detach().flatten() for p in self.parameters()])
        self.register_buffer("beginning", weights.clone())

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.relu(self.fc(self.frozen(images.flatten(1)))) * self.mask
        return self.head(torch.relu(self.middle(hidden)))


def build() -> nn.Module:
    """See `Unseeded`."""
    return Unseeded()
