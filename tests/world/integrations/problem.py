"""What the scripts beside it train: a small regression whose last batch is short."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset


def data() -> TensorDataset:
    """150 samples: four batches of 32, and one of 22."""
    generator = torch.Generator().manual_seed(11)
    inputs = torch.randn(150, 6, generator=generator)
    return TensorDataset(inputs, inputs[:, :2] ** 2 + inputs[:, 2:4])


def net(norm: bool = False) -> nn.Module:
    """The same weights everywhere."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        middle = nn.BatchNorm1d(16) if norm else nn.Tanh()
        return nn.Sequential(nn.Linear(6, 16), middle, nn.Linear(16, 2))
