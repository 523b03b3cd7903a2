"""What a loop carries from batch to batch, as it is seen: by memory, however a model is run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from paceline.errors import UserError
from paceline.pace.carrying import FOLLOWED, Carrying


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


COPIES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "clone": lambda state: state.detach().clone(),
    "masked": lambda state: state.detach() * torch.tensor([[1.0], [0.0], [1.0]]),
    "where": lambda state: torch.where(torch.tensor(True), state.detach(), 0.0),
    "twice": lambda state: (state.detach().clone() + 1).relu(),
    "cast": lambda state: state.detach().double().float(),
    "written": lambda state: torch.zeros(3, 4).copy_(state.detach()),
    "rows": lambda state: put(torch.zeros(3, 4), state.detach()),
    "stacked": lambda state: torch.stack([state.detach()])[0],
    "out": lambda state: torch.add(state.detach(), 1, out=torch.zeros(3, 4)),
    "vmap": lambda state: torch.vmap(lambda row: row * 2)(state.detach()),
    "grad": lambda state: torch.func.grad(lambda row: row.square().sum())(state.detach()),
}


def put(where: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    where[:] = state
    return where


@pytest.mark.parametrize("early", [True, False], ids=["at the end of a body", "in the next one"])
@pytest.mark.parametrize("copy", COPIES)
def test_a_copy_of_a_state_is_seen(copy: str, early: bool) -> None:
    number, model = [0], Cells()
    carrying = Carrying(lambda: number[0])
    carrying.watch(model)
    change, state = COPIES[copy], None
    for _ in range(3):
        number[0] += 1
        with carrying.following():
            if state is not None and not early:
                state = change(state)
            _, state = model(torch.randn(3, 5), state)
            state = change(state) if early else state
    assert carrying.reason


def test_what_a_loop_computes_beside_its_model_is_not_a_state() -> None:
    """Losses, an average of them, a copy of the weights, a second model."""
    number, model, judge = [0], nn.Linear(5, 5), nn.Linear(5, 1)
    carrying = Carrying(lambda: number[0])
    carrying.watch(model)
    carrying.watch(judge)
    total, kept = torch.zeros(()), [each.detach().clone() for each in model.parameters()]
    for _ in range(4):
        number[0] += 1
        with carrying.following():
            inputs = torch.randn(3, 5) * 2 + 1
            made = model(inputs)
            loss = judge(made).mean() + judge(made.detach()).relu().sum()
            slope = torch.autograd.grad(loss, made, create_graph=True)[0]
            (loss + slope.square().sum()).backward()
            total = total + loss.detach()
            with torch.no_grad():
                for each, old in zip(model.parameters(), kept, strict=True):
                    old.lerp_(each, 0.1)
                    each -= 0.01 * each.grad
            model.zero_grad()
    assert not carrying.reason


def test_only_the_first_batches_are_followed() -> None:
    number = [FOLLOWED]
    carrying = Carrying(lambda: number[0])
    carrying.watch(Cells())
    with carrying.following():
        assert torch.overrides._is_torch_function_mode_enabled()
    number[0] += 1
    with carrying.following():
        assert not torch.overrides._is_torch_function_mode_enabled()


def test_a_loop_that_is_left_is_not_followed_any_more() -> None:
    from torch.utils.data import DataLoader

    from paceline.pace.batches import Batches
    from paceline.pace.meter import Meter
    from paceline.pace.ranks import Ranks

    ranks = Ranks()
    working = Meter(ranks).working
    carrying = Carrying(lambda: working.handed)
    carrying.watch(Cells())
    loader = Batches(
        DataLoader(torch.randn(6, 5), batch_size=3),  # type: ignore[arg-type]
        ranks, [1.0], working, following=carrying.following,
    )  # fmt: skip
    for _ in loader:
        assert torch.overrides._is_torch_function_mode_enabled()
        break
    assert not torch.overrides._is_torch_function_mode_enabled()


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
