"""An LSTM on bytes of Python's standard library, in a loop of one's own with carried state.

python examples/lstm_bytes.py                on this process
paceline run examples/lstm_bytes.py          on all cores
paceline run --hosts a,b examples/lstm_bytes.py
"""

import sys
import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import paceline

EPOCHS = int(sys.argv[1]) if len(sys.argv) > 1 else 3
COLUMNS, STEPS, ROWS = 32, 64, 1281


class Bytes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 64)
        self.lstm = nn.LSTM(64, 128)
        self.head = nn.Linear(128, 256)

    def forward(self, text, state):
        found, state = self.lstm(self.embedding(text), state)
        return self.head(found), state


def library(count: int) -> torch.Tensor:
    """The first bytes of the standard library's modules, as they are ordered by name."""
    found = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        found += path.read_bytes()
        if len(found) >= count:
            break
    return torch.frombuffer(found[:count], dtype=torch.uint8).long()


torch.manual_seed(0)
pace = paceline.Pace()
model = Bytes()
optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
model, optimizer = pace.prepare(model, optimizer)

# Every rank reads columns of its own: their state stays with it.
text = pace.part(library(COLUMNS * ROWS).view(COLUMNS, ROWS).t().contiguous(), dim=1)
for epoch in pace.epochs(EPOCHS):
    state = None
    for begin in range(0, ROWS - 1, STEPS):
        inputs, targets = text[begin : begin + STEPS], text[begin + 1 : begin + 1 + STEPS]
        scores, state = model(inputs[: len(targets)], state)
        state = tuple(each.detach() for each in state)
        loss = functional.cross_entropy(scores.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        pace.backward(loss, weight=targets.numel())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        pace.log(loss=loss, weight=targets.numel())
    pace.print(f"epoch {epoch + 1}: {pace.mean(loss, weight=targets.numel()):.3f} nats per byte")
