"""What is still the order of sums, and what is a difference."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from paceline.local.steps import Supervised
from paceline.training.compare import WeightComparison, compare
from paceline.training.loss_parts import loss_apart, step_apart_in_float64
from paceline.training.reference import Drawn, ReferenceResult


def trained(change: float = 0.01, momentum: float = 1.0) -> ReferenceResult:
    start = torch.linspace(-1, 1, 100)
    moved = change * torch.cos(torch.arange(100.0))
    return ReferenceResult(
        start={"w": start, "count": torch.tensor(0)},
        weights={"w": start + moved, "count": torch.tensor(2)},
        state={"w": {"momentum": momentum * moved, "step": torch.tensor(2.0)}},
    )


def found(other: ReferenceResult, **rest: object) -> WeightComparison:
    return compare(other.weights, other.state, trained(), tolerance=0.002, **rest)  # type: ignore[arg-type]


def test_the_same_passes() -> None:
    result = found(trained())
    assert (result.differences, result.tensors, result.largest) == ([], 4, 0.0)


def test_half_a_percent_is_found_and_a_thousandth_passes() -> None:
    assert not found(trained(change=0.01001, momentum=1 / 1.001)).differences
    wrong = found(trained(change=0.01005, momentum=1 / 1.005)).differences
    assert [(each.name, each.entry) for each in wrong] == [("w", "")]
    assert wrong[0].error == pytest.approx(0.005, rel=0.01)
    wrong = found(trained(momentum=1.005)).differences
    assert wrong[0].sentence == "gives another momentum of the optimizer for w (0.005)"


def test_what_does_not_move_is_said() -> None:
    still = trained()
    still.weights["w"] = still.start["w"].clone()
    assert found(still).differences[0].sentence.startswith("leaves w where it was")


def test_counters_and_numbers_that_are_none() -> None:
    other = trained()
    other.weights["count"] = torch.tensor(3)
    other.state["w"]["step"] = torch.tensor(3.0)
    assert [each.name for each in found(other).differences] == ["count", "w"]
    other = trained()
    other.weights["w"] = other.weights["w"] * math.nan
    assert found(other).differences[0].error == math.inf


def test_a_weight_without_state_may_have_one_of_zeros() -> None:
    other = trained()
    other.state["unused"] = {"momentum": torch.zeros(3), "step": torch.tensor(2.0)}
    assert not found(other).differences
    other.state["unused"]["momentum"] += 1
    assert found(other).differences


def test_noise_of_plain_training_excuses_as_much_but_not_more() -> None:
    doubtful, wild, wrong = trained(change=0.0101), trained(change=0.012), trained(change=0.0115)
    for each in (doubtful, wild, wrong):
        each.state = trained().state
    assert found(doubtful).differences
    assert not found(doubtful, nudged=lambda: [doubtful]).differences
    # 0.2 of noise excuse an error of 2%, not one of 15%.
    assert not found(doubtful, nudged=lambda: [wild]).differences
    assert found(wrong, nudged=lambda: [wild]).differences


def test_a_loss_whose_parts_do_not_add_up() -> None:
    outputs, targets = torch.randn(10, 4), torch.arange(10) % 4
    weights = torch.tensor([0.2, 1.0, 2.0, 3.0])
    mean = torch.nn.functional.cross_entropy
    assert loss_apart(Supervised(loss=mean), outputs, targets, [7, 3]) == pytest.approx(0, abs=1e-6)
    weighted = loss_apart(
        Supervised(loss=torch.nn.CrossEntropyLoss(weights)), outputs, targets, [7, 3]
    )
    assert weighted is not None
    assert weighted > 0.01
    # A part of nothing but ignored labels has no mean at all.
    ignoring = torch.nn.CrossEntropyLoss(ignore_index=0)
    assert (
        loss_apart(Supervised(loss=ignoring), outputs, torch.tensor([0, 1] * 5), [1] * 10)
        == math.inf
    )
    # What it is a mean by makes it add up.

    def weighed(outputs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        loss = torch.nn.functional.cross_entropy(outputs, targets, weight=weights)
        return {"loss": loss, "weight": weights[targets].sum()}

    exact = loss_apart(Supervised(loss=weighed), outputs, targets, [7, 3])
    assert exact == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(("free", "widened"), [(1e6, 1), (1e-9, 0)])
def test_a_model_is_widened_where_there_is_memory_for_it(
    monkeypatch: pytest.MonkeyPatch, free: float, widened: int
) -> None:
    monkeypatch.setattr("paceline.training.loss_parts.available_mb", lambda: free)
    calls: list[str] = []

    class Model(torch.nn.Linear):
        def double(self) -> Model:
            calls.append("double")
            return super().double()

    class Plain:
        def model(self, settled: bool) -> Model:
            return Model(3, 2)

    batch = Drawn(TensorDataset(torch.zeros(3, 3)), np.arange(3))  # type: ignore[arg-type]
    assert step_apart_in_float64(Plain(), batch, [2, 1]) == 0.0  # type: ignore[arg-type]
    assert len(calls) == widened
