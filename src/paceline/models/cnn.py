"""The two small networks for 28x28 images."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn


class ConvolutionalNetwork(nn.Module):
    """Convolutions, flatten, dense layers: `features` then `classifier`."""

    def __init__(self, features: nn.Sequential, classifier: nn.Sequential) -> None:
        super().__init__()
        self.features = features
        self.classifier = classifier

    def forward(self, images: Tensor) -> Tensor:
        flat = torch.flatten(self.features(images), 1)
        return cast(Tensor, self.classifier(flat))


def mnist_cnn(
    *, classes: int = 10, channels: int = 1, image_size: int = 28, dropout: float = 0.5
) -> nn.Module:
    """The network of the MNIST study: 690,590 parameters for 1x28x28 and ten classes.

    Sides at 28: 28 -> 26 -> 13 -> 11 -> 5 -> 3 -> 1.
    """
    side = image_size
    for _ in range(3):
        side = (side - 2) // 2
    features = nn.Sequential(
        nn.Conv2d(channels, 32, kernel_size=3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 128, kernel_size=3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(128, 256, kernel_size=3),
        nn.ReLU(),
        nn.MaxPool2d(2),
    )
    classifier = nn.Sequential(
        nn.Dropout(dropout),
        nn.Linear(256 * side * side, 1000),
        nn.ReLU(),
        nn.Linear(1000, 100),
        nn.ReLU(),
        nn.Linear(100, classes),
    )
    return ConvolutionalNetwork(features, classifier)


def shallow_cnn(*, classes: int = 10, channels: int = 1, image_size: int = 28) -> nn.Module:
    """Two convolutions with pooling, then 800 -> 500 -> classes for 28x28.

    Sides at 28: 28 -> 24 -> 12 -> 8 -> 4, and 50 x 4 x 4 = 800.
    """
    side = image_size
    for _ in range(2):
        side = (side - 4) // 2
    features = nn.Sequential(
        nn.Conv2d(channels, 20, kernel_size=5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(20, 50, kernel_size=5),
        nn.ReLU(),
        nn.MaxPool2d(2),
    )
    classifier = nn.Sequential(
        nn.Linear(50 * side * side, 500),
        nn.ReLU(),
        nn.Linear(500, classes),
    )
    return ConvolutionalNetwork(features, classifier)
