"""Loops that a rank which has stood by could not go on with: KIND; another team every 3 batches."""

from __future__ import annotations

import sys
import time

import torch
from own_loop import switch_every
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.out = nn.LSTM(5, 4), nn.Linear(4, 1)

    def forward(self, inputs: torch.Tensor, state: object) -> tuple[torch.Tensor, object]:
        found, state = self.cells(inputs[None], state)
        return self.out(found[0]), state


class Keeping(nn.Linear):
    """It holds a row for every sample of its part."""

    state: torch.Tensor | None = None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        before = 0.0 if self.state is None or len(self.state) != len(inputs) else self.state
        outputs = super().forward(inputs) + 0.5 * before
        self.state = outputs.detach()
        return outputs


def main(kind: str) -> None:
    switch_every(3)
    torch.manual_seed(1)
    pace = paceline.Pace(legs=True)
    data = TensorDataset(torch.randn(96, 5), torch.randn(96, 1))
    model = Recurrent() if kind == "carried" else (Keeping if kind == "kept" else nn.Linear)(5, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader, test = DataLoader(data, batch_size=8), DataLoader(data, batch_size=16)
    model, optimizer, loader, test = pace.prepare(model, optimizer, loader, test)
    step = seen = 0
    state = None
    for _ in pace.epochs(2):
        for number, (inputs, targets) in enumerate(loader):
            if kind == "part":
                pace.part(inputs)
            if kind == "counted":
                optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
            if kind == "left by number" and number == 7:
                break
            step += 1
            optimizer.zero_grad()
            if kind == "carried":
                # A slower rank would be given fewer rows, and state that is not of its own.
                time.sleep(0.05 * pace.rank)
                outputs, state = model(inputs, state)
                state = tuple(each.detach() for each in state)
            else:
                outputs = model(inputs)
            pace.backward(nn.functional.mse_loss(outputs, targets))
            optimizer.step()
            seen += len(inputs)
            if kind == "left together" and pace.mean(1.0, len(inputs)) and float(inputs.sum()) > 99:
                break
            if kind == "nested" and number == 1:
                assert pace.sum(sum(len(each) for each, _ in test)) == len(data)
        assert pace.sum(sum(len(each) for each, _ in test)) == len(data)
    pace.print("seen", pace.sum(seen))
    sums = [round(float(each.detach().double().sum()), 12) for each in model.parameters()]
    print("weights", sums, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
