"""VGG16 and VGG19, with torchvision's parameter names, shapes and initialisation."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

_WIDTHS = (64, 128, 256, 512, 512)


class VGG(nn.Module):
    """Five blocks of 3x3 convolutions, each ended by a max-pool, then three dense layers."""

    def __init__(
        self, depths: tuple[int, ...], *, classes: int, channels: int, dropout: float, pool: int
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs = channels
        for depth, width in zip(depths, _WIDTHS, strict=True):
            for _ in range(depth):
                layers += [nn.Conv2d(inputs, width, kernel_size=3, padding=1), nn.ReLU()]
                inputs = width
            layers.append(nn.MaxPool2d(kernel_size=2, stride=2))
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d((pool, pool))
        self.classifier = nn.Sequential(
            nn.Linear(512 * pool * pool, 4096),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(4096, 4096),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(4096, classes),
        )
        for module in self.modules():
            initialise(module)

    def forward(self, images: Tensor) -> Tensor:
        pooled = self.avgpool(self.features(images))
        return cast(Tensor, self.classifier(torch.flatten(pooled, 1)))


def initialise(module: nn.Module) -> None:
    """Give one layer the first weights that torchvision gives it."""
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        assert module.bias is not None
        nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, 0.0, 0.01)
        nn.init.zeros_(module.bias)


def vgg16(
    *, classes: int = 1000, channels: int = 3, dropout: float = 0.5, pool: int = 7
) -> nn.Module:
    """VGG16: 138,357,544 parameters at 1000 classes.

    A 32x32 image is one pixel after the five blocks: `pool=1` hands that to the dense layers
    instead of 49 copies of it (33,638,218 parameters at 10 classes).
    """
    depths = (2, 2, 3, 3, 3)
    return VGG(depths, classes=classes, channels=channels, dropout=dropout, pool=pool)


def vgg19(
    *, classes: int = 1000, channels: int = 3, dropout: float = 0.5, pool: int = 7
) -> nn.Module:
    """VGG19: 143,667,240 parameters at 1000 classes; `pool` as for VGG16."""
    depths = (2, 2, 4, 4, 4)
    return VGG(depths, classes=classes, channels=channels, dropout=dropout, pool=pool)
