"""Orders of the user's own (samplers, streams, shuffle=False): the weights of a plain loop."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
)

import paceline
from paceline.data.base import DataRequest
from paceline.data.loaders import taken_apart
from paceline.data.own import open_own
from paceline.errors import DataError

SAMPLES, BATCH, RATE = 38, 8, 0.1
ROUNDING = 1e-6
NODES: dict[str, dict[str, Any]] = {
    "sequential": {"local.strategy": "sequential"},
    "replicas": {"local.strategy": "replicas", "local.replicas": 2},
    "processes": {"local.strategy": "processes", "local.processes": 2},
}


def tensors() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(
        torch.randn(SAMPLES, 3, generator=generator), torch.randn(SAMPLES, 1, generator=generator)
    )


class Backwards(Sampler[int]):
    """Another order in every epoch, by `set_epoch`."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        return iter([(n + 5 * self.epoch) % SAMPLES for n in range(SAMPLES)][::-1])


class Groups(Sampler[list[int]]):
    """Batches of one's own: neighbours together, the batches themselves in another order."""

    def __init__(self, *sizes: int, length: int | None = None) -> None:
        self.sizes, self.length, self.epoch = sizes, length, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.sizes) if self.length is None else self.length

    def __iter__(self) -> Iterator[list[int]]:
        return iter(groups(self.sizes, self.epoch))


def groups(sizes: Sequence[int], epoch: int) -> list[list[int]]:
    ends = np.cumsum(sizes)
    found = [
        [(n + epoch) % SAMPLES for n in range(end - size, end)]
        for end, size in zip(ends, sizes, strict=True)
    ]
    return [*found[-2::-1], found[-1]]


class Stream(IterableDataset[Any]):
    """Shuffled through a buffer, as streams are."""

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[Any]:
        held: list[Any] = []
        for sample in tensors():
            held.append(sample)
            if len(held) == 5:
                yield held.pop(int(torch.randint(5, ())))
        yield from held


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from tensors()


def in_order() -> list[int]:
    return list(range(SAMPLES))


KINDS: dict[str, tuple[Any, Any]] = {
    "own batch sampler": (
        lambda: DataLoader(tensors(), batch_sampler=Groups(BATCH, BATCH, BATCH, 3)),
        lambda epoch: [n for batch in groups((BATCH, BATCH, BATCH, 3), epoch) for n in batch],
    ),
    "shuffle=False": (lambda: DataLoader(tensors(), batch_size=BATCH), lambda epoch: in_order()),
    "own sampler": (
        lambda: DataLoader(tensors(), batch_size=BATCH, sampler=Backwards()),
        lambda epoch: [(n + 5 * epoch) % SAMPLES for n in range(SAMPLES)][::-1],
    ),
    "drop_last": (
        lambda: DataLoader(tensors(), batch_size=BATCH, drop_last=True),
        lambda epoch: in_order()[: SAMPLES // BATCH * BATCH],
    ),
}


def step(model: nn.Module, batch: Any) -> torch.Tensor:
    inputs, wanted = batch
    return nn.functional.mse_loss(model(inputs), wanted)


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE)


def trained(data: Any, run: Path, node: str, **settings: Any) -> dict[str, torch.Tensor]:
    result = paceline.train(
        paceline.Workload(model=model, data=data, step=step, optimizer=sgd, batch_size=BATCH),
        epochs=2, run=run, silent=True,
        settings={**NODES[node], **settings},
    )  # fmt: skip
    return dict(result.model("latest").state_dict())


def plain(orders: list[list[int]]) -> dict[str, torch.Tensor]:
    whole, net = tensors(), model()
    optimizer = sgd(net.parameters())
    for order in orders:
        for at in range(0, len(order), BATCH):
            optimizer.zero_grad()
            step(net, whole[order[at : at + BATCH]]).backward()
            optimizer.step()
    return dict(net.state_dict())


def rows(data: Any, *, epoch: int, limit: int | None = None) -> list[list[float]]:
    """The inputs of an epoch in the order in which they are trained."""
    loaded = taken_apart(data)
    request = DataRequest(name="own", nested=True, seed=3, limit=limit)
    source = open_own(loaded.data if loaded is not None else data, request, "own").train
    batches = [np.arange(n, min(n + BATCH, len(source))) for n in range(0, len(source), BATCH)]
    return [
        row
        for batch in batches
        for row in source.samples(batch, epoch=epoch, augment=True).values[0].tolist()
    ]


def numbers(found: list[list[float]]) -> list[int]:
    """Which samples these are."""
    known = {tuple(row): n for n, row in enumerate(tensors().tensors[0].tolist())}
    return [known[tuple(row)] for row in found]


