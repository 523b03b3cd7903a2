"""Every rank's part of each batch of a DataLoader, and which batch the loop is working on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from paceline.errors import ConfigError, DataError, UnsupportedError
from paceline.integrations.shares import PartSampler, samples_in, with_batches
from paceline.pace.ranks import Ranks

Part = tuple[float, float]
"""Samples of this rank's part of a batch, and of the whole batch."""


class Working:
    """The batches that loaders have handed out and that the loop is working on."""

    def __init__(self, waited: Callable[[float, float], None]) -> None:
        self.waited = waited
        """Told when a batch was asked for, and how many seconds it took to come."""
        self.parts: dict[int, Part] = {}
        self.handed = 0
        """How many there were so far."""
        self.since = time.perf_counter()
        """When the newest was handed out."""

    def part(self) -> Part | None:
        """Of the batch that is being worked on; None where there is none."""
        found = set(self.parts.values())
        if len(found) > 1:
            raise ConfigError(
                "several loaders have handed out batches of different sizes: say by what the loss"
                " is a mean, as pace.backward(loss, weight=len(inputs))"
            )
        return next(iter(found), None)


class Batches:
    """A DataLoader of one process, of whose batches each rank gets its part.

    What else it is asked for (`dataset`, `batch_size`) is the DataLoader's.
    """

    def __init__(
        self, loader: DataLoader[Any], ranks: Ranks, shares: list[float], working: Working
    ) -> None:
        self.loader, self._working = loader, working
        self._parts: PartSampler | None = None
        self._divided = loader
        streamed = isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None
        if not streamed:
            self._parts = PartSampler(loader.batch_sampler, shares, ranks.rank)
            self._divided = with_batches(loader, self._parts)
        if ranks.size == 1:
            return
        if streamed:
            raise UnsupportedError(
                "a stream, or a DataLoader with batch_size=None, has no batches that could be"
                " divided: give a map-style data set and a batch_size"
            )
        if isinstance(loader.sampler, DistributedSampler):
            raise UnsupportedError(
                "the DataLoader has a DistributedSampler, which divides it already, and in another"
                " order than one process has: leave it out, pace.prepare divides every batch"
            )
        self._refuse_small_rest(ranks.size)

    def _refuse_small_rest(self, ranks: int) -> None:
        """Now, and not after hours at the end of an epoch."""
        whole = self.loader.batch_sampler
        if type(whole) is not BatchSampler or whole.drop_last:
            return
        count, size = len(whole.sampler), whole.batch_size  # type: ignore[arg-type]
        smallest = min(size, count % size or size)
        if smallest < ranks:
            raise DataError(
                f"{count} samples in batches of {size} leave one of {smallest}, which cannot be"
                f" divided among {ranks} ranks: set drop_last=True, choose another batch_size, or"
                " start fewer ranks"
            )

    @property
    def generators(self) -> list[torch.Generator]:
        """Those whose state says how the next epoch is shuffled."""
        candidates = (
            self.loader.generator,
            getattr(self.loader.sampler, "generator", None),
            getattr(getattr(self.loader.batch_sampler, "sampler", None), "generator", None),
        )
        found = {id(each): each for each in candidates if isinstance(each, torch.Generator)}
        return list(found.values())

    def divide(self, shares: list[float]) -> None:
        """By other shares, from the next epoch on."""
        if self._parts is not None:
            self._parts.shares[:] = shares

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Any]:
        working, number = self._working, 0
        batches = iter(self._divided)
        key = id(batches)
        sizes: list[tuple[int, int]] | None = None
        try:
            while True:
                asked = time.perf_counter()
                try:
                    batch = next(batches)
                except StopIteration:
                    return
                if sizes is None:  # set when the order of the epoch is drawn, for the first batch
                    sizes = self._parts.sizes if self._parts is not None else []
                working.parts[key] = sizes[number] if sizes else _counted(batch)
                number += 1
                working.handed += 1
                working.since = time.perf_counter()
                working.waited(asked, working.since - asked)
                yield batch
        finally:
            working.parts.pop(key, None)


def _counted(batch: Any) -> Part:
    """Of a stream, which one process alone reads."""
    try:
        count = samples_in(batch)
    except DataError:
        count = 1.0
    return count, count
