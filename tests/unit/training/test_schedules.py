"""Learning rates by torch's schedulers: as a plain loop has them, from any place on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from paceline.errors import ConfigError, UnsupportedError
from paceline.schema.config import Optimizer
from paceline.training.optimizers import optimizer_factory
from paceline.training.schedules import OwnSchedule

RATE = 0.2
KINDS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, gamma=0.5),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (n + 1)),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 5, 0.01),
    "warm restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(
        optimizer, 0.7, total_steps=20, cycle_momentum=False
    ),
    "a sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4), lr_scheduler.ConstantLR(optimizer)],
        [4],
    ),
}


def schedule(make: Callable[[Any], Any], settings: Optimizer | None = None) -> OwnSchedule:
    build = optimizer_factory(settings or Optimizer(learning_rate=RATE))
    return OwnSchedule(make, build, [torch.zeros(3, 2), torch.zeros(4)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:The epoch parameter")
def test_rates_are_those_of_a_plain_loop_wherever_one_begins(kind: str) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=RATE)
    scheduler = KINDS[kind](optimizer)
    rates = []
    for _ in range(12):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    found = schedule(KINDS[kind])
    assert [found.factor(n) * RATE for n in range(12)] == pytest.approx(rates)
    for place in (7, 3, 3, 11):  # a run that goes on, a leg that is repeated
        assert found.factor(place) * RATE == pytest.approx(rates[place])


def momentum(optimizer: Any) -> Any:
    return lr_scheduler.OneCycleLR(optimizer, 0.7, total_steps=20)


def test_what_cannot_be_followed_is_refused() -> None:
    sgd = Optimizer(name="sgd", momentum=0.9, learning_rate=RATE)
    with pytest.raises(UnsupportedError, match="moves more than the learning rate"):
        schedule(momentum, sgd).factor(1)
    with pytest.raises(UnsupportedError, match="ReduceLROnPlateau decides by losses"):
        schedule(lr_scheduler.ReduceLROnPlateau)
    with pytest.raises(ConfigError, match="gave int: it must give one of"):
        schedule(lambda optimizer: 3)
    with pytest.raises(ConfigError, match="raised ValueError"):
        schedule(lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.7))
    with pytest.raises(ConfigError, match="leave one of them out"):
        Optimizer(scheduler="m:f", schedule="cosine")


def test_groups_that_move_apart_are_refused() -> None:
    def groups(parameters: Any) -> torch.optim.Optimizer:
        first, second = parameters
        return torch.optim.SGD([{"params": [first], "lr": 0.1}, {"params": [second], "lr": 0.4}])

    build = optimizer_factory(Optimizer(name="own:x"), groups)
    weights = [torch.zeros(3, 2), torch.zeros(4)]
    alike = OwnSchedule(KINDS["StepLR"], build, weights)
    assert alike.factor(2) == pytest.approx(0.5)
    apart = OwnSchedule(KINDS["CosineAnnealingLR"], build, weights)
    with pytest.raises(UnsupportedError, match="by different factors"):
        apart.factor(3)
