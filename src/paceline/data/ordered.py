"""Data whose order is the user's own: what a sampler draws, and streams.

Here a sample's number is its place in an epoch, and places are taken in order. So a batch is still
the pair (epoch, step) that any worker can be asked for, and a resumed run goes on in the middle.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from paceline.data.base import Source
from paceline.data.items import CollatedSource, MapSource, random_kept, seed_all
from paceline.data.splits import ORDER_STREAM
from paceline.errors import DataError

if TYPE_CHECKING:
    from paceline.data.samples import Samples


@dataclass(frozen=True)
class Ordered:
    """A map-style dataset, and the sampler that says which samples an epoch has."""

    dataset: Any
    sampler: Any
    count: int
    """Samples of an epoch that are used: fewer than the sampler draws where the last are left."""

    @property
    def described_as(self) -> Any:
        """By what a run knows it."""
        return self.dataset


class OrderedSource(Source):
    """Samples of another source in the order in which a sampler of the user's own draws them.

    It draws from torch's, numpy's and Python's global generators, or from a `generator` of its own:
    these are seeded from (seed, epoch), and `set_epoch` is called where there is one.
    """

    ordered = True

    def __init__(self, source: Source, ordered: Ordered, *, seed: int, what: str) -> None:
        self._source, self._ordered, self._seed, self._what = source, ordered, seed, what
        self.sample_shape, self.sample_dtype = source.sample_shape, source.sample_dtype
        self.concurrent, self.processes = source.concurrent, source.processes
        self.may_be_copied = source.may_be_copied
        self._epoch, self._numbers = -1, np.empty(0, dtype=np.int64)
        if not np.array_equal(self._drawn(0), self._drawn(0)):
            raise DataError(
                f"{what}: the sampler {type(ordered.sampler).__name__} draws another order each"
                " time it is asked for the same epoch, so workers would disagree: let it draw from"
                " torch's random numbers, or by set_epoch"
            )

    def __len__(self) -> int:
        return self._ordered.count

    @property
    def listed(self) -> np.ndarray | None:
        """The class of every sample of the data set, whether it is drawn or not."""
        return self._source.labels

    def _drawn(self, epoch: int) -> np.ndarray:
        sampler, count = self._ordered.sampler, self._ordered.count
        word = int(np.random.SeedSequence([self._seed, ORDER_STREAM, epoch]).generate_state(1)[0])
        with random_kept(), _own_generator(sampler, word):
            seed_all(word)
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
            numbers = np.array([int(number) for number in sampler], dtype=np.int64)
        if len(numbers) < count:
            raise DataError(
                f"{self._what}: the sampler {type(sampler).__name__} drew {len(numbers)} samples"
                f" for epoch {epoch}, but its length says {count}: make both the same"
            )
        outside = numbers[(numbers < 0) | (numbers >= len(self._source))]
        if len(outside):
            raise DataError(
                f"{self._what}: the sampler {type(sampler).__name__} drew sample {outside[0]}, but"
                f" the data set has {len(self._source)}"
            )
        return numbers[:count]

    def _of(self, epoch: int, places: np.ndarray) -> np.ndarray:
        if epoch != self._epoch:
            self._epoch, self._numbers = epoch, self._drawn(epoch)
        return np.asarray(self._numbers[places])

    def fetch(
        self, indices: np.ndarray, *, epoch: int, augment: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._source.fetch(self._of(epoch, indices), epoch=epoch, augment=augment)

    def samples(
        self, indices: np.ndarray, *, epoch: int, augment: bool, sizes: Sequence[int] = ()
    ) -> Samples:
        numbers = self._of(epoch, indices)
        return self._source.samples(numbers, epoch=epoch, augment=augment, sizes=sizes)

    def close(self) -> None:
        self._source.close()


@contextlib.contextmanager
def _own_generator(sampler: Any, word: int) -> Iterator[None]:
    own = getattr(sampler, "generator", None)
    if not isinstance(own, torch.Generator):
        yield
        return
    before = own.get_state()
    own.manual_seed(word)
    try:
        yield
    finally:
        own.set_state(before)


class _Reading:
    """A stream as something with numbers: its samples are read in order and the others dropped."""

    def __init__(self, stream: Any, length: int, what: str) -> None:
        self._stream, self._length, self._what = stream, length, what
        self.begin()

    def __getstate__(self) -> dict[str, Any]:
        """Without what was begun to be read, which belongs to a process."""
        return vars(self) | {"_iterator": None, "place": 0}

    def begin(self) -> None:
        """From the start again, when the next sample is asked for."""
        self.process = os.getpid()
        self._iterator: Iterator[Any] | None = None
        self.place = 0
        """Of the sample that is read next."""

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, place: int) -> Any:
        """The next sample, whose number must be `place`: who asks reads in order."""
        if self._iterator is None:
            self._iterator = iter(self._stream)
        assert place == self.place
        self.place += 1
        try:
            return next(self._iterator)
        except StopIteration:
            self.begin()
            raise DataError(
                f"{self._what} ended after {place} samples, but an epoch has {self._length}: let"
                " its __len__, or data.limit, say how many there are"
            ) from None


class _Streaming(MapSource):
    """Reads up to the samples that are wanted; every worker reads the whole stream."""

    ordered = True
    may_be_copied = False  # each copy would read all of it
    _reading_epoch: int | None = None

    def _drawn(self, indices: np.ndarray, epoch: int) -> list[Any]:
        reading: _Reading = self._dataset
        wanted = np.asarray(indices).tolist()
        # A process that was forked has the files of the one before it, at the same place.
        forked = reading.process != os.getpid()
        if epoch != self._reading_epoch or min(wanted) < reading.place or forked:
            reading.begin()
            self._reading_epoch = epoch
        found: dict[int, Any] = {}
        kept = set(wanted)
        # One by one, each with random numbers that follow from its place, wanted or not: a stream
        # that shuffles or augments gives every worker the same.
        for start in range(reading.place, max(wanted) + 1, CHUNK):
            places = np.arange(start, min(start + CHUNK, max(wanted) + 1))
            items = super()._drawn(places, epoch)
            found |= {n: item for n, item in zip(places.tolist(), items, strict=True) if n in kept}
        return [found[number] for number in wanted]


CHUNK = 256
"""Samples that are read before those that nobody wants are dropped."""


class StreamSource(_Streaming):
    """A stream of pairs (input, target)."""


class CollatedStream(_Streaming, CollatedSource):
    """A stream of samples of any structure, of which a function makes batches."""


def stream_length(stream: Any, limit: int | None, what: str) -> int:
    """Samples of an epoch."""
    try:
        known = len(stream)
    except TypeError:
        known = None
    if limit is None and known is None:
        raise DataError(
            f"{what} is a stream without a length: give it a __len__, or say with data.limit how"
            " many of its samples make an epoch"
        )
    length = min(n for n in (known, limit) if n is not None)
    if length < 1:
        raise DataError(f"{what} is empty; training needs at least one sample")
    return length


def as_stream(
    stream: Any, limit: int | None, *, collate: Any, nested: bool, seed: int, what: str
) -> Source:
    """A source over an IterableDataset."""
    reading = _Reading(stream, stream_length(stream, limit, what), what)
    if nested:
        return CollatedStream(reading, collate, seed=seed, what=what)
    return StreamSource(reading, seed=seed, what=what)
