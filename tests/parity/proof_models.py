"""Models and losses of a user's own, honest and not, for the proof of plans."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Chance(nn.Module):
    """Every kind of draw: a layer's, a function's, noise, a mask of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 24)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(24, 10)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.first(images.flatten(1))
        hidden = hidden + 0.1 * torch.randn_like(hidden)
        hidden = F.dropout(self.drop(torch.relu(hidden)), 0.3, training=self.training)
        kept = (torch.rand(len(images), 1) < 0.9).to(hidden.dtype)
        return self.head(hidden * kept)


class Parameters(nn.Module):
    """A shared weight, a frozen layer, a parameter that takes no part, BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(64, 32).requires_grad_(False)
        self.norm = nn.BatchNorm1d(32)
        self.first = nn.Linear(32, 32)
        self.second = nn.Linear(32, 32)
        self.second.weight = self.first.weight
        self.left_out = nn.Linear(3, 5)
        self.head = nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.norm(self.frozen(images.flatten(1)))
        return self.head(self.second(torch.relu(self.first(hidden))))


class Centred(nn.Module):
    """Takes the mean of the batch off: a sample's output depends on the others."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 16)
        self.head = nn.Linear(16, 10)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.first(images.flatten(1))
        return self.head(torch.relu(hidden - hidden.mean(dim=0)))


class Viewing(nn.Module):
    """Fails in channels_last alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3)
        self.head = nn.Linear(4 * 36, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.first(images).view(len(images), -1))


class RunAgain(nn.Module):
    """A layer that runs again under the backward pass, twice: more than DDP can follow."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 10)

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.relu(self.first(images.flatten(1)))
        for _ in range(2):
            hidden = torch.tanh(checkpoint(self.second, hidden, use_reentrant=True))
        return self.head(hidden)


def plain() -> nn.Module:
    """Two layers."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))


def smoothed(outputs: Tensor, targets: Tensor) -> Tensor:
    """A mean over samples."""
    return F.cross_entropy(outputs, targets, label_smoothing=0.1)


def weighted(outputs: Tensor, targets: Tensor) -> Tensor:
    """Divided by the weights of the batch's classes, not by its samples."""
    return F.cross_entropy(outputs, targets, weight=torch.linspace(0.2, 2.0, 10))


def ignoring(outputs: Tensor, targets: Tensor) -> Tensor:
    """Divided by the samples that are not of class 3."""
    return F.cross_entropy(outputs, targets, ignore_index=3)


def summed(outputs: Tensor, targets: Tensor) -> Tensor:
    """Not divided at all."""
    return F.cross_entropy(outputs, targets, reduction="sum")
