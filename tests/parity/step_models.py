"""Steps as users write them, with the data they take, and a plain loop that knows nothing of us."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset
from torch.utils.data import default_collate as collated

SAMPLES, BATCH, EPOCHS, RATE = 41, 15, 2, 0.05
CLASSES, WORDS, IGNORED = 3, 11, -100
CLASS_WEIGHTS = torch.tensor([1.0, 7.0, 0.2])


def drawn() -> torch.Generator:
    return torch.Generator().manual_seed(3)


POINTS = torch.randn(SAMPLES, 4, generator=drawn())
LABELS = torch.randint(CLASSES, (SAMPLES,), generator=drawn())
POINTS_SET = TensorDataset(POINTS, LABELS)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, CLASSES))

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        return self.layers(points)


class Normalised(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, CLASSES)
        )


class Texts(torch.utils.data.Dataset[Any]):
    """Words of different lengths, and the next word of each."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(index)
        length = 1 + index * 7 % 9
        words = torch.randint(WORDS, (length + 1,), generator=generator)
        return {"words": words[:-1], "next": words[1:], "name": f"text {index}"}


def padded(items: list[dict[str, Any]]) -> dict[str, Any]:
    """As long as the longest text of this batch; `seen` marks what is no padding."""
    longest = max(len(item["words"]) for item in items)

    def rows(key: str, fill: int) -> torch.Tensor:
        fills = [functional.pad(i[key], (0, longest - len(i[key])), value=fill) for i in items]
        return torch.stack(fills)

    return {
        "words": rows("words", 0),
        "next": rows("next", IGNORED),
        "names": [item["name"] for item in items],
    }


class Packed(NamedTuple):
    """All texts of a batch end to end: nothing can be split along its first dimension."""

    words: torch.Tensor
    following: torch.Tensor
    lengths: list[int]


def packed(items: list[dict[str, Any]]) -> Packed:
    return Packed(
        torch.cat([item["words"] for item in items]),
        torch.cat([item["next"] for item in items]),
        [len(item["words"]) for item in items],
    )


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, 6)
        self.head = nn.Linear(6, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.table(words)))


@dataclass
class Pair:
    left: torch.Tensor
    right: torch.Tensor
    wanted: torch.Tensor


class Pairs(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return POINTS[index], POINTS[-1 - index, :2], POINTS[index].sum(), index % 3


def paired(items: list[Any]) -> Pair:
    left, right, wanted, _ = collated(items)
    return Pair(left, right, wanted)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 5), nn.Linear(2, 5)
        self.head = nn.Linear(5, 2)

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> tuple[Any, Any]:
        both = self.head(torch.tanh(self.left(left) + self.right(right)))
        return both[:, 0], both[:, 1]


# --- steps -------------------------------------------------------------------


def plain_step(model: nn.Module, batch: Any) -> Any:
    inputs, targets = batch
    return functional.cross_entropy(model(inputs), targets)


def smoothed_step(model: nn.Module, batch: Any) -> Any:
    inputs, targets = batch
    return functional.cross_entropy(model(inputs), targets, label_smoothing=0.1)


def weighted_step(model: nn.Module, batch: Any) -> Any:
    inputs, targets = batch
    loss = functional.cross_entropy(model(inputs), targets, weight=CLASS_WEIGHTS)
    return {"loss": loss, "weight": CLASS_WEIGHTS[targets].sum()}


def forgetful_step(model: nn.Module, batch: Any) -> Any:
    """Class weights, but no word of them."""
    return weighted_step(model, batch)["loss"]


def summed_step(model: nn.Module, batch: Any) -> Any:
    inputs, targets = batch
    loss = functional.cross_entropy(model(inputs), targets, reduction="sum") / 10
    return {"loss": loss, "weight": "sum"}


def decayed_step(model: nn.Module, batch: Any) -> Any:
    """With a term of the parameters alone."""
    return plain_step(model, batch) + 0.05 * sum(p.square().sum() for p in model.parameters())


def padded_step(model: nn.Module, batch: Any) -> Any:
    outputs, wanted = model(batch["words"]).flatten(0, 1), batch["next"].flatten()
    loss = functional.cross_entropy(outputs, wanted, ignore_index=IGNORED)
    seen = wanted != IGNORED
    right = ((outputs.argmax(dim=1) == wanted) & seen).sum()
    return {"loss": loss, "weight": seen.sum(), "accuracy": right, "texts": (1.0, 2.0)}


