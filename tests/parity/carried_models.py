"""Models that carry state from batch to batch, ordered texts, and a plain loop beside them.

Sample b * COLUMNS + c is what follows in column c, as `batchify` of pytorch/examples has it.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

WORDS, HIDDEN, STEPS = 13, 8, 5
COLUMNS, BATCHES, EPOCHS, RATE = 6, 7, 3, 0.5


def texts(seed: int, samples: int) -> TensorDataset:
    """Words of which each follows from the two before, a column at a time."""
    rows = -(-samples // COLUMNS)
    generator = torch.Generator().manual_seed(seed)
    found = torch.randint(WORDS, (2, COLUMNS), generator=generator)
    for _ in range(rows * STEPS):
        noise = torch.randint(2, (COLUMNS,), generator=generator)
        found = torch.cat([found, ((found[-1] + 2 * found[-2] + noise) % WORDS)[None]])
    inputs = found[: rows * STEPS].view(rows, STEPS, COLUMNS).transpose(1, 2)
    targets = found[1 : rows * STEPS + 1].view(rows, STEPS, COLUMNS).transpose(1, 2)
    return TensorDataset(
        inputs.reshape(-1, STEPS)[:samples].contiguous(),
        targets.reshape(-1, STEPS)[:samples].contiguous(),
    )


def whole() -> tuple[TensorDataset, TensorDataset]:
    return texts(1, COLUMNS * BATCHES), texts(2, COLUMNS * 4)


def ragged() -> tuple[TensorDataset, TensorDataset]:
    """The last batch is smaller, of the test data too."""
    return texts(1, COLUMNS * BATCHES + 4), texts(2, COLUMNS * 4 + 2)


class Reader(nn.Module):
    """Carries its state as an attribute; begins anew where a batch has another size."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, HIDDEN)
        self.memory = nn.LSTM(HIDDEN, HIDDEN, batch_first=True)
        self.head = nn.Linear(HIDDEN, WORDS)
        self.state: Any = None

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        before = self.state
        if before is not None and before[0].shape[1] != len(words):
            before = None
        found, after = self.memory(self.embedding(words), before)
        self.state = tuple(each.detach() for each in after)
        return self.head(found)


class Strict(Reader):
    """Takes batches of one size only, as most such models do."""

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        found, after = self.memory(self.embedding(words), self.state)
        self.state = tuple(each.detach() for each in after)
        return self.head(found)


class Registered(Reader):
    """Carries it as buffers of a fixed size, which checkpoints have."""

    persistent = True

    def __init__(self) -> None:
        super().__init__()
        del self.state
        for name in ("short", "long"):
            zeros = torch.zeros(1, COLUMNS, HIDDEN)
            self.register_buffer(name, zeros, persistent=self.persistent)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        found, after = self.memory(self.embedding(words), (self.short.clone(), self.long.clone()))
        self.short.copy_(after[0].detach())
        self.long = after[1].detach()
        return self.head(found)


class Unsaved(Registered):
    """In buffers that no state_dict has."""

    persistent = False


class Counting(Reader):
    """Counts its calls, and the count takes part in what it gives; carries nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        found, _ = self.memory(self.embedding(words))
        return self.head(found) * (1.0 + 0.05 * self.calls)


def step(model: nn.Module, batch: Any) -> torch.Tensor:
    words, following = batch
    return functional.cross_entropy(model(words).flatten(0, 1), following.flatten())


def plain_loop(
    kind: type[nn.Module], data: Any, *, epochs: int = EPOCHS, momentum: float = 0.9
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Weights, and the test losses: of copies that have read nothing, as a test is no training."""
    torch.manual_seed(0)
    train, test = data
    model = kind()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=momentum)
    losses = []
    for _ in range(epochs):
        for at in range(0, len(train), COLUMNS):
            optimizer.zero_grad()
            step(model, train[at : at + COLUMNS]).backward()
            optimizer.step()
        losses.append(tested(model, kind, test))
    return copy.deepcopy(model.state_dict()), losses


@torch.no_grad()
def tested(model: nn.Module, kind: type[nn.Module], test: TensorDataset) -> float:
    """The loss of the test data, read from its beginning."""
    fresh = kind().eval()
    fresh.load_state_dict(model.state_dict())
    if isinstance(model, Counting):
        fresh.calls = model.calls
    total = 0.0
    for at in range(0, len(test), COLUMNS):
        batch = test[at : at + COLUMNS]
        total += float(step(fresh, batch)) * len(batch[0])
    return total / len(test)
