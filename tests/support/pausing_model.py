"""A model that thinks for a while at one update on one node: `pausing_model.py:build`."""

from __future__ import annotations

import os
import time

import torch
from torch import nn


class Pausing(nn.Module):
    def __init__(self, node: int, update: int, seconds: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
        self.update, self.seconds, self.seen = update, seconds, 0
        self.mine = os.environ.get("PACELINE_NODE") == str(node)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += 1
            if self.mine and self.seen == self.update:
                self.lost_in_thought()
            time.sleep(0.01)
        found: torch.Tensor = self.layers(images)
        return found

    def lost_in_thought(self) -> None:
        time.sleep(self.seconds)


def build(node: int = 1, update: int = 3, seconds: float = 0.0) -> nn.Module:
    return Pausing(node, update, seconds)
