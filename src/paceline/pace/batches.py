"""Every rank's part of each batch of a DataLoader, and which batch the loop is working on.

Of a map-style data set a rank fetches the samples of its part alone. A stream has no numbers to
fetch by: every rank reads all of it and collates its part, so batches are those of one process.
"""

from __future__ import annotations

import copy
import hashlib
import pickle
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Sampler,
)

from paceline.errors import DataError, UnsupportedError
from paceline.gloo import settle
from paceline.integrations.shares import (
    PartSampler,
    samples_in,
    span_of,
    tensors_in,
    with_batches,
)
from paceline.pace.legs import Legs
from paceline.pace.meter import Part, Working
from paceline.pace.ranks import Ranks


class Batches:
    """A DataLoader of one process, of whose batches each rank gets its part.

    What else it is asked for (`dataset`, `batch_size`) is the DataLoader's.
    """

    def __init__(
        self, loader: DataLoader[Any], ranks: Ranks, shares: list[float], working: Working,
        legs: Legs | None = None,
        following: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:  # fmt: skip
        """`following`: what the body of a loop runs in."""
        self._following = following
        self.loader, self._working, self._ranks, self._legs = loader, working, ranks, legs
        self._parts: PartSampler | None = None
        self._divided = loader
        self._shares = shares
        self._has_begun = False
        self._counted: _Counting | None = None
        streamed = isinstance(loader.dataset, IterableDataset)
        if not streamed and loader.batch_sampler is not None:
            if ranks.size == 1:
                self._counted = _Counting(loader.batch_sampler)
                self._divided = with_batches(loader, self._counted)
                return
            self._parts = PartSampler(loader.batch_sampler, shares, ranks.rank)
            self._divided = with_batches(loader, self._parts)
        if ranks.size == 1:
            return
        if loader.batch_size is None and self._parts is None:
            raise UnsupportedError(
                "a DataLoader with batch_size=None has no batches that could be divided: give it a"
                " batch_size"
            )
        if streamed:
            return
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
            getattr(self.loader.batch_sampler, "generator", None),
            getattr(getattr(self.loader.batch_sampler, "sampler", None), "generator", None),
        )
        found = {id(each): each for each in candidates if isinstance(each, torch.Generator)}
        return list(found.values())

    def divide(self, shares: list[float]) -> None:
        """By other shares, from the next epoch on."""
        self._shares = list(shares)
        if self._parts is not None:
            self._parts.shares[:] = shares

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Any]:
        working = self._working
        if self.loader.num_workers:
            settle()  # before processes are forked
        batches = self._handed_out()
        key = id(batches)
        try:
            while True:
                asked = time.perf_counter()
                try:
                    batch, working.parts[key] = next(batches)
                except StopIteration:
                    return
                working.handed += 1
                working.since = time.perf_counter()
                working.waited(asked, working.since - asked)
                with self._following():
                    yield batch
        finally:
            batches.close()
            working.parts.pop(key, None)

    def _handed_out(self) -> Generator[tuple[Any, Part]]:
        legs = self._legs
        if self._is_divided_stream:
            if legs is not None:
                legs.pin_down("a stream is read by all ranks together")
            return self._streamed()
        if legs is not None and legs.open(id(self)):
            return self._in_legs(legs)
        return self._fetched()

    def _in_legs(self, legs: Legs) -> Generator[tuple[Any, Part]]:
        """The batches on which this rank works; it waits while others work on the rest."""
        order = self._drawn()
        at, division = 0, None
        fetched: Iterator[Any] = iter(())
        try:
            while at < len(order):
                leg = legs.next(at, len(order))
                if leg is None:
                    return
                if self._ranks.rank not in leg.members:
                    at, division = leg.until, None
                    continue
                if division != (leg.members, leg.shares):
                    division = (leg.members, leg.shares)
                    place = leg.members.index(self._ranks.rank)
                    spans = [span_of(len(batch), leg.shares, place) for batch in order]
                    fetched = self._rest(
                        [batch[slice(*span)] for batch, span in zip(order, spans, strict=True)][at:]
                    )
                while at < leg.until:
                    legs.asks()
                    batch = next(fetched)
                    legs.handed(len(order[at]))
                    begin, end = spans[at]
                    at += 1
                    yield batch, (end - begin, len(order[at - 1]))
            legs.ended()
        except GeneratorExit:
            legs.left()
            raise

    def _drawn(self) -> list[list[int]]:
        """The order of an epoch, with the random numbers that a DataLoader draws for it."""
        assert self._parts is not None
        begun = self._parts.begun()
        if not (self.loader.persistent_workers and self._has_begun):
            torch.empty((), dtype=torch.int64).random_(generator=self.loader.generator)
        self._has_begun = True
        return self._parts.drawn(begun)

    def _rest(self, batches: list[list[int]]) -> Iterator[Any]:
        """What a DataLoader fetches of these; it draws no random numbers that others see."""
        rest = with_batches(self.loader, batches)  # type: ignore[arg-type]
        rest.__dict__.update(persistent_workers=False)
        before = torch.get_rng_state()
        own = self.loader.generator
        state = own.get_state() if own is not None else None
        try:
            return iter(rest)
        finally:
            torch.set_rng_state(before)
            if own is not None and state is not None:
                own.set_state(state)

    def _fetched(self) -> Generator[tuple[Any, Part]]:
        """This rank's part of each batch, and its size."""
        sizes: list[tuple[int, int]] | None = None
        for number, batch in enumerate(self._divided):
            if sizes is None:  # set when the order of the epoch is drawn, for the first batch
                found = self._parts or self._counted
                sizes = found.sizes if found is not None else []
            yield batch, sizes[number] if sizes else _counted(batch)

    @property
    def _is_divided_stream(self) -> bool:
        return self._ranks.size > 1 and self._parts is None

    def _streamed(self) -> Generator[tuple[Any, Part]]:
        """This rank's part of each batch of a stream that every rank reads, and its size."""
        divided = copy.copy(self.loader)
        part = _PartOfStream(self.loader.collate_fn, list(self._shares), self._ranks.rank)
        divided.__dict__.update(collate_fn=part, _iterator=None)
        batches, number = iter(divided), 0
        while True:
            found = next(batches, None)
            # One rank must not wait in a backward pass for another whose stream has ended.
            stamps = self._ranks.gather(None if found is None else [found[1], found[2]])
            if any(stamp != stamps[0] for stamp in stamps):
                raise DataError(
                    f"batch {number} of the stream is not the same on all ranks: let it read the"
                    " same samples in the same order in every process (draw from a generator with"
                    " a seed; do not divide it by rank)"
                )
            if found is None:
                return
            values, count, _, own = found
            if count < self._ranks.size:
                raise DataError(
                    f"batch {number} of the stream has {count} samples, which cannot be divided"
                    f" among {self._ranks.size} ranks: set drop_last=True on the DataLoader"
                )
            number += 1
            yield values, (own, count)


