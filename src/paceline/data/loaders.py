"""torch's DataLoader, taken apart: what it reads, in which order, and into what batches."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from paceline.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What DataLoaders say of the data."""

    data: Any
    """The dataset, or the pair (train, test) of them."""
    batch_size: int
    shuffle: bool
    collate_fn: Any
    """None for torch's own."""
    processes: int
    """Its `num_workers`."""


def is_loader(value: Any) -> bool:
    """Whether it is a DataLoader: then torch has been imported."""
    torch_data = sys.modules.get("torch.utils.data")
    return torch_data is not None and isinstance(value, torch_data.DataLoader)


def taken_apart(value: Any) -> Loaded | None:
    """What a DataLoader, or a pair (train, test) of them, says; None for anything else."""
    both = value if isinstance(value, tuple) else (value,)
    if not any(map(is_loader, both)):
        return None
    if not all(map(is_loader, both)) or len(both) > 2:
        raise DataError("data has a DataLoader beside something else: give one, or (train, test)")
    train = both[0]
    collates = [_collate_fn(loader) for loader in both]
    if any(collate is not collates[0] for collate in collates):
        raise DataError(
            "the two DataLoaders have different collate_fns: give both the same, which sees"
            " model.training in the step if it must tell them apart"
        )
    datasets = tuple(_in_its_order(loader, is_test=loader is not train) for loader in both)
    return Loaded(
        data=datasets if len(datasets) == 2 else datasets[0],
        batch_size=train.batch_size,
        shuffle=datasets[0] is train.dataset and _shuffles(train),
        collate_fn=collates[0],
        processes=train.num_workers,
    )


def _collate_fn(loader: Any) -> Any:
    from torch.utils.data import default_collate

    return None if loader.collate_fn is default_collate else loader.collate_fn


def _shuffles(loader: Any) -> bool:
    from torch.utils.data import RandomSampler

    return isinstance(loader.sampler, RandomSampler)


def _in_its_order(loader: Any, *, is_test: bool) -> Any:
    """The dataset, with the loader's sampler where the order is not one that Paceline draws."""
    from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, SequentialSampler

    from paceline.data.ordered import Ordered

    dataset, sampler = loader.dataset, loader.sampler
    if loader.batch_size is None:
        raise DataError(
            "the DataLoader has a batch_sampler of its own, or batch_size=None: give it a"
            " batch_size, and a sampler if the order is to be your own"
        )
    if isinstance(dataset, IterableDataset):
        return dataset
    if type(loader.batch_sampler) is not BatchSampler:
        raise DataError(
            "the DataLoader has a batch_sampler of its own: leave it out, and give a sampler and a"
            " batch_size"
        )
    usual = type(sampler) is SequentialSampler
    if type(sampler) is RandomSampler:
        usual = not sampler.replacement and sampler.num_samples == len(dataset)
    rest = len(sampler) % loader.batch_size if loader.drop_last else 0
    if usual and (not rest or is_test):
        return dataset
    return Ordered(dataset, sampler, len(sampler) - rest)