def rarely_step(model: nn.Module, batch: Any) -> Any:
    """Most samples are left out; a part of a batch may have none that counts."""
    inputs, targets = batch
    wanted = torch.where(inputs[:, 0] > 0.9, targets, IGNORED)
    loss = functional.cross_entropy(model(inputs), wanted, ignore_index=IGNORED)
    return {"loss": loss, "weight": (wanted != IGNORED).sum()}


def packed_step(model: nn.Module, batch: Any) -> Any:
    loss = functional.cross_entropy(model(batch.words), batch.following)
    return {"loss": loss, "weight": sum(batch.lengths)}


def regression_step(model: nn.Module, batch: Any) -> Any:
    first, second = model(batch.left, batch.right)
    loss = functional.mse_loss(first, batch.wanted) + 0.3 * second.square().mean()
    return {"loss": loss, "mae": ((first - batch.wanted).abs().sum(), len(first))}


def weighted_loss(outputs: torch.Tensor, targets: torch.Tensor) -> Any:
    loss = functional.cross_entropy(outputs, targets, weight=CLASS_WEIGHTS)
    return {"loss": loss, "weight": CLASS_WEIGHTS[targets].sum()}


def summed_loss(outputs: torch.Tensor, targets: torch.Tensor) -> Any:
    loss = functional.cross_entropy(outputs, targets, reduction="sum") / 10
    return {"loss": loss, "weight": "sum"}


def smoothed_loss(outputs: torch.Tensor, targets: torch.Tensor) -> Any:
    return functional.cross_entropy(outputs, targets, label_smoothing=0.1)


def ignoring_loss(outputs: torch.Tensor, targets: torch.Tensor) -> Any:
    wanted = torch.where(targets == 0, IGNORED, targets)
    loss = functional.cross_entropy(outputs, wanted, ignore_index=IGNORED)
    return {"loss": loss, "weight": (wanted != IGNORED).sum()}


def texts(**_: Any) -> tuple[Any, Any]:
    """For configurations, which name it."""
    return Texts(), Texts()


def points(**_: Any) -> tuple[Any, Any]:
    return POINTS_SET, POINTS_SET


@dataclass(frozen=True)
class Task:
    """A model, its data, and a step or a loss."""

    step: Callable[..., Any] | None = None
    model: Callable[[], nn.Module] = Net
    data: Any = POINTS_SET
    collate: Callable[[list[Any]], Any] | None = None
    loss: Callable[..., Any] | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    def called(self, model: nn.Module, batch: Any) -> Any:
        if self.step is not None:
            return self.step(model, batch)
        assert self.loss is not None
        return self.loss(model(batch[0]), batch[1])


TASKS = {
    "plain": Task(plain_step),
    "label smoothing": Task(smoothed_step),
    "class weights": Task(weighted_step),
    "sum": Task(summed_step),
    "a parameter term": Task(decayed_step),
    "padding": Task(padded_step, Reader, Texts(), padded),
    "end to end": Task(packed_step, Reader, Texts(), packed),
    "few that count": Task(rarely_step),
    "two inputs": Task(regression_step, TwoInputs, Pairs(), paired),
    "class weights, BatchNorm": Task(weighted_step, Normalised),
    "loss with class weights": Task(loss=weighted_loss),
    "loss that is a sum": Task(loss=summed_loss),
    "loss with label smoothing": Task(loss=smoothed_loss),
    "loss with ignore_index": Task(loss=ignoring_loss),
}


def order(epoch: int) -> np.ndarray:
    """The order in which Paceline takes the samples of an epoch, with seed 0."""
    return np.random.default_rng([0, epoch]).permutation(SAMPLES)


def plain_loop(task: Task, *, clip_norm: float | None = None) -> dict[str, torch.Tensor]:
    """What anyone would write: whole batches, one process, one thread."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = task.model().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    for epoch in range(EPOCHS):
        for start in range(0, SAMPLES, BATCH):
            items = [task.data[int(number)] for number in order(epoch)[start : start + BATCH]]
            found = task.called(model, (task.collate or collated)(items))
            optimizer.zero_grad()
            (found["loss"] if isinstance(found, dict) else found).backward()
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            optimizer.step()
    return model.state_dict()
