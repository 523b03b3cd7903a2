"""What is noticed of a model while it runs, and that it is left as it was."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from paceline.local.faithful import (
    UntraceableError,
    compare,
    random_states,
    training_pass,
    untouched,
    watched,
)


class Changing(nn.Module):
    """Changes one thing in its forward pass, by name."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.what = what
        self.calls = 0
        self.log: dict[str, list[int]] = {"sizes": []}
        self.array = np.zeros(2)
        self.generator = torch.Generator()
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = self.linear(inputs)
        if self.what == "counter":
            self.calls += 1
        elif self.what == "list":
            self.log["sizes"].append(1)
        elif self.what == "array":
            self.array += 1
        elif self.what == "generator":
            torch.rand(1, generator=self.generator)
        elif self.what == "buffer":
            self.seen += 1
        elif self.what == "shape of a buffer":
            self.seen = torch.zeros(3)
        elif self.what == "parameter":
            self.linear.weight.data += 1
        elif self.what == "kept":
            self.features = outputs
        elif self.what == "hook":
            outputs.register_hook(lambda gradient: None)
        return outputs


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("nothing", ""),
        ("counter", "changes calls"),
        ("list", "changes log"),
        ("array", "changes array"),
        ("generator", "changes generator"),
        ("buffer", "changes the buffer seen"),
        ("shape of a buffer", "changes the buffer seen"),
        ("parameter", "changes the parameter linear.weight"),
        ("kept", "changes features"),
        ("hook", "registers the gradient hook <lambda>"),
    ],
)
def test_what_a_forward_pass_changes_is_named(what: str, words: str) -> None:
    model = Changing(what)
    register = torch.Tensor.register_hook
    with watched(model) as seen:
        model(torch.ones(2, 3))
    assert [text.removeprefix("its forward pass ") for text in seen] == ([words] if words else [])
    assert torch.Tensor.register_hook is register
    assert torch.equal(model.seen, torch.zeros(2))


def test_running_statistics_are_no_change() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    with watched(model) as seen:
        model(torch.randn(4, 3))
    assert seen == []
    assert int(model[1].num_batches_tracked) == 0  # type: ignore[arg-type]


def test_random_numbers_of_every_kind_are_put_back() -> None:
    model = nn.Linear(1, 1)
    before = random_states()
    with untouched(model):
        torch.rand(1), random.random(), np.random.rand()
        assert random_states() != before
    assert random_states() == before


def test_a_pass_leaves_no_gradients_and_is_the_same_again() -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    parameters = dict(model.named_parameters())
    passes = [training_pass(model, parameters, torch.ones(4, 3), untouched_context) for _ in "ab"]
    assert all(parameter.grad is None for parameter in model.parameters())
    compare(passes[0], passes[1], parameters)
    with torch.no_grad():
        model[2].bias[0] += 0.1
    other = training_pass(model, parameters, torch.ones(4, 3), untouched_context)
    with pytest.raises(UntraceableError, match="gives other outputs"):
        compare(passes[0], other, parameters)


def untouched_context() -> torch.autograd.grad_mode.enable_grad:
    """A context that changes nothing."""
    return torch.enable_grad()
