"""AlexNet in its one-tower form, with torchvision's parameter names and shapes."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn


class AlexNet(nn.Module):
    """Five convolutions and three dense layers, which hold most of the weights."""

    def __init__(
        self, *, classes: int, channels: int, dropout: float, stem: str, pool: int
    ) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(channels, 64, kernel_size=11, stride=4, padding=2)
            if stem == "imagenet"
            else nn.Conv2d(channels, 64, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(kernel_size=3, stride=2),
            nn.Conv2d(64, 192, kernel_size=5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(kernel_size=3, stride=2),
            nn.Conv2d(192, 384, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(384, 256, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(256, 256, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(kernel_size=3, stride=2),
        )
        self.avgpool = nn.AdaptiveAvgPool2d((pool, pool))
        self.classifier = nn.Sequential(
            nn.Dropout(dropout),
            nn.Linear(256 * pool * pool, 4096),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(4096, 4096),
            nn.ReLU(),
            nn.Linear(4096, classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        pooled = self.avgpool(self.features(images))
        return cast(Tensor, self.classifier(torch.flatten(pooled, 1)))


def alexnet(
    *,
    classes: int = 1000,
    channels: int = 3,
    dropout: float = 0.5,
    stem: str = "imagenet",
    pool: int = 6,
) -> nn.Module:
    """AlexNet: 61,100,840 parameters at 1000 classes.

    On 32x32 images eleven pixels every four leave nothing to pool: with `stem="small"` the first
    convolution is 3x3 at stride 1, and `pool=3` is what its five convolutions then end with.
    """
    return AlexNet(classes=classes, channels=channels, dropout=dropout, stem=stem, pool=pool)
