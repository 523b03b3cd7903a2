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
    _check(train)
    datasets = tuple(loader.dataset for loader in both)
    return Loaded(
        data=datasets if len(datasets) == 2 else datasets[0],
        batch_size=train.batch_size,
        shuffle=_shuffles(train),
        collate_fn=collates[0],
        processes=train.num_workers,
    )


def _collate_fn(loader: Any) -> Any:
    from torch.utils.data import default_collate

    return None if loader.collate_fn is default_collate else loader.collate_fn


def _shuffles(loader: Any) -> bool:
    from torch.utils.data import RandomSampler

    return isinstance(loader.sampler, RandomSampler)


def _check(loader: Any) -> None:
    """Refuse what would be trained in another order, or on other samples."""
    from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, SequentialSampler

    sampler, why = loader.sampler, ""
    if isinstance(loader.dataset, IterableDataset):
        why = "streams (an IterableDataset), whose samples have no numbers: give a map-style one"
    elif type(loader.batch_sampler) is not BatchSampler:
        why = "has a batch_sampler of its own: leave it out, and give shuffle and batch_size"
    elif type(sampler) not in (RandomSampler, SequentialSampler):
        why = f"has a sampler of its own ({type(sampler).__name__}): use shuffle=True or False"
    elif isinstance(sampler, RandomSampler) and (
        sampler.replacement or sampler.num_samples != len(loader.dataset)
    ):
        why = "draws samples with replacement, or not all of them: use shuffle=True"
    elif loader.drop_last and len(loader.dataset) % loader.batch_size:
        why = (
            "leaves samples out (drop_last=True), which Paceline trains as a smaller batch: leave"
            " it out, or use a batch_size that divides the samples"
        )
    if why:
        raise DataError(f"the DataLoader {why}")
