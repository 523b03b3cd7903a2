"""Parts of batches, and the factor by which their gradients add up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset

from paceline.errors import ConfigError, DataError, UnsupportedError
from paceline.integrations.shares import PartSampler, Shares, _parts, samples_in, with_batches


def batches(loader: DataLoader[Any]) -> list[list[int]]:
    return [list(batch) for batch in loader.batch_sampler or ()]


def numbers(count: int = 22, size: int = 8, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(count)), batch_size=size, **options)


def test_the_parts_of_all_ranks_are_the_batch() -> None:
    whole = batches(numbers())
    parts = [list(PartSampler(numbers().batch_sampler, [3, 1], rank)) for rank in (0, 1)]
    assert [a + b for a, b in zip(*parts, strict=True)] == whole
    assert [len(part) for part in parts[0]] == [6, 6, 5]


def test_no_rank_goes_without() -> None:
    assert _parts(5, [100, 1]) == [4, 1]
    assert _parts(2, [1, 1]) == [1, 1]
    assert sum(_parts(17, [1, 50, 1])) == 17
    with pytest.raises(DataError, match="a batch of 1 cannot be divided among 2 ranks"):
        _parts(1, [1, 1])


def test_one_process_keeps_its_own_order() -> None:
    """Divided for one rank, a loader gives what it gives undivided, with the same seed."""
    torch.manual_seed(3)
    whole = [batch[0].tolist() for batch in numbers(shuffle=True)]
    torch.manual_seed(3)
    loader = Shares().divide(numbers(shuffle=True))
    # DataLoader draws a seed for its workers before the sampler draws its own.
    assert [batch[0].tolist() for batch in loader] == whole
    sampler = loader.batch_sampler.sampler  # type: ignore[union-attr]
    assert isinstance(sampler, RandomSampler)
    assert sampler.generator is None


def test_a_copy_of_a_loader_keeps_its_class_and_settings() -> None:
    class Own(DataLoader[Any]):
        pass

    def collate(samples: list[Any]) -> Any:
        return samples

    loader = Own(TensorDataset(torch.arange(6)), batch_size=2, collate_fn=collate)
    found = with_batches(loader, PartSampler(loader.batch_sampler, [1.0], 0))
    assert type(found) is Own
    assert found.collate_fn is collate
    assert batches(loader) == batches(found)
    assert not isinstance(loader.batch_sampler, PartSampler)


def test_what_cannot_be_divided_is_refused() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    for loader in (DataLoader(Stream(), batch_size=2), numbers(size=None)):  # type: ignore[arg-type]
        with pytest.raises(UnsupportedError, match="give a map-style data set and a batch_size"):
            Shares().divide(loader)


def test_weights_of_batches() -> None:
    assert samples_in([torch.zeros(3, 2), torch.zeros(4)]) == 3.0
    assert samples_in({"text": ["a", "b"], "more": (torch.zeros(2),)}) == 2.0
    for batch in ({"text": ["a"]}, torch.tensor(1.0), 5):
        with pytest.raises(DataError, match="give weight="):
            samples_in(batch)
    shares = Shares(weight=lambda batch: -1)
    with pytest.raises(DataError, match="the weight of a batch is -1"):
        shares.weigh(torch.zeros(2))


def test_alone_nothing_is_scaled() -> None:
    shares = Shares([3, 1])
    shares.check_model(nn.BatchNorm1d(3))
    loss = torch.tensor(2.0)
    for batch in shares.batches([torch.zeros(4)]):
        assert batch.shape == (4,)
        assert shares.scale(loss) is loss


def test_shares_must_fit_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shares, "ranks", 2)
    assert Shares().numbers() == [1.0, 1.0]
    monkeypatch.setenv("PACELINE_SHARES", "2,1")
    assert Shares().numbers() == [2.0, 1.0]
    assert Shares([5, 1]).numbers() == [5.0, 1.0]
    for given, reason in (([1, 2, 3], "are 3, but there are 2 ranks"), ([1, 0], "above 0")):
        with pytest.raises(ConfigError, match=reason):
            Shares(given).numbers()
    with pytest.raises(UnsupportedError, match=r"layer '1' is a BatchNorm1d"):
        Shares().check_model(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    Shares(exact=False).check_model(nn.BatchNorm1d(2))
