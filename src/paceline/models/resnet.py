"""ResNets, with torchvision's parameter names, shapes and initialisation.

ReLU works in place here, on the output of a BatchNorm or of an addition that
nobody else reads (about 5% of a step on 28x28 images). The addition does not, so
a pipeline may cut between any two blocks and after any ReLU. A cut just before
a ReLU would hand it a leaf tensor, which autograd does not let it overwrite.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from paceline.errors import ModelError


def _convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    """A convolution that keeps the side at stride 1; BatchNorm follows, so no bias."""
    return nn.Conv2d(
        inputs, outputs, kernel_size=size, stride=stride, padding=size // 2, bias=False
    )


class BasicBlock(nn.Module):
    """Two 3x3 convolutions around a skip connection."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int, downsample: nn.Module | None) -> None:
        super().__init__()
        self.conv1 = _convolution(inputs, width, 3, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = _convolution(width, width, 3)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = downsample

    def forward(self, inputs: Tensor) -> Tensor:
        skip = inputs if self.downsample is None else self.downsample(inputs)
        hidden = self.relu(self.bn1(self.conv1(inputs)))
        hidden = self.bn2(self.conv2(hidden))
        return cast(Tensor, self.relu(hidden + skip))


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions around a skip connection; the 3x3 carries the stride."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int, downsample: nn.Module | None) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.conv1 = _convolution(inputs, width, 1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _convolution(width, width, 3, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = _convolution(width, outputs, 1)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample

    def forward(self, inputs: Tensor) -> Tensor:
        skip = inputs if self.downsample is None else self.downsample(inputs)
        hidden = self.relu(self.bn1(self.conv1(inputs)))
        hidden = self.relu(self.bn2(self.conv2(hidden)))
        hidden = self.bn3(self.conv3(hidden))
        return cast(Tensor, self.relu(hidden + skip))


class ResNet(nn.Module):
    """A stem, four layers of residual blocks, global average pooling, one dense layer."""

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        depths: tuple[int, int, int, int],
        *,
        classes: int,
        channels: int,
        stem: str,
    ) -> None:
        super().__init__()
        if stem not in ("imagenet", "small"):
            raise ModelError(f"stem = {stem!r}: must be 'imagenet' or 'small'")
        self.conv1 = (
            _convolution(channels, 64, 7, 2)
            if stem == "imagenet"
            else _convolution(channels, 64, 3)
        )
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = (
            nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
            if stem == "imagenet"
            else nn.Identity()
        )
        self.layer1 = _layer(block, 64, 64, depths[0], 1)
        self.layer2 = _layer(block, 64 * block.expansion, 128, depths[1], 2)
        self.layer3 = _layer(block, 128 * block.expansion, 256, depths[2], 2)
        self.layer4 = _layer(block, 256 * block.expansion, 512, depths[3], 2)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(512 * block.expansion, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        hidden = self.layer4(self.layer3(self.layer2(self.layer1(hidden))))
        return cast(Tensor, self.fc(torch.flatten(self.avgpool(hidden), 1)))


def _layer(
    block: type[BasicBlock] | type[Bottleneck], inputs: int, width: int, depth: int, stride: int
) -> nn.Sequential:
    """`depth` blocks; the first changes the shape, so its skip connection has to as well."""
    outputs = width * block.expansion
    downsample = None
    if stride != 1 or inputs != outputs:
        downsample = nn.Sequential(
            _convolution(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs)
        )
    blocks = [block(inputs, width, stride, downsample)]
    blocks += [block(outputs, width, 1, None) for _ in range(depth - 1)]
    return nn.Sequential(*blocks)


def resnet18(*, classes: int = 1000, channels: int = 3, stem: str = "imagenet") -> nn.Module:
    """ResNet-18: 11,689,512 parameters at 1000 classes."""
    return ResNet(BasicBlock, (2, 2, 2, 2), classes=classes, channels=channels, stem=stem)


def resnet34(*, classes: int = 1000, channels: int = 3, stem: str = "imagenet") -> nn.Module:
    """ResNet-34: 21,797,672 parameters at 1000 classes."""
    return ResNet(BasicBlock, (3, 4, 6, 3), classes=classes, channels=channels, stem=stem)


def resnet50(*, classes: int = 1000, channels: int = 3, stem: str = "imagenet") -> nn.Module:
    """ResNet-50: 25,557,032 parameters at 1000 classes."""
    return ResNet(Bottleneck, (3, 4, 6, 3), classes=classes, channels=channels, stem=stem)


def resnet152(*, classes: int = 1000, channels: int = 3, stem: str = "imagenet") -> nn.Module:
    """ResNet-152: 60,192,808 parameters at 1000 classes."""
    return ResNet(Bottleneck, (3, 8, 36, 3), classes=classes, channels=channels, stem=stem)