def beside_test(loader: Any) -> tuple[Any, Any]:
    return loader, DataLoader(tensors(), batch_size=BATCH)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "node", ["sequential", "replicas", pytest.param("processes", marks=pytest.mark.slow)]
)
def test_an_order_of_ones_own_is_trained_as_by_a_plain_loop(
    tmp_path: Path, kind: str, node: str
) -> None:
    make, order = KINDS[kind]
    found = trained(beside_test(make()), tmp_path / "run", node)
    wanted = plain([order(0), order(1)])
    allowed = 0.0 if node == "sequential" else ROUNDING
    assert max(float((found[k] - wanted[k]).abs().max()) for k in wanted) <= allowed


@pytest.mark.slow
@pytest.mark.parametrize("node", ["replicas", "processes"])
def test_streams_are_divided_exactly(tmp_path: Path, node: str) -> None:
    data = (Stream(), tensors())
    one = trained(data, tmp_path / "one", "sequential")
    found = trained(data, tmp_path / "two", node)
    assert max(float((found[k] - one[k]).abs().max()) for k in one) <= ROUNDING


def test_a_stream_is_the_same_for_every_worker_and_another_in_every_epoch() -> None:
    data = beside_test(DataLoader(Stream(), batch_size=BATCH))
    first = numbers(rows(data, epoch=0))
    assert sorted(first) == list(range(SAMPLES)) != first
    assert first == numbers(rows(data, epoch=0))
    assert first != numbers(rows(data, epoch=1))
    source = open_own((Stream(), tensors()), DataRequest(name="own", nested=True, seed=3), "own")
    parts = [source.train.samples(np.arange(n, n + 2), epoch=0, augment=True) for n in (30, 8, 12)]
    assert numbers([row for part in parts for row in part.values[0].tolist()]) == [
        *first[30:32], *first[8:10], *first[12:14],
    ]  # fmt: skip


def test_samplers_that_draw_follow_the_seed_and_the_epoch() -> None:
    for sampler in (
        WeightedRandomSampler([1.0] * 5 + [0.0] * (SAMPLES - 5), 20),
        WeightedRandomSampler([1.0] * 5 + [0.0] * 33, 20, generator=torch.Generator()),
        RandomSampler(range(5), replacement=True, num_samples=20),
    ):
        data = beside_test(DataLoader(tensors(), batch_size=BATCH, sampler=sampler))
        found = numbers(rows(data, epoch=0))
        assert len(found) == 20
        assert set(found) <= set(range(5))
        assert found == numbers(rows(data, epoch=0)) != numbers(rows(data, epoch=1))


class Counting(Sampler[int]):
    """Changes with every call, which no seed and no epoch explain."""

    calls = 0

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        self.calls += 1
        return iter(np.roll(np.arange(SAMPLES), self.calls).tolist())


REFUSED: dict[str, tuple[Any, str]] = {
    "changing sampler": (
        beside_test(DataLoader(tensors(), batch_size=BATCH, sampler=Counting())),
        "draws another order each time",
    ),
    "sampler alone": (
        DataLoader(tensors(), batch_size=BATCH, sampler=Backwards()), "give a pair (train, test)",
    ),
    "stream alone": (Stream(), "give a pair (train, test)"),
    "endless stream": ((Endless(), tensors()), "data.limit"),
    "uneven batches": (
        DataLoader(tensors(), batch_sampler=[[0, 1], [2, 3, 4], [5]]),
        "gives batches of 3 and of 2 samples",
    ),
    "more batches than said": (
        DataLoader(tensors(), batch_sampler=Groups(2, 2, 2, length=2)), "gives more batches",
    ),
    "batch sampler without a length": (
        DataLoader(tensors(), batch_sampler=(batch for batch in [[0]])), "has no length",
    ),
    "no batches": (DataLoader(tensors(), batch_size=None), "batch_size=None"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_certain_order_is_refused(case: str) -> None:
    data, sentence = REFUSED[case]
    with pytest.raises(DataError, match=re.escape(sentence)):
        rows(data, epoch=0)


def test_an_endless_stream_has_epochs_of_a_given_length() -> None:
    assert numbers(rows((Endless(), tensors()), epoch=1, limit=45)) == [
        n % SAMPLES for n in range(45)
    ]


class Short(Stream):
    def __len__(self) -> int:
        return SAMPLES + 3


def test_a_stream_that_ends_too_early_is_said() -> None:
    with pytest.raises(DataError, match=f"ended after {SAMPLES} samples"):
        rows((Short(), tensors()), epoch=0)
