"""Learning rates and optimizers by name."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.schema import Optimizer
from paceline.schema.schedule import schedule_factor
from paceline.training.optimizers import (
    batch_factor,
    is_elementwise,
    optimizer_factory,
    without_effect,
)
from paceline.training.pieces_trial import acts_on_pieces


def rates(updates: int, peak: float = 1.0, **settings: object) -> list[float]:
    chosen = Optimizer(**settings)  # type: ignore[arg-type]
    return [peak * schedule_factor(chosen, update=i, updates=updates) for i in range(updates)]


def test_constant() -> None:
    assert rates(4, peak=0.5) == [0.5] * 4


def test_linear_falls_to_one_update_before_zero() -> None:
    assert rates(4, schedule="linear") == [1.0, 0.75, 0.5, 0.25]


def test_warmup_rises_to_the_peak_then_the_schedule_starts_there() -> None:
    found = rates(10, schedule="linear", warmup=0.4)
    assert found == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6])


def test_cosine() -> None:
    found = rates(8, schedule="cosine")
    assert found[0] == 1.0
    assert found[4] == pytest.approx(0.5)
    assert found[2] == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)))
    assert found[7] == pytest.approx(0.5 * (1 + math.cos(math.pi * 7 / 8)))


def test_step_falls_at_each_part() -> None:
    found = rates(10, schedule="step", step_every=0.3, step_factor=0.1)
    assert found == pytest.approx([1.0] * 3 + [0.1] * 3 + [0.01] * 3 + [0.001])


def test_warmup_over_everything() -> None:
    assert rates(4, warmup=1.0, schedule="cosine") == [0.25, 0.5, 0.75, 1.0]


@given(
    updates=st.integers(1, 500),
    warmup=st.floats(0, 1),
    schedule=st.sampled_from(["constant", "linear", "cosine", "step"]),
)
def test_every_rate_is_above_zero_and_at_most_the_peak(
    updates: int, warmup: float, schedule: str
) -> None:
    found = rates(updates, peak=0.1, warmup=warmup, schedule=schedule)
    assert all(0 < rate <= 0.1 * (1 + 1e-12) for rate in found)
    warm = round(warmup * updates)
    assert found[:warm] == sorted(found[:warm])
    assert found[warm:] == sorted(found[warm:], reverse=True)


@pytest.mark.parametrize(
    ("settings", "batch", "expected"),
    [
        ({}, 4096, 1.0),
        ({"reference_batch": 128}, 128, 1.0),
        ({"reference_batch": 128}, 1024, 8.0),
        ({"reference_batch": 128, "scaling": "sqrt"}, 512, 2.0),
        ({"reference_batch": 128}, 32, 0.25),
    ],
)
def test_rate_follows_the_batch(settings: dict[str, object], batch: int, expected: float) -> None:
    assert batch_factor(Optimizer(**settings), batch) == pytest.approx(expected)  # type: ignore[arg-type]


def test_named_optimizers_have_the_settings() -> None:
    weights = [torch.nn.Parameter(torch.zeros(3))]
    sgd = optimizer_factory(
        Optimizer(name="sgd", momentum=0.9, nesterov=True, weight_decay=0.01, learning_rate=0.1)
    )(weights)
    assert isinstance(sgd, torch.optim.SGD)
    group = sgd.param_groups[0]
    assert (group["lr"], group["momentum"], group["nesterov"]) == (0.1, 0.9, True)
    assert group["weight_decay"] == 0.01
    adam = optimizer_factory(Optimizer(name="adam"))(weights)
    adamw = optimizer_factory(Optimizer(name="adamw", weight_decay=0.2))(weights)
    assert isinstance(adam, torch.optim.Adam)
    assert not isinstance(adam, torch.optim.AdamW)
    assert isinstance(adamw, torch.optim.AdamW)
    assert adamw.param_groups[0]["weight_decay"] == 0.2


def test_own_optimizer_gets_the_rate_under_either_name() -> None:
    weights = [torch.nn.Parameter(torch.zeros(3))]
    settings = Optimizer(name="own:x", learning_rate=0.25)

    def by_word(parameters: object, learning_rate: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=learning_rate)  # type: ignore[arg-type]

    for factory in (by_word, torch.optim.Adagrad, torch.optim.SGD):
        built = optimizer_factory(settings, factory)(weights)
        assert built.param_groups[0]["lr"] == 0.25
    assert not is_elementwise(settings)
    assert is_elementwise(Optimizer(name="adamw"))


def test_settings_that_an_own_optimizer_does_not_hear_of_are_said() -> None:
    def own(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    said = without_effect(Optimizer(name="own:x", learning_rate=0.25, weight_decay=0.1), own)
    assert len(said) == 2
    assert all("has no effect" in sentence for sentence in said)
    assert without_effect(Optimizer(name="own:x"), own) == []
    rate_alone = Optimizer(name="own:x", learning_rate=0.25)
    assert without_effect(rate_alone, torch.optim.Adagrad) == []
    assert without_effect(rate_alone, None) == []


class Normed(torch.optim.Optimizer):
    """Looks at a parameter as a whole."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    each.add_(self.direction(each.grad), alpha=-group["lr"])

    def direction(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient / (gradient.norm() + 1e-9)


class Signs(Normed):
    def direction(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.sign()


class NormedLater(Normed):
    """Begins to look at whole parameters after a warm-up."""

    def __init__(self, parameters: Any, lr: float, *, tensor: bool = False) -> None:
        super().__init__(parameters, lr)
        self.tensor = tensor

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is None:
                    continue
                state = self.state[each]
                state.setdefault("step", torch.tensor(0.0) if self.tensor else 0)
                state["step"] += 1
                long = self.direction(each.grad) if state["step"] > 500 else each.grad.sign()
                each.add_(long, alpha=-group["lr"])


class Counting(Signs):
    """Keeps something that belongs to no parameter."""

    def step(self, closure: Any = None) -> None:
        super().step()
        self.param_groups[0]["updates"] = self.param_groups[0].get("updates", 0) + 1


def without_decay_on_biases(parameters: Any) -> torch.optim.Optimizer:
    listed = list(parameters)
    return torch.optim.AdamW(
        [
            {"params": [p for p in listed if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in listed if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=0.01,
    )


def of_ten(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([list(parameters)[number] for number in range(10)], lr=0.1)


optim = torch.optim


@pytest.mark.parametrize(
    "own", [optim.SGD, optim.Adadelta, optim.RMSprop, optim.Adagrad, optim.RAdam, Signs]
)
def test_optimizers_that_treat_every_number_by_itself_are_found(own: Any) -> None:
    assert acts_on_pieces(optimizer_factory(Optimizer(name="own:x"), own))


@pytest.mark.parametrize(
    "own", [optim.Adafactor, optim.Muon, optim.NAdam, Normed, NormedLater,
            partial(NormedLater, tensor=True), Counting, of_ten, without_decay_on_biases],
)  # fmt: skip
def test_so_are_those_that_need_whole_parameters(own: Any) -> None:
    """NAdam keeps a number per parameter besides its count."""
    state = torch.get_rng_state()
    assert not acts_on_pieces(optimizer_factory(Optimizer(name="own:x"), own))
    assert torch.equal(state, torch.get_rng_state())


def test_own_factory_that_gives_no_optimizer_is_refused() -> None:
    with pytest.raises(ConfigError, match="gave int: it must give a torch"):
        optimizer_factory(Optimizer(name="own:x"), lambda parameters: 3)([])  # type: ignore[arg-type, return-value]
