"""Loops that carry rows of a state over the end of an epoch: KIND OUT [--plain].

The later a rank, the slower it is made, so that shares would follow. A state of another size than
the batch is left out, as a loop does that is to live through a short last batch.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from own_loop import Plain
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline

KINDS = ("given", "copied", "inner", "kept", "part", "once", "over", "none")


class Cell(nn.Module):
    """Nothing of torch's by whose name it could be known."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(9, 4)

    def forward(self, inputs: torch.Tensor, state: torch.Tensor | None) -> torch.Tensor:
        before = inputs.new_zeros(len(inputs), 4) if state is None else state
        return self.both(torch.cat((inputs, before), dim=1)).tanh()


class Cells(nn.Module):
    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell, self.out = cell, nn.Linear(4, 1)

    def forward(self, inputs: torch.Tensor, state: torch.Tensor | None = None) -> Any:
        found = self.cell(inputs, fitting(state, inputs))
        return self.out(found), found.detach()


class Keeping(Cells):
    """It holds its state itself."""

    state: torch.Tensor | None = None

    def forward(self, inputs: torch.Tensor, state: torch.Tensor | None = None) -> Any:
        outputs, self.state = super().forward(inputs, self.state)
        return outputs, None


def fitting(state: torch.Tensor | None, inputs: torch.Tensor) -> torch.Tensor | None:
    return state if state is not None and len(state) == len(inputs) else None


def train(pace: Any, kind: str) -> nn.Module:
    generator = torch.Generator().manual_seed(5)
    count = 12 if kind == "once" else 60
    data = TensorDataset(
        torch.randn(count, 5, generator=generator), torch.randn(count, 1, generator=generator)
    )
    model = Keeping(Cell()) if kind == "kept" else Cells(nn.RNNCell(5, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(data, batch_size=12))
    state = None
    if kind == "part":
        state = pace.part(torch.randn(12, 4, generator=generator))
    for _ in pace.epochs(4):
        for number, (inputs, targets) in enumerate(loader):
            optimizer.zero_grad()
            # Shares must change after the first epoch, whose first batches take long.
            time.sleep((0.4 if kind == "over" else 0.03) * getattr(pace, "rank", 0))
            if kind == "inner":  # parts of the model that the loop calls itself
                state = model.cell(inputs, fitting(state, inputs)).detach()
                outputs = model.out(model.cell(inputs, state))
            elif kind == "part":
                outputs, _ = model(inputs, state)
            else:
                left = kind == "none" or (kind == "over" and number > 0)
                outputs, state = model(inputs, None if left else state)
                state = state * 0.5 if kind == "copied" else state
            pace.backward(nn.functional.mse_loss(outputs, targets))
            optimizer.step()
    return model


def main(kind: str, out: str, *words: str) -> None:
    assert kind in KINDS, kind
    torch.manual_seed(1)
    pace: Any = Plain() if "--plain" in words else paceline.Pace(run="mine")
    if "--plain" in words:
        pace.part = lambda whole: whole
    model = train(pace, kind)
    if pace.is_first:
        torch.save(model.state_dict(), out)


if __name__ == "__main__":
    main(*sys.argv[1:])
