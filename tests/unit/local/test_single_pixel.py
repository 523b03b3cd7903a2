"""Convolutions onto one pixel, computed as linear layers: the same numbers, the same gradients."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import fx, nn
from torch.nn.utils.parametrizations import weight_norm

from paceline.local.single_pixel import SinglePixelConv2d, use_single_pixels

SHAPES = [
    (height, width, kernel, stride, padding)
    for (height, width), kernel, stride, padding in itertools.product(
        [(1, 1), (2, 2), (1, 2), (3, 3), (5, 4)], [(3, 3), (1, 3), (5, 3)], [1, 2, 3], [0, 1, 2]
    )
    if height + 2 * padding >= kernel[0] and width + 2 * padding >= kernel[1]
] + [(2, 2, (3, 3), 9, 4), (1, 1, (3, 3), 9, 3)]  # nothing but padding is met


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("height", "width", "kernel", "stride", "padding"), SHAPES)
def test_same_outputs_and_gradients(
    height: int, width: int, kernel: tuple[int, int], stride: int, padding: int, bias: bool
) -> None:
    torch.manual_seed(0)
    plain = nn.Conv2d(3, 4, kernel, stride=stride, padding=padding, bias=bias).double()
    other = nn.Conv2d(3, 4, kernel, stride=stride, padding=padding, bias=bias).double()
    other.load_state_dict(plain.state_dict())
    use_single_pixels(other)
    assert type(other) is SinglePixelConv2d
    images = torch.randn(2, 3, height, width, dtype=torch.float64)
    results = []
    for layer in (plain, other):
        inputs = images.clone().requires_grad_()
        outputs = layer(inputs)
        (outputs * torch.arange(outputs.numel()).view_as(outputs)).sum().backward()
        results.append([outputs, inputs.grad, *(p.grad for p in layer.parameters())])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_gradients_lie_in_memory_as_the_weights_do(layout: torch.memory_format) -> None:
    layer = nn.Conv2d(3, 4, 3, padding=1).to(memory_format=layout)
    use_single_pixels(layer)
    layer(torch.randn(2, 3, 1, 1)).sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.stride() == layer.weight.stride()
    assert torch.count_nonzero(layer.weight.grad) == 4 * 3, "of nine weights one meets the picture"


def test_a_layer_of_the_wrong_size_is_refused_as_ever() -> None:
    layer = nn.Conv2d(1, 1, 3)
    use_single_pixels(layer)
    with pytest.raises(RuntimeError, match="Kernel size can't be greater"):
        layer(torch.ones(1, 1, 2, 2))


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(2, 2, 3, groups=2),
        nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular"),
        nn.Conv2d(2, 2, 3, padding="same"),
        nn.Conv2d(2, 2, 3, dilation=2),
        nn.Conv2d(2, 2, 1),
        nn.ConvTranspose2d(2, 2, 3),
    ],
    ids=str,
)
def test_other_layers_are_left_alone(layer: nn.Module) -> None:
    before = type(layer)
    use_single_pixels(layer)
    assert type(layer) is before


def test_hooks_stay_and_whoever_holds_the_layer_holds_it_still() -> None:
    layer = nn.Conv2d(2, 2, 3, padding=1)
    held, calls = [layer], []
    layer.register_forward_hook(lambda *_: calls.append("forward"))
    layer.weight.register_hook(lambda gradient: gradient * 0)
    use_single_pixels(layer)
    held[0](torch.ones(2, 2, 1, 1)).sum().backward()
    assert type(held[0]) is SinglePixelConv2d
    assert calls == ["forward"]
    assert layer.weight.grad is not None
    assert not layer.weight.grad.any()


def test_parametrized_layers_are_left_alone() -> None:
    layer = weight_norm(nn.Conv2d(2, 2, 3, padding=1))
    before = type(layer)
    use_single_pixels(layer)
    assert type(layer) is before


def test_gradients_of_each_sample_and_of_gradients() -> None:
    """`torch.func` and double backward go through it as through any convolution."""
    plain = nn.Conv2d(2, 3, 3, padding=1).double()
    other = nn.Conv2d(2, 3, 3, padding=1).double()
    other.load_state_dict(plain.state_dict())
    use_single_pixels(other)
    images = torch.randn(4, 2, 1, 1, dtype=torch.float64)
    results = []
    for layer in (plain, other):
        weights = {name: p.detach() for name, p in layer.named_parameters()}

        def total(
            weights: dict[str, torch.Tensor], image: torch.Tensor, layer: nn.Module = layer
        ) -> torch.Tensor:
            return torch.func.functional_call(layer, weights, (image[None],)).tanh().sum()

        each = torch.func.vmap(torch.func.grad(total), (None, 0))(weights, images)
        inputs = images.clone().requires_grad_()
        (once,) = torch.autograd.grad(layer(inputs).tanh().sum(), inputs, create_graph=True)
        twice = torch.autograd.grad(once.square().sum(), [inputs, layer.weight])
        results.append([each["weight"], each["bias"], *twice])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


def test_tracers_see_one_operation() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Flatten())
    use_single_pixels(model)
    traced = fx.symbolic_trace(model)
    assert [node.op for node in traced.graph.nodes].count("call_module") == 2
    exported = torch.export.export(model, (torch.ones(2, 1, 1, 1),), strict=False).module()
    images = torch.randn(2, 1, 1, 1)
    torch.testing.assert_close(exported(images), model(images))
