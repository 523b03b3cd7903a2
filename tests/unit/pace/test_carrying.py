"""What a loop carries from batch to batch, as it is seen: by memory, however a model is run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from paceline.errors import UserError
from paceline.pace.carrying import Carrying


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.RNNCell(5, 4), nn.Linear(4, 1)

    def forward(self, inputs: torch.Tensor, state: torch.Tensor | None = None) -> Any:
        found = self.cell(inputs, state)
        return self.out(found), found


def batches(carrying: Carrying, number: list[int], model: Any, *, carried: bool) -> None:
    state = None
    for _ in range(3):
        number[0] += 1
        outputs, state = model(torch.randn(3, 5), state if carried else None)
        outputs.sum().backward()
        state = state.detach()


@pytest.mark.parametrize("compiled", ["not", "in place", "as another"])
@pytest.mark.parametrize("carried", [True, False])
def test_a_carried_state_is_seen(compiled: str, carried: bool) -> None:
    number, model = [0], Cells()
    carrying = Carrying(lambda: number[0])
    if compiled == "in place":
        model.compile(backend="eager", fullgraph=True)
    watched = model
    if compiled == "as another":
        watched = torch.compile(model, backend="eager", fullgraph=True)  # type: ignore[assignment]
    carrying.watch(watched)
    batches(carrying, number, watched, carried=carried)
    assert bool(carrying.reason) == carried


def test_what_is_given_after_shares_have_changed_is_refused() -> None:
    number, model = [1], Cells()
    carrying = Carrying(lambda: number[0])
    carrying.watch(model)
    _, state = model(torch.randn(3, 5))
    carrying.divided()
    number[0] = 2
    with pytest.raises(UserError, match="before shares changed"):
        model(torch.randn(3, 5), state)


def test_outputs_that_nobody_keeps_are_forgotten() -> None:
    number, model = [0], Cells()
    carrying = Carrying(lambda: number[0])
    carrying.watch(model)
    for _ in range(20):
        number[0] += 1
        model(torch.randn(3, 5))
    assert len(carrying._earlier) <= 2


@pytest.mark.parametrize(
    "held",
    [
        torch.randn(3, dtype=torch.cfloat).conj(), torch.tensor(1.0), torch.empty(0, 2),
        torch.randn(3, 4).t(), torch.ones(2, dtype=torch.bool), {"state": [torch.ones(2)]},
    ],
)  # fmt: skip
def test_what_a_model_holds_of_its_own_is_told_apart(held: Any) -> None:
    prints = []
    for value in (None, held, held):
        model = nn.Linear(2, 2)
        model.held = value
        carrying = Carrying(lambda: 0)
        carrying.watch(model)
        prints.append(carrying.held())
    assert prints[0] != prints[1] == prints[2]
