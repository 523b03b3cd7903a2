"""The profile of layers, on layers that take a known time and on ones of known size."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from paceline.hardware.profile import batch_sizes, figure, profile_layers


class _Takes(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, clock: list[float], forward: float, backward: float
    ) -> torch.Tensor:
        ctx.clock, ctx.backward_seconds = clock, backward
        clock[0] += forward
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.clock[0] += ctx.backward_seconds
        return gradients[0], None, None, None


class Taking(nn.Module):
    """A layer that takes a known time of a clock that only such layers move."""

    def __init__(self, clock: list[float], forward: float, backward: float) -> None:
        super().__init__()
        self.given = clock, forward, backward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _Takes.apply(x, *self.given)
        return result


def test_every_layer_has_its_own_time() -> None:
    clock = [0.0]
    model = nn.Sequential(Taking(clock, 2, 4), nn.ReLU(inplace=True), Taking(clock, 4, 1))
    layers = profile_layers(model, torch.ones(4, 3), rounds=3, clock=lambda: clock[0])
    times = [(layer.forward.median, layer.backward.median) for layer in layers]
    assert times == [(2.0, 4.0), (0.0, 0.0), (4.0, 1.0)]
    assert all(layer.forward.low == layer.forward.high for layer in layers)


def test_sizes_and_names() -> None:
    shared = nn.ReLU()
    model = nn.Sequential(nn.Linear(6, 4), shared, nn.Linear(4, 2, bias=False), shared)
    layers = profile_layers(model, torch.ones(8, 6), rounds=1)
    assert [layer.name for layer in layers] == ["0", "1", "2", "1#2"]
    assert [layer.kind for layer in layers] == ["Linear", "ReLU", "Linear", "ReLU"]
    assert [layer.parameter_bytes for layer in layers] == [4 * (24 + 4), 0, 4 * 8, 0]
    assert [layer.input_bytes for layer in layers] == [24, 16, 16, 8]
    assert [layer.activation_bytes for layer in layers] == [16, 16, 8, 8]
    assert all(parameter.grad is None for parameter in model.parameters())


def test_times_come_from_the_clock_it_is_given() -> None:
    ticks = itertools.count(0.0, 1.0)
    (layer,) = profile_layers(
        nn.Sequential(nn.Linear(2, 2)), torch.ones(1, 2), rounds=4, clock=lambda: next(ticks)
    )
    assert layer.forward.median == layer.backward.median == 1.0


def test_batch_sizes_and_figures() -> None:
    assert batch_sizes(128) == [64, 32, 8]
    assert batch_sizes(16) == [8, 4, 2]
    assert batch_sizes(2) == []
    assert figure([3.0, 1.0, 2.0], "").median == 2.0
    assert figure([5.0], "once").samples == 1
    assert figure([1.0, 2.0, 3.0, 4.0, 5.0], "").spread == pytest.approx(2 / 3)
