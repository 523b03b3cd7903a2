"""Seeded splits and subsets: pure functions of targets, fraction and seed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paceline.data.base import Skipped, Source

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from paceline.data.samples import Samples

# Keeps the streams of random numbers apart that are drawn from one seed.
SPLIT_STREAM, LIMIT_STREAM, FLIP_STREAM, ITEM_STREAM, ORDER_STREAM = 1, 2, 3, 4, 5


def stratified_split(
    targets: np.ndarray, fraction: float, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of the training and the test samples, each class split in the same proportion.

    A class with at least two samples has at least one on each side; a class with one sample
    is trained on.
    """
    generator = np.random.default_rng([seed, SPLIT_STREAM])
    held_back = np.zeros(len(targets), dtype=bool)
    for label in np.unique(targets):
        members = np.flatnonzero(targets == label)
        count = min(max(1, round(fraction * len(members))), len(members) - 1)
        held_back[generator.permutation(members)[:count]] = True
    return np.flatnonzero(~held_back), np.flatnonzero(held_back)


def plain_split(count: int, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of the training and the test samples where the classes are not known."""
    order = np.random.default_rng([seed, SPLIT_STREAM]).permutation(count)
    held_back = min(max(1, round(fraction * count)), count - 1)
    return np.sort(order[held_back:]), np.sort(order[:held_back])


class Subset(Source):
    """Some samples of another source, under new numbers."""

    def __init__(self, source: Source, numbers: np.ndarray) -> None:
        self.source = source
        self.numbers = np.asarray(numbers, dtype=np.int64)
        self.sample_shape = source.sample_shape
        self.sample_dtype = source.sample_dtype
        self.concurrent, self.processes = source.concurrent, source.processes
        self.ordered, self.may_be_copied = source.ordered, source.may_be_copied
        if source.targets is not None:
            self.targets = source.targets[self.numbers]

    def __len__(self) -> int:
        return len(self.numbers)

    def fetch(
        self, indices: np.ndarray, *, epoch: int, augment: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.source.fetch(self.numbers[indices], epoch=epoch, augment=augment)

    def samples(
        self, indices: np.ndarray, *, epoch: int, augment: bool, sizes: Sequence[int] = ()
    ) -> Samples:
        return self.source.samples(self.numbers[indices], epoch=epoch, augment=augment, sizes=sizes)

    @property
    def labels(self) -> np.ndarray | None:
        known = self.source.labels
        return None if known is None else known[self.numbers]

    # The counter belongs to the source below; two subsets of one source share it.
    @property
    def bytes_read(self) -> int:  # type: ignore[override]
        return self.source.bytes_read

    @property
    def skipped_while_reading(self) -> tuple[Skipped, ...]:
        return self.source.skipped_while_reading

    def close(self) -> None:
        self.source.close()


def limited(source: Source, limit: int | None, seed: int) -> Source:
    """The first `limit` samples of a seeded shuffle, or the source itself.

    Of data with an order of its own the first of that order.
    """
    if limit is None or limit >= len(source):
        return source
    if source.ordered:
        return Subset(source, np.arange(limit))
    order = np.random.default_rng([seed, LIMIT_STREAM]).permutation(len(source))
    return Subset(source, np.sort(order[:limit]))
