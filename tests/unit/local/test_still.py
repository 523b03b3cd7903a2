"""A model without chance: every draw is a constant, and all else is as it was."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from paceline.local.still import chance_kept, settle, still


def test_dropout_changes_nothing() -> None:
    inputs = torch.randn(4, 3, 8, 8, requires_grad=True)
    for rate in (0.3, 0.5):  # 0.5 is the draw's own default, which torch leaves out
        with still():
            assert torch.allclose(F.dropout(inputs, rate), inputs)
            assert torch.allclose(nn.Dropout2d(rate)(inputs), inputs)
    assert not torch.allclose(F.dropout(inputs, 0.5), inputs)


@pytest.mark.parametrize(
    "model",
    [
        nn.LSTM(6, 5, num_layers=2, dropout=0.5, batch_first=True),
        nn.TransformerEncoderLayer(6, 2, 12, dropout=0.4, batch_first=True),
        nn.Sequential(nn.Linear(6, 6), nn.RReLU(), nn.AlphaDropout(0.2)),
    ],
    ids=lambda model: type(model).__name__,
)
def test_a_sample_is_the_same_in_any_batch(model: nn.Module) -> None:
    inputs = torch.randn(4, 3, 6)

    def run(part: torch.Tensor) -> torch.Tensor:
        with still():
            result = model(part)
        found: torch.Tensor = result[0] if isinstance(result, tuple) else result
        return found

    whole = run(inputs)
    assert torch.allclose(whole, torch.cat([run(inputs[:1]), run(inputs[1:])]), atol=1e-6)
    with still():
        whole.sum().backward()


def test_draws_of_all_kinds_repeat() -> None:
    def draw() -> list[torch.Tensor]:
        chances = torch.tensor([0.1, 0.6, 0.3])
        return [
            torch.rand(3), torch.randn(2, 2), torch.randn_like(chances), torch.randint(3, 9, (4,)),
            torch.randint(9, (2,)), torch.randperm(5), torch.normal(2.0, 1.0, (2,)),
            torch.normal(chances, 1.0), torch.empty(2).uniform_(1, 3), torch.bernoulli(chances),
            torch.multinomial(chances, 2), torch.empty(2).exponential_(), torch.empty(2).cauchy_(),
            torch.tensor(random.random()), torch.tensor(np.random.rand()),
        ]  # fmt: skip

    with still():
        first = draw()
    with still():
        second = draw()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert first[3].tolist() == [3, 3, 3, 3]
    assert first[10].tolist() == [1, 2]


def test_random_numbers_go_on_where_they_were() -> None:
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    expected = torch.rand(1).item(), random.random(), np.random.rand()
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    with chance_kept(), still():
        torch.rand(3), random.random(), np.random.rand()
    assert (torch.rand(1).item(), random.random(), np.random.rand()) == expected


@pytest.mark.parametrize("track", [True, False])
def test_batch_norm_uses_what_it_has_and_is_trained(track: bool) -> None:
    model = nn.Sequential(nn.BatchNorm1d(3, track_running_stats=track)).train()
    settle(model)
    inputs = torch.randn(5, 3)
    whole = model(inputs)
    assert torch.allclose(whole[:1], model(inputs[:1]))
    whole.square().sum().backward()
    assert model[0].weight.grad is not None
