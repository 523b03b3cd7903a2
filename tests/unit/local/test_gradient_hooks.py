"""Hooks of the user's own: taken off parameters, run on whole gradients, put back."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.errors import StrategyError
from paceline.local.gradient_hooks import (
    GradientHooks,
    refuse_module_hooks,
    refuse_shared_memory,
)


def backward(layer: nn.Linear) -> torch.Tensor:
    layer.zero_grad()
    layer(torch.ones(2, 3)).sum().backward()
    assert layer.weight.grad is not None
    return layer.weight.grad


def test_hooks_run_when_they_are_asked_to_and_not_in_backward() -> None:
    layer = nn.Linear(3, 2)
    calls: list[str] = []
    layer.weight.register_hook(lambda gradient: calls.append("before"))
    layer.weight.register_hook(lambda gradient: gradient * 2)
    layer.weight.register_post_accumulate_grad_hook(lambda parameter: calls.append("after"))
    hooks = GradientHooks(dict(layer.named_parameters()))
    assert hooks.names == {"weight"}
    plain = backward(layer).clone()
    assert calls == []
    changed = hooks.run("weight", plain)
    assert changed is not None
    assert torch.equal(changed, plain * 2)
    assert calls == ["before", "after"]
    hooks.close()
    assert torch.equal(backward(layer), plain * 2)
    assert calls == ["before", "after"] * 2


def test_a_removed_hook_is_not_run() -> None:
    layer = nn.Linear(3, 2)
    handle = layer.weight.register_hook(lambda gradient: gradient * 2)
    hooks = GradientHooks(dict(layer.named_parameters()))
    handle.remove()
    gradient = torch.ones(2, 3)
    assert hooks.run("weight", gradient) is gradient


def test_hooks_of_layers_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    refuse_module_hooks(model, "pipeline", "traced")
    model[1].register_forward_hook(lambda layer, inputs, outputs: None)
    with pytest.raises(StrategyError, match="the layer 1 has a forward hook"):
        refuse_module_hooks(model, "pipeline", "traced")


def test_parameters_beside_each_other_in_one_memory_are_fine() -> None:
    model = nn.Linear(3, 3)
    flat = torch.zeros(12)
    model.weight = nn.Parameter(flat[:9].view(3, 3))
    model.bias = nn.Parameter(flat[9:])
    refuse_shared_memory(model, "a test")
    model.views = [flat]  # type: ignore[assignment]
    with pytest.raises(StrategyError, match="views lies in the memory of the parameter weight"):
        refuse_shared_memory(model, "a test")


def test_one_parameter_of_two_layers_is_fine() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    refuse_shared_memory(model, "a test")