class _Counting(Sampler[list[int]]):
    """A sampler of batches as it is, whose batches are counted as they are drawn."""

    def __init__(self, whole: Any) -> None:
        self._whole = whole
        self.sizes: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self._whole)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)

    def __iter__(self) -> Iterator[list[int]]:
        return self._counting(iter(self._whole))

    def _counting(self, batches: Iterator[Any]) -> Iterator[list[int]]:
        sizes = self.sizes = []
        for batch in batches:
            found = list(batch)
            sizes.append((len(found), len(found)))
            yield found


class _PartOfStream:
    """Makes a batch of a rank's part of the samples alone; it may do so in a loader's worker."""

    def __init__(self, collate: Callable[[Any], Any], shares: list[float], rank: int) -> None:
        self._collate, self._shares, self._rank = collate, shares, rank

    def __call__(self, samples: list[Any]) -> tuple[Any, int, str, int]:
        """The part's batch, samples of the whole, what tells one first sample from another, and
        samples of the part."""
        count = len(samples)
        stamp = _stamp(samples[0])
        if count < len(self._shares):  # refused where all ranks can hear of it
            return None, count, stamp, 0
        begin, end = span_of(count, self._shares, self._rank)
        return self._collate(samples[begin:end]), count, stamp, end - begin


def _stamp(sample: Any) -> str:
    """Of a sample: enough to see that ranks read different ones."""
    content = hashlib.sha256()
    tensors = list(tensors_in(sample))
    for each in tensors:
        content.update(
            each.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        )
    if not tensors:
        content.update(pickle.dumps(sample))
    return content.hexdigest()[:16]


def _counted(batch: Any) -> Part:
    """Of a stream, which one process alone reads."""
    try:
        count = samples_in(batch)
    except DataError:
        count = 1.0
    return count, count
