"""Batches for one worker, read ahead while the model computes."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader

from paceline.data.base import Source
from paceline.data.readers import Balance, OnCopy, may_fork, own_cores
from paceline.data.sampler import GlobalSampler, apportion
from paceline.data.samples import Samples, Stacked
from paceline.errors import PacelineError
from paceline.gloo import settle

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One worker's part of one global batch."""

    samples: Samples
    total: int
    """Samples in the global batch that it belongs to."""
    read_seconds: float
    """What fetching took, ahead of time or not."""
    wait_seconds: float
    """How long the training loop stood still for it."""

    @property
    def count(self) -> int:
        """Samples in this part."""
        return self.samples.count

    @property
    def inputs(self) -> torch.Tensor:
        return self.samples.inputs

    @property
    def targets(self) -> torch.Tensor:
        return self.samples.targets


@dataclass(frozen=True, kw_only=True)
class Feed:
    """One worker's way through the training data."""

    source: Source
    sampler: GlobalSampler
    shares: Sequence[float]
    """Relative size of every worker's part."""
    worker: int
    least: int = 1
    """Fewest samples of a part that has any."""
    augment: bool = True
    reads_inputs: bool = True
    """False for a worker that gets its inputs from another one and needs targets only."""
    parts: Callable[[int], Sequence[int]] = lambda count: [count]
    """Into which parts the worker divides so many samples again."""
    ahead: int = 2
    """Batches that are read before they are asked for."""

    def epoch(self, epoch: int, first_step: int = 0) -> Generator[Batch]:
        """The batches of an epoch, from `first_step` on; closing it ends the reading."""
        steps = range(first_step, self.sampler.steps_per_epoch)
        # Drawn here, not in the reading thread: the sampler caches one epoch's order.
        plan = [
            (
                self.sampler.part(epoch, step, self.shares, self.worker, self.least),
                len(self.sampler.batch(epoch, step)),
            )
            for step in steps
        ]
        return self._read(plan, epoch=epoch, augment=self.augment)

    def _read(
        self, plan: list[tuple[np.ndarray, int]], *, epoch: int, augment: bool
    ) -> Generator[Batch]:
        def fetch_from(item: tuple[np.ndarray, int], source: Source) -> tuple[Samples, int, float]:
            indices, total = item
            start = time.perf_counter()
            if not self.reads_inputs and source.targets is not None:
                targets = torch.from_numpy(source.targets[indices])
                samples: Samples = Stacked(torch.empty(0), targets)
            else:
                sizes = self.parts(len(indices))
                samples = source.samples(indices, epoch=epoch, augment=augment, sizes=sizes)
            return samples, total, time.perf_counter() - start

        def fetch(item: tuple[np.ndarray, int]) -> tuple[Samples, int, float]:
            return fetch_from(item, self.source)

        if self.source.processes:
            readers = -(-self.source.processes // len(self.shares))
            results = _in_processes(fetch, plan, min(readers, max(1, len(plan))))
        elif self.source.may_be_copied and may_fork():
            results = self._as_fast_as_needed(fetch_from, plan)
        else:
            results = _ahead(fetch, plan, self.ahead if self.source.concurrent else 0)
        # Closed with this one: whoever reads ahead must not outlive it.
        with contextlib.closing(results):
            yield from self._timed(results)

    def _as_fast_as_needed(
        self,
        fetch: Callable[[tuple[np.ndarray, int], Source], tuple[Samples, int, float]],
        plan: list[tuple[np.ndarray, int]],
    ) -> Generator[tuple[Samples, int, float]]:
        """Here, until it shows that reading holds the training up; then by processes."""
        source, balance, at = self.source, Balance(), 0
        while at < len(plan) and not source.readers and source.may_be_copied:
            started = time.perf_counter()
            found = fetch(plan[at], source)
            read = time.perf_counter()
            yield found
            balance.add(read - started, time.perf_counter() - read)
            at += 1
            source.readers = balance.readers(own_cores(), len(plan) - at)
        rest = plan[at:]
        if rest and source.may_be_copied:
            try:
                on_copy = OnCopy(fetch, source)
            except Exception:  # whatever a class of the user's raises: it cannot be copied
                source.may_be_copied = False
            else:
                yield from _in_processes(on_copy, rest, min(source.readers, len(rest)))
                return
        for item in rest:
            yield fetch(item, source)

    def _timed(self, results: Generator[tuple[Samples, int, float]]) -> Generator[Batch]:
        while True:
            start = time.perf_counter()
            try:
                samples, total, seconds = next(results)
            except StopIteration:
                return
            yield Batch(
                samples=samples,
                total=total,
                read_seconds=seconds,
                wait_seconds=time.perf_counter() - start,
            )


def evaluation_batches(
    source: Source, *, batch_size: int, worker: int = 0, shares: Sequence[float] = (1.0,)
) -> Iterator[Batch]:
    """One worker's part of a test set, in order, without augmentation."""
    sizes = apportion(len(source), shares)
    start = sum(sizes[:worker])
    indices = np.arange(start, start + sizes[worker])
    pieces = [indices[i : i + batch_size] for i in range(0, len(indices), batch_size)]
    feed = Feed(
        source=source,
        sampler=GlobalSampler(samples=len(source), batch_size=batch_size, seed=0),
        shares=[1.0],
        worker=0,
    )
    return feed._read([(piece, len(piece)) for piece in pieces], epoch=0, augment=False)


class _Computed:
    """A dataset whose items are what a function makes of others."""

    def __init__(self, function: Callable[[Any], Any], items: Sequence[Any]) -> None:
        self._function, self._items = function, items

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Any:
        try:
            return self._function(self._items[index])
        except PacelineError as error:  # a DataLoader would wrap it in a traceback
            return error


def _in_processes(
    function: Callable[[Item], Result], items: Sequence[Item], count: int
) -> Generator[Result]:
    """`map`, computed ahead by a DataLoader's processes; errors arrive in order."""
    loader: DataLoader[Any] = DataLoader(
        _Computed(function, items),  # type: ignore[arg-type]
        batch_size=None,
        collate_fn=lambda value: value,
        num_workers=count,
        multiprocessing_context="fork",  # nothing need be pickled, and nothing is run again
    )
    settle()
    reading: Any = iter(loader)
    try:
        for found in reading:
            if isinstance(found, PacelineError):
                raise found
            yield found
    finally:
        reading._shutdown_workers()


def _ahead(
    function: Callable[[Item], Result], items: Iterable[Item], depth: int
) -> Generator[Result]:
    """`map`, computed up to `depth` items ahead in a thread; errors arrive in order."""
    if not depth:
        yield from map(function, items)
        return
    ready: queue.Queue[tuple[Result | None, BaseException | None, bool]] = queue.Queue(depth)
    stop = threading.Event()

    def put(entry: tuple[Result | None, BaseException | None, bool]) -> None:
        while not stop.is_set():
            try:
                ready.put(entry, timeout=0.1)
                return
            except queue.Full:
                continue

    def read() -> None:
        # One thread for the copy of a batch: more would take cores from the model.
        torch.set_num_threads(1)
        try:
            for item in items:
                if stop.is_set():
                    return
                put((function(item), None, False))
            put((None, None, True))
        except BaseException as error:
            put((None, error, True))

    thread = threading.Thread(target=read, name="paceline-feed", daemon=True)
    thread.start()
    try:
        while True:
            result, error, last = ready.get()
            if error is not None:
                raise error
            if last:
                return
            yield result  # type: ignore[misc]
    finally:
        stop.set()
        thread.join()
