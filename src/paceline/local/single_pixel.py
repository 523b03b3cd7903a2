"""Convolutions whose output is a single pixel, computed as the linear layers that they are.

The last stage of a ResNet on images of 28x28 or 32x32 has 3x3 kernels on a picture of 1x1: eight of
nine weights only ever meet padding, and libraries for convolutions, made for pictures, take one
row at a time. As one product of matrices over the whole batch, of the weights that meet the
picture, it is the same sum in a fraction of the time. Weights that meet only padding get a
gradient of zero, as ever.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class SinglePixelConv2d(nn.Conv2d):
    """A convolution that is a linear layer where its output is one pixel; else as ever."""

    # Tracers take what torch itself defines for one operation, and look into anything else.
    __module__ = nn.Conv2d.__module__

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The same as nn.Conv2d's."""
        if inputs.dim() != 4:
            return super().forward(inputs)
        rows = met(inputs.shape[2], *(int(pair[0]) for pair in self._sides))
        columns = met(inputs.shape[3], *(int(pair[1]) for pair in self._sides))
        if rows is None or columns is None:
            return super().forward(inputs)
        picture = inputs[:, :, rows[1], columns[1]].flatten(1)
        weight = MetWeights.apply(self.weight, rows[0], columns[0])  # type: ignore[no-untyped-call]
        return F.linear(picture, weight, self.bias)[:, :, None, None]

    @property
    def _sides(self) -> tuple[tuple[int, ...], ...]:
        assert not isinstance(self.padding, str)
        return self.kernel_size, self.stride, self.padding


class MetWeights(torch.autograd.Function):
    """The weights that meet the picture, a row for each output channel.

    Slicing would do the same, but its gradient is filled with zeros once for each side, and copied
    once more where the weights are in channels_last: here it is laid out like them at once.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(weight: torch.Tensor, rows: slice, columns: slice) -> torch.Tensor:
        return weight[:, :, rows, columns].flatten(1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        weight, *place = inputs
        ctx.place, ctx.layout = place, (weight.shape, weight.stride())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        whole = gradient.new_empty_strided(*ctx.layout).zero_()
        part = whole[:, :, *ctx.place]
        part.copy_(gradient.reshape(part.shape))
        return whole, None, None


def met(size: int, kernel: int, stride: int, padding: int) -> tuple[slice, slice] | None:
    """Which weights meet which part of a side of the picture; None if the output is longer than 1.

    >>> met(1, 3, 1, 1)
    (slice(1, 2, None), slice(0, 1, None))
    >>> met(2, 3, 2, 1)
    (slice(1, 3, None), slice(0, 2, None))
    >>> met(2, 3, 1, 1) is None
    True
    """
    if padding >= kernel or not 0 <= size + 2 * padding - kernel < stride:
        return None
    last = min(kernel, padding + size)
    return slice(padding, last), slice(0, last - padding)


def use_single_pixels(model: nn.Module) -> None:
    """Let every plain convolution of the model be a linear layer where it can."""
    for module in model.modules():
        if (
            type(module) is nn.Conv2d
            and module.groups == 1
            and module.padding_mode == "zeros"
            and not isinstance(module.padding, str)
            and tuple(module.dilation) == (1, 1)
            and max(module.kernel_size) > 1
        ):
            module.__class__ = SinglePixelConv2d
