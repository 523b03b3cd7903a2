"""Models of a user's own, as a file outside the package: `model = "own_models.py:build"`."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Skips(nn.Module):
    """Skip connections inside a block and across the whole model, ReLUs in place, no BatchNorm."""

    def __init__(self, channels: int = 1, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, 8, 3, padding=1)
        self.first = nn.Conv2d(8, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.third = nn.Conv2d(8, 8, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)
        self.pool = nn.AdaptiveAvgPool2d(4)
        self.head = nn.Linear(8 * 16, classes)

    def forward(self, images: Tensor, scale: Tensor | None = None) -> Tensor:
        stem = torch.relu(self.stem(images))
        hidden = self.relu(self.first(stem) + stem)
        hidden = self.relu(self.second(hidden))
        hidden = self.relu(self.third(hidden) + stem)  # crosses everything since the stem
        if scale is not None:
            hidden = hidden * scale
        return self.head(self.pool(hidden).view(hidden.size(0), -1))


class Conditional(nn.Module):
    """A condition on a shape, which FX cannot follow and `torch.export` can."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 6, 3, stride=2)
        self.second = nn.Conv2d(6, 12, 3, stride=2)
        self.head = nn.Linear(12 * 36, 10)

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.relu(self.first(images))
        if hidden.shape[2] > 4:
            hidden = torch.relu(self.second(hidden))
        return self.head(hidden.view(hidden.shape[0], -1))


class Opaque(nn.Module):
    """A layer whose inside no tracer can follow."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, inputs: Tensor) -> Tensor:
        if float(inputs.detach().sum()) > 1e30:
            return inputs
        return torch.tanh(self.linear(inputs))


def sequential_of_opaque() -> nn.Module:
    """Any `nn.Sequential` can be cut between its layers."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 16), Opaque(16), Opaque(16), nn.Linear(16, 10)
    )


def normalised() -> nn.Module:
    """BatchNorm of several kinds in both halves.

    No bias before it: BatchNorm takes it away again, and its gradient would be rounding alone.
    """
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2, bias=False),
        nn.BatchNorm2d(4, momentum=None),
        nn.ReLU(),
        nn.Conv2d(4, 6, 3, stride=2, bias=False),
        nn.BatchNorm2d(6, affine=False),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(6 * 36, 16, bias=False),
        nn.BatchNorm1d(16, track_running_stats=False),
        nn.Linear(16, 10),
    )


def synchronised() -> nn.Module:
    """What torch's own way to a BatchNorm over all processes makes of it."""
    return nn.SyncBatchNorm.convert_sync_batchnorm(normalised())


def with_dropout() -> nn.Module:
    """Dropout in the middle."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 10)
    )


def onto_one_pixel() -> nn.Module:
    """Convolutions whose output is a single pixel, of a picture of 2x2 and of 1x1."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=14, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.Flatten(),
        nn.Linear(16, 10),
    )


class UsedTwice(nn.Module):
    """A weight beside its layer, one that two layers share, a frozen layer, one left out."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Conv2d(1, 4, 3, stride=4).requires_grad_(False)
        self.norm = nn.BatchNorm2d(4)
        self.first = nn.Linear(4 * 49, 32)
        self.second = nn.Linear(32, 32)
        self.third = nn.Linear(32, 32)
        self.third.weight = self.second.weight
        self.left_out = nn.Linear(3, 5)
        self.head = nn.Linear(32, 10, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.relu(self.first(self.norm(self.frozen(images)).flatten(1)))
        hidden = self.third(torch.relu(self.second(hidden)))
        return self.head(hidden) + 0.5 * nn.functional.linear(hidden, self.head.weight)


def used_twice() -> nn.Module:
    """See `UsedTwice`."""
    return UsedTwice()


def build(channels: int = 1, classes: int = 10) -> nn.Module:
    """What a user's configuration names."""
    return Skips(channels, classes)
