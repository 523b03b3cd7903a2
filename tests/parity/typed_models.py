"""Models with weights of other types than float32, with sparse gradients, or with late ones."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Typed(nn.Module):
    """A linear layer whose weights have a type of their own between two of float32."""

    def __init__(self, kind: str = "bfloat16", channels: int = 1, classes: int = 10) -> None:
        super().__init__()
        self.kind = getattr(torch, kind)
        self.pool = nn.AdaptiveAvgPool2d(4)
        self.first = nn.Linear(16 * channels, 24)
        self.weight = nn.Parameter(torch.randn(24, 24).div_(5).to(self.kind))
        self.head = nn.Linear(24, classes)

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.relu(self.first(self.pool(images).flatten(1)))
        mixed = hidden.to(self.kind) @ self.weight
        if mixed.is_complex():
            mixed = mixed.real + mixed.imag
        result: Tensor = self.head(mixed.float())
        return result


class Sparse(nn.Module):
    """A bag of embeddings, of which an update touches a few."""

    def __init__(self, channels: int = 1, classes: int = 10) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(3)
        self.words = nn.Embedding(50, 12, sparse=True)
        self.head = nn.Linear(12, classes)

    def forward(self, images: Tensor) -> Tensor:
        words = self.pool(images).flatten(1).mul(40).abs().long().clamp_(max=49)
        result: Tensor = self.head(self.words(words).mean(1))
        return result


class Late(nn.Module):
    """A layer that has a gradient from the fourth update on, and one that never has."""

    calls: Tensor

    def __init__(self, channels: int = 1, classes: int = 10) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(4)
        self.never = nn.Linear(16, 16)
        self.first = nn.Linear(16 * channels, 24)
        self.late = nn.Linear(24, 24)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.head = nn.Linear(24, classes)
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.relu(self.first(self.pool(images).flatten(1)))
        if self.training:
            self.calls += 1
        if int(self.calls) > 3:
            hidden = hidden + torch.relu(self.late(hidden))
        result: Tensor = self.head(hidden) * self.scale
        return result
