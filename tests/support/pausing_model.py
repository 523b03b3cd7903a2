"""A model that keeps one node from going on: `pausing_model.py:build`.

At `update` it thinks until the file `until` is there; `each` are seconds more for every update.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import nn


class Pausing(nn.Module):
    def __init__(self, node: int, update: int, until: str, each: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
        self.update, self.until, self.seen = update, Path(until), 0
        self.mine = os.environ.get("PACELINE_NODE") == str(node)
        self.each = 0.01 + (each if self.mine else 0.0)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += 1
            if self.mine and self.seen == self.update:
                self.lost_in_thought()
            time.sleep(self.each)
        found: torch.Tensor = self.layers(images)
        return found

    def lost_in_thought(self) -> None:
        while not self.until.exists():
            time.sleep(0.05)


def build(node: int = 1, update: int = 0, until: str = "", each: float = 0.0) -> nn.Module:
    return Pausing(node, update, until, each)
