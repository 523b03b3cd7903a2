"""torch's DataLoader, taken apart: what it reads, in which order, and into what batches."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
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
    divisions = [_division(loader, is_test=loader is not train) for loader in both]
    datasets = tuple(
        _in_its_order(
            loader,
            sampler,
            len(sampler) % size if leaves_rest and hasattr(sampler, "__len__") else 0,
            is_test=loader is not train,
        )
        for loader, (sampler, size, leaves_rest) in zip(both, divisions, strict=True)
    )
    sampler, batch_size, _ = divisions[0]
    return Loaded(
        data=datasets if len(datasets) == 2 else datasets[0],
        batch_size=batch_size,
        shuffle=datasets[0] is train.dataset and _shuffles(sampler),
        collate_fn=collates[0],
        processes=train.num_workers,
    )


def _collate_fn(loader: Any) -> Any:
    from torch.utils.data import default_collate

    return None if loader.collate_fn is default_collate else loader.collate_fn


def _division(loader: Any, *, is_test: bool) -> tuple[Any, int, bool]:
    """The sampler, the samples of a batch, and whether a smaller last one is left out."""
    from torch.utils.data import BatchSampler, IterableDataset

    whole = loader.batch_sampler
    if isinstance(loader.dataset, IterableDataset) and loader.batch_size is not None:
        return loader.sampler, loader.batch_size, loader.drop_last
    if whole is None:
        raise DataError(
            "the DataLoader has batch_size=None, so its samples are batches already: give it a"
            " batch_size, and a collate_fn if torch's own will not do"
        )
    if type(whole) is BatchSampler:
        return whole.sampler, whole.batch_size, whole.drop_last
    flat = Flattened(whole, is_test=is_test)
    return flat, flat.batch_size, False


class Flattened:
    """The samples of a batch_sampler of the user's own, one after the other.

    Cut into batches of the same size again they are the batches as given: all of them must have
    that size, but for a smaller last one. For an evaluation (`is_test`) batches may be of any size.
    """

    def __init__(self, whole: Any, *, is_test: bool) -> None:
        from paceline.data.items import random_kept

        self._whole, self._is_test = whole, is_test
        try:
            self._length = len(whole)
        except TypeError:
            raise DataError(
                f"the batch_sampler {type(whole).__name__} has no length, so nobody knows how long"
                " an epoch is: give it a __len__ that says how many batches it has"
            ) from None
        with random_kept():
            batches = self._batches()
        self.batch_size = max((len(batch) for batch in batches), default=0)
        self._count = sum(len(batch) for batch in batches)
        if not self._count:
            raise DataError(f"the batch_sampler {type(whole).__name__} has no samples")
        self._check(batches)

    def __getattr__(self, name: str) -> Any:
        """What whoever draws asks a sampler for."""
        if name not in ("generator", "set_epoch"):
            raise AttributeError(name)
        for each in (self._whole, getattr(self._whole, "sampler", None)):
            if hasattr(each, name):
                return getattr(each, name)
        raise AttributeError(name)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        batches = self._batches()
        self._check(batches)
        return (int(number) for batch in batches for number in batch)

    def _batches(self) -> list[Any]:
        found = [list(batch) for batch in itertools.islice(iter(self._whole), self._length + 1)]
        if len(found) != self._length:
            many = "more" if len(found) > self._length else f"{len(found)}"
            raise DataError(
                f"the batch_sampler {type(self._whole).__name__} gives {many} batches, but its"
                f" length says {self._length}: make both the same"
            )
        return found

    def _check(self, batches: list[Any]) -> None:
        sizes = [len(batch) for batch in batches]
        if self._is_test or all(size == self.batch_size for size in sizes[:-1]):
            return
        other = next(size for size in sizes[:-1] if size != self.batch_size)
        raise DataError(
            f"the batch_sampler {type(self._whole).__name__} gives batches of {self.batch_size} and"
            f" of {other} samples, but all must be of one size, the last one at most: use a loop of"
            " your own with paceline.Pace, which takes batches of any size"
        )


def _shuffles(sampler: Any) -> bool:
    from torch.utils.data import RandomSampler

    return isinstance(sampler, RandomSampler)


def _in_its_order(loader: Any, sampler: Any, rest: int, *, is_test: bool) -> Any:
    """The dataset, with the loader's sampler where the order is not one that Paceline draws.

    `rest`: samples that are left out at the end of an epoch.
    """
    from torch.utils.data import IterableDataset, RandomSampler, SequentialSampler

    from paceline.data.ordered import Ordered

    dataset = loader.dataset
    if isinstance(dataset, IterableDataset):
        return dataset
    usual = type(sampler) is SequentialSampler
    if type(sampler) is RandomSampler:
        usual = not sampler.replacement and sampler.num_samples == len(dataset)
    if usual and (not rest or is_test):
        return dataset
    return Ordered(dataset, sampler, len(sampler) - rest)
